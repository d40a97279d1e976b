"""The page of the fresh seeds: which seeds count, what the six claims compare, and that chance rarely passes."""

import re
import shutil

import fresh
import longrun
import numpy as np
import pytest
from page import CURVES, ENTROPY, GREEDY, SWEEPS

from flows.sweep import statistics
from tests.sweep.planted import cell, leads, write

# Points over GSPO after 20 and after 40 iterations. RAFT's answers lose diversity.
PLANTED = {"gspo": (0, 0), "gspo_x2": (0.003, 0.005), "hacpo": (0.002, 0), "raft_foreign": (0.03, 0.02)}
ENTROPIES = {"gspo": 0.1, "gspo_x2": 0.1, "hacpo": 0.1, "raft_foreign": 0.08}
GREEDY_LEADS = {"gspo": (0.3,), "gspo_x2": (0.32,), "hacpo": (0.31,), "raft_foreign": (0.35,)}


def plant(folder, seeds, planted=PLANTED, entropies=ENTROPIES, without=(), size=0.002):
    cells, greedy = (
        [
            cell(method, seed, leads(ends, size), iterations=40, entropy=entropies[method])
            for seed in seeds
            for method in PLANTED
            if (method, seed) not in without
        ]
        for ends in (planted, GREEDY_LEADS)
    )
    write(folder, "even-fresh", cells, greedy)
    return fresh.complete(folder)


def test_the_six_claims_are_those_of_the_protocol(tmp_path):
    run = plant(tmp_path, range(225, 249))
    raft, raft_x2, raft_hacpo, hacpo, shrinks, entropy = fresh.claims(run)
    assert [a.answer for a in (raft, raft_x2, raft_hacpo, shrinks, entropy)] == ["yes"] * 5
    # HACPO was planted with no lead after 40 iterations.
    assert hacpo.answer == "no difference"
    for answered, points in ((raft, 2), (raft_x2, 1.5), (raft_hacpo, 2), (hacpo, 0), (shrinks, -1)):
        assert 100 * answered.difference.mean == pytest.approx(points, abs=0.15)
    assert entropy.difference.mean == pytest.approx(-0.02, abs=0.001)
    # Sampled sign patterns: none but the observed one reaches it. Six claims, the smallest p first.
    assert entropy.p == pytest.approx(6 / 2**16)
    protocol = (longrun.RESULTS / "protocol.md").read_text().split("# Addendum: every method tuned")[1]
    texts = re.findall(r"^\d\. (.*)\.$", protocol.split("**Also run")[0], re.M)
    assert len(texts) == fresh.STUDY.family == 6
    for text, answered in zip(texts, fresh.claims(run), strict=True):
        assert answered.text.split(" is ")[0].split(" iterations ")[-1] in text


def test_a_claim_the_other_way_is_answered_with_no(tmp_path):
    turned = PLANTED | {"raft_foreign": (-0.03, -0.02)}
    answered = fresh.claims(plant(tmp_path, range(225, 249), turned, ENTROPIES | {"raft_foreign": 0.12}))
    assert [a.answer for a in answered] == ["no", "no", "no", "no difference", "no", "no"]


def test_a_seed_counts_if_all_four_methods_have_it(tmp_path):
    run = plant(tmp_path, range(225, 239), without={("hacpo", 230), ("gspo_x2", 238)})
    assert run.seeds == tuple(s for s in range(225, 238) if s != 230)
    assert {a.difference.seeds for a in fresh.claims(run)} == {12}
    text = fresh.page(run, tmp_path)
    assert re.search(r"12 of the 24 planned seeds were complete .* 229, 231,", text, re.S)
    assert text.count("| 12 |") == 4
    # Greedy answers and agents alone have the same seeds.
    assert "of 14 up" not in text
    assert "of 13 up" not in text


def test_the_page_says_if_cells_are_of_several_versions(tmp_path):
    run = plant(tmp_path, range(225, 235))
    assert "several versions" not in fresh.page(run, tmp_path)
    file = tmp_path / "even-fresh-cells.csv"
    file.write_text(file.read_text().replace("0123456789", "abcdef0123", 1))
    assert "several versions of this project: 0123456789, abcdef0123." in re.sub(r"\s+", " ", fresh.page(run, tmp_path))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_few_seeds_show_no_difference_and_every_text_says_so(tmp_path, count):
    run = plant(tmp_path, range(225, 225 + count))
    assert not {a.answer for a in fresh.claims(run)} & {"yes", "no"}
    text = re.sub(r"\s+", " ", fresh.page(run, tmp_path))
    assert f"**{count} seeds are too few** to show a difference" in text
    assert "six claims it takes at least eight" in text
    assert "too few seeds to show a difference" in fresh.sentences(run, tmp_path)
    assert "shown)" not in fresh.sentences(run, tmp_path)


