"""The page of the longer run: which seeds count, what the claims compare, and their family."""

import csv
import itertools

import longer
import longrun
import pytest

LEAD = {"gspo": (0.0, 0.0), "gspo_x2": (0.0, 0.01), "hacpo": (0.02, 0.03), "shared_gspo": (0.05, 0.02)}
AGENTS = {"ada": -0.03, "ben": 0.03}


def write(folder, seeds, *, without=(), wobble=0.001):
    """Curves with known leads after 20 and 40 iterations; shared GSPO's entropy falls, the others' does not."""
    with (folder / "even-longer-curves.csv").open("w") as curves, (folder / "even-longer-entropy.csv").open("w") as own:
        rewards, logprobs = csv.writer(curves), csv.writer(own)
        rewards.writerow(["variant", "seed", "agent", "iterations_done", "accuracy"])
        logprobs.writerow(["variant", "seed", "agent", "iterations_done", "own_logprob"])
        for method, seed, (agent, off) in itertools.product(LEAD, seeds, AGENTS.items()):
            for step in range(21 if (method, seed) in without else 41):
                noise = wobble * ((seed * 7 + len(method)) % 5)
                lead = dict(zip((20, 40), LEAD[method], strict=True)).get(step, 0.0)
                entropy = 0.1 - (0.001 * step if method == "shared_gspo" else 0) + wobble * (seed % 3)
                rewards.writerow([method, seed, agent, step, 0.5 + off + lead + noise if step % 20 == 0 else ""])
                if step:
                    logprobs.writerow([method, seed, agent, step, -entropy])
    return longrun.read_run(longer.STUDY, folder)


def test_a_seed_counts_if_both_methods_have_it(tmp_path):
    run = write(tmp_path, range(1, 10), without={("shared_gspo", 4), ("hacpo", 5)})
    assert run.seeds == (1, 2, 3, 5, 6, 7, 8, 9)
    assert run.shared("hacpo") == (1, 2, 3, 6, 7, 8, 9)
    assert run.lead("hacpo", 40).seeds == 7
    assert run.at("gspo", 0)[0] == pytest.approx(0.5 + 0.001 * ((1 * 7 + 4) % 5))


def test_claims_compare_what_the_protocol_says(tmp_path):
    run = write(tmp_path, range(1, 10))
    higher, shrinks, entropy = longer.claims(run)
    assert [a.answer for a in (higher, shrinks, entropy)] == ["yes"] * 3
    assert 100 * higher.difference.mean == pytest.approx(2, abs=0.2)
    assert 100 * shrinks.difference.mean == pytest.approx(-3)
    # Iterations 36 to 40 have the mean 38.
    assert entropy.difference.mean == pytest.approx(-0.038)
    assert entropy.p == pytest.approx(3 * 2 / 2**9)  # the smallest p of nine seeds, the first of three
    page = longer.page(run)
    assert "too few" not in page
    assert "-3.00 (-3.00 to -3.00) points" in page


def test_six_seeds_show_nothing_and_the_page_says_so(tmp_path):
    run = write(tmp_path, range(1, 7))
    assert {a.answer for a in longer.claims(run)} == {"not shown"}
    assert "**6 seeds are too few**" in longer.page(run)


def test_the_picture_is_drawn(tmp_path):
    longrun.draw(write(tmp_path, range(1, 9)), ["shared_gspo"], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_the_pages_say_what_the_committed_cells_say():
    run = longrun.committed(longer.STUDY)
    results = (longrun.RESULTS.parent / "results.md").read_text()
    assert longrun.replaced(results, "longer.py", longer.sentence(run)) == results
    if run is not None:
        assert (longrun.RESULTS / "longer.md").read_text() == longer.page(run)
        site = (longrun.RESULTS.parents[1] / "mkdocs.yml").read_text()
        assert longrun.in_nav(site, "longer") == site


def test_the_site_has_the_page_once():
    site = "- Results: [results.md, results/protocol.md, results/census.md]"
    once = longrun.in_nav(site, "longer")
    assert once == "- Results: [results.md, results/protocol.md, results/longer.md, results/census.md]"
    assert longrun.in_nav(once, "longer") == once
    assert "results/protocol.md, " in (longrun.RESULTS.parents[1] / "mkdocs.yml").read_text()


def test_methods_that_did_not_run_are_not_called_exploratory(tmp_path):
    assert "Exploratory: GSPO×2, HACPO." in longer.page(write(tmp_path, range(1, 10)))
    gone = {(method, seed) for method in ("gspo_x2", "hacpo") for seed in range(1, 10)}
    assert "xploratory" not in longer.page(write(tmp_path, range(1, 10), without=gone))


def test_the_sentence_claims_no_more_than_the_seeds_show(tmp_path):
    assert "the lead shrinks, and its answers become less diverse" in longer.sentence(write(tmp_path, range(1, 10)))
    assert "too few seeds" in longer.sentence(write(tmp_path, range(1, 7)))