def test_eight_seeds_can_show_something(tmp_path):
    run = plant(tmp_path, range(225, 233))
    assert fresh.claims(run)[0].answer == "yes"
    assert "too few" not in fresh.page(run, tmp_path)


def test_one_seed_is_not_published(tmp_path):
    assert plant(tmp_path, [225]) is None
    assert "not answered yet" in fresh.sentences(None)


def test_chance_passes_the_family_in_at_most_a_twentieth_of_runs(monkeypatch):
    # Intervals are not looked at here, and they take most of the time.
    monkeypatch.setattr(statistics, "RESAMPLES", 10)
    random, runs, seeds = np.random.default_rng(7), 400, range(10)
    wrong = same = 0
    for _ in range(runs):
        # The methods of a seed share a start, and those with a common rival a difference: claims depend on each other.
        rewards = random.normal(0.5, 0.04, (1, 10, 1)) + random.normal(0, 0.01, (4, 10, 2))
        entropy = random.normal(0.1, 0.01, (4, 10))
        accuracy = {m: {s: {20: rewards[i, s, 0], 40: rewards[i, s, 1]} for s in seeds} for i, m in enumerate(PLANTED)}
        own = {m: {s: dict.fromkeys(longrun.LAST, entropy[i, s]) for s in seeds} for i, m in enumerate(PLANTED)}
        found = {a.answer for a in fresh.claims(longrun.Run(fresh.STUDY, tuple(seeds), accuracy, own))}
        wrong += bool(found & {"yes", "no"})
        same += "no difference" in found
    # Three standard errors of a share of 0.05 over so many runs.
    assert wrong / runs <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs)
    assert same > 0


def test_a_difference_of_a_point_is_rarely_called_none(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 10)
    random, runs = np.random.default_rng(8), 400
    wrong = 0
    for _ in range(runs):
        found = longrun.answer(
            [
                longrun.Asked("", statistics.compare(random.normal(0.01, 0.008, 10), np.zeros(10)), True)
                for _ in range(5)
            ]
        )
        wrong += any(a.answer == "no difference" for a in found)
    assert wrong / runs <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs)


def test_pages_and_picture_are_written(tmp_path, capsys):
    docs = tmp_path / "docs"
    (docs / "results").mkdir(parents=True)
    shutil.copy(longrun.RESULTS.parent / "results.md", docs)
    site = "nav: [results.md, results/protocol.md, results/longer.md, results/census.md]\n"
    (tmp_path / "mkdocs.yml").write_text(site)
    fresh.main(docs)
    assert "not written" in capsys.readouterr().out
    assert (tmp_path / "mkdocs.yml").read_text() == site
    plant(docs / "results", range(225, 249))
    fresh.main(docs)
    printed = capsys.readouterr().out
    assert "| After 40 iterations RAFT is higher than GSPO | **yes**: 2.0 points, 24 of 24 seeds | not run |" in printed
    text, results = (docs / "results/fresh.md").read_text(), (docs / "results.md").read_text()
    assert "All 24 seeds, 225 to 248, are complete in all four methods." in text
    head = next(line for line in text.splitlines() if line.startswith("| method |"))
    raft = next(line for line in text.splitlines() if line.startswith("| RAFT | 24 |"))
    assert head.count("|") == raft.count("|") == 13
    # Before, after 20 and after 40 iterations: 0.004 for each of them, and the leads.
    start = float(raft.split(" | ")[2])
    assert [float(c) - start for c in raft.split(" | ")[3:5]] == pytest.approx([11, 18], abs=0.15)
    assert re.search(r"\| RAFT over GSPO \| \+5\.\d \(.*24 of 24 up\) \|", text)
    assert "2e-4 (GSPO)" in text
    assert "RAFT ended +2.0 points over GSPO (shown)" in re.sub(r"\s+", " ", results)
    assert "the lead shrinks, and its answers become less diverse" in re.sub(r"\s+", " ", results)
    assert "results/longer.md, results/fresh.md, results/census.md" in (tmp_path / "mkdocs.yml").read_text()
    assert (docs / "results/even-fresh.png").stat().st_size > 20_000
    # Written again it is the same.
    fresh.main(docs)
    assert (docs / "results.md").read_text() == results


def test_the_pages_say_what_the_committed_cells_say():
    run = fresh.complete()
    results = (longrun.RESULTS.parent / "results.md").read_text()
    assert longrun.replaced(results, "fresh.py", fresh.sentences(run)) == results
    if run is not None:
        assert (longrun.RESULTS / "fresh.md").read_text() == fresh.page(run)
        site = (longrun.RESULTS.parents[1] / "mkdocs.yml").read_text()
        assert longrun.in_nav(site, "fresh", behind="longer") == site


def test_the_files_of_the_fresh_seeds_are_exported():
    for names in (SWEEPS, GREEDY, CURVES, ENTROPY):
        assert "even-fresh" in names
    assert "even-tuning-methods" in SWEEPS
