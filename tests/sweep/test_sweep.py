"""A sweep shares what its cells have in common, resumes, skips what is finished and grows by a seed or a variant."""

import copy
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from page import HERE, write_page
from rich.console import Console

from flows.home import Home
from flows.sweep import cells
from flows.sweep.cells import Job, Tally, finished_entries, order_jobs
from flows.sweep.report import Table, make_report
from flows.sweep.run import Outcome, Pool, execute_with_threads, how_far, plan_sweep, run_sweep
from flows.sweep.written import write_report
from hacrl_core.artifacts import Store
from hacrl_core.config.sweep import load_sweep, nested
from hacrl_core.errors import ConfigError, StageError
from stages.spec import Context
from tests.flow.conftest import TINY
from tests.patience import patience

SWEEP: dict[str, Any] = {
    "name": "little",
    "campaign": "tiny.yaml",
    "settings": {"iterations": 2, "algorithm.measure_kl": False},
    "variants": {"gspo": {"algorithm.preset": "gspo"}, "hacpo": {"algorithm.preset": "hacpo"}},
    "seeds": [1, 2],
}


class Here(Pool):
    """The pool's work done in this process, for speed."""

    def __init__(self, store: Path) -> None:
        self.store, self.context, self.jobs = Store(store), Context(), list[str]()

    def run(self, job: Job, events: Any, retries: int) -> Tally:
        self.jobs.append(job.label)
        return job.perform(self.store, self.context)

    def stop(self, *, now: bool) -> None:
        pass


def written(place: Path, **changes: Any) -> Path:
    base = copy.deepcopy(TINY)
    for agent in base["agents"].values():  # what they know does not matter here
        agent["warmstart"]["steps"] = 40
    (place / "tiny.yaml").write_text(yaml.safe_dump(base, sort_keys=False))
    path = place / "sweep.yaml"
    path.write_text(yaml.safe_dump({**copy.deepcopy(SWEEP), **changes}, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def home(place):
    return Home(place / "home")


def go(place: Path, home: Home, **changes: Any) -> tuple[Outcome, Here, str]:
    pool, shown = Here(home.store), io.StringIO()
    console = Console(file=shown, width=200)
    outcome = run_sweep(load_sweep(written(place, **changes)), home, console, execute_with_threads, pool)
    return outcome, pool, shown.getvalue()


@pytest.fixture(scope="module")
def first(place, home):
    """Run once for all tests: two variants, two seeds, two iterations."""
    return go(place, home)


def test_common_work_is_planned_and_computed_once(first):
    outcome, _, shown = first
    plan, tally = outcome.plan, outcome.tally
    # A cell: 2 first versions, 2 evaluations before; per iteration 1 sample and 2 each of 5 stages + update; 2
    # evaluations after.
    assert plan.calls == 4 * (2 + 2 + 2 * (1 + 2 * 5) + 2)
    # Shared by the two variants of a seed: first versions, their evaluation, both samples, the first rollouts and
    # verdicts.
    assert plan.shared == 2 * (2 + 2 + 2 + 2 + 2)
    assert (plan.rollouts_to_run, plan.rollouts_shared) == (2 * 2 * 6 * 4 * (1 + 2), 2 * 2 * 6 * 4)
    assert (tally.ran, tally.cached) == (plan.to_run, plan.shared)
    assert tally.rollouts_sampled == plan.rollouts_to_run
    assert tally.tokens_sampled > tally.rollouts_sampled
    assert "2 variants × 2 seeds = 4 cells, 0 finished" in shown
    assert "20 shared between cells" in shown


def test_a_sweep_says_what_it_does_before_the_first_cell_is_finished(first, place, home):
    _, pool, text = first
    lines = text.splitlines()
    done = next(number for number, line in enumerate(lines) if line.startswith("cell 1/4"))
    assert f"{pool.jobs[0]} starts" in lines[:done]
    cells = load_sweep(written(place)).cells
    job = Job(cells[0].config, home.campaign(cells[0].label))
    assert how_far(job) == ", iteration 2/2"
    assert how_far(Job(cells[0].config, home.root / "nowhere")) == ", iteration 0/2"
    assert how_far(Job(cells[0].config, home.root, "ada")) == ""


def test_seeds_come_one_after_the_other_and_first_versions_before_them(first):
    labels = first[1].jobs
    assert [label for label in labels if "first version" not in label] == [
        f"little.{variant}.s{seed}" for seed in (1, 2) for variant in ("gspo", "hacpo")
    ]
    assert labels.index("little.gspo.s2 first version of ben") < labels.index("little.hacpo.s1")


def test_finished_cells_are_skipped(first, place, home):
    outcome, pool, shown = go(place, home)
    assert pool.jobs == []
    assert (outcome.plan.finished, outcome.plan.to_run, outcome.tally.ran) == (4, 0, 0)
    assert "4 cells, 4 finished" in shown


def test_a_sweep_run_twice_has_each_point_once_in_mlflow(first, place, home, blank_database):
    shutil.copyfile(blank_database, home.database)
    tracked = {**SWEEP["settings"], "tracking.enabled": True}
    points = []
    for _ in range(2):
        go(place, home, settings=tracked)
        with sqlite3.connect(home.database) as database:
            points.append(database.execute("select run_uuid, key, step, value, timestamp from metrics").fetchall())
    summary = [(key, step) for _, key, step, _, _ in points[0] if key.startswith(("accuracy/gspo/", "accuracy/hacpo/"))]
    assert len(summary) == 6
    assert len(points[1]) == len(set(points[1]))
    assert sorted(points[0]) == sorted(points[1])


def test_a_new_seed_and_a_new_variant_run_alone(first, place, home):
    outcome, pool, _ = go(place, home, seeds=[1, 2, 3], variants={"gspo": SWEEP["variants"]["gspo"]})
    assert [label for label in pool.jobs if "first version" not in label] == ["little.gspo.s3"]
    assert outcome.plan.finished == 2
    more = {**SWEEP["variants"], "alpha_2": {"algorithm.alpha": 2.0}}
    outcome, pool, _ = go(place, home, variants=more, seeds=[1])
    assert [label for label in pool.jobs if "first version" not in label] == ["little.alpha_2.s1"]
    # α is read by the update alone: all of the first iteration before it, and everything before that, is there already.
    assert outcome.plan.stored == 2 + 2 + 2 + 2 * 4
    assert 0 < outcome.tally.ran <= outcome.plan.to_run  # versions that come out equal are shared beyond the plan


def test_a_lost_artifact_unfinishes_its_cell_and_only_that_is_recomputed(first, place, home):
    cell = load_sweep(written(place)).cells[0]
    job = Job(cell.config, home.campaign(cell.label))
    entry = next(e for e in finished_entries(job, home.store) if e.stage == "evaluate" and e.iteration == 2)
    (home.store / "objects" / "evaluate" / entry.key / "manifest.json").unlink()
    assert finished_entries(job, home.store) is None
    outcome, _, _ = go(place, home)
    assert outcome.tally.ran == outcome.plan.to_run == 1
    assert finished_entries(job, home.store) is not None


def test_a_cell_that_fails_does_not_stop_the_others(first, place, home):
    class Failing(Here):
        def run(self, job, events, retries):
            if job.label == "little.a.s1":
                raise StageError("update ada #0: loss is not finite")
            return super().run(job, events, retries)

    variants = {"a": {"algorithm.preset": "gspo"}, "b": {"algorithm.preset": "gspo"}}
    sweep = load_sweep(written(place, variants=variants, seeds=[1]))
    outcome = run_sweep(sweep, home, Console(file=io.StringIO()), execute_with_threads, Failing(home.store))
    assert list(outcome.failures) == ["little.a.s1"]
    report = make_report(sweep, home.root)
    assert [r.variant for r in report.results] == ["b"]
    assert report.failed == {"a"}
    assert report.gaps() == "a: 1 of 1 seeds without a result (seed 1 failed: update ada #0: loss is not finite)"
    again = run_sweep(sweep, home, Console(file=io.StringIO()), execute_with_threads, Here(home.store))
    assert not again.failures
    assert make_report(sweep, home.root).unfinished == []


def test_a_cell_that_nobody_ran_is_a_failure(first, place, home):
    sweep = load_sweep(written(place, variants={"lost": {"algorithm.preset": "gspo"}}, seeds=[1]))
    outcome = run_sweep(sweep, home, Console(file=io.StringIO()), lambda work, home: None, Here(home.store))
    assert list(outcome.failures) == ["little.lost.s1"]
    assert make_report(sweep, home.root).gaps().endswith("(seed 1 not run)")


def test_other_data_under_the_same_name_unfinishes_a_cell(first, place, home, monkeypatch):
    job = Job(load_sweep(written(place)).cells[0].config, home.campaign("little.gspo.s1"))
    assert finished_entries(job, home.store) is not None
    monkeypatch.setattr(cells, "_known_sources", {})
    monkeypatch.setattr(cells.StageCalls, "sources", lambda self: {"problems": "others"})
    assert finished_entries(job, home.store) is None


def test_report_compares_by_seed_and_says_when_seeds_are_too_few(first, place, home):
    report = make_report(load_sweep(written(place)), home.root)
    assert [r.seed for r in report.results] == [1, 1, 2, 2]
    both = next(c for c in report.comparisons if (c.variant, c.agent) == ("hacpo", "mean"))
    by_hand = [
        sum(r.agents[a].after for a in ("ada", "ben")) / 2 for r in report.results if r.variant == "hacpo"
    ]  # fmt: skip
    assert both.mean == pytest.approx(sum(by_hand) / 2)
    assert both.words().startswith("not shown")
    assert "2 seeds cannot show it" in both.words()
    one = report.results[0]
    assert max(one.cost("responses").values()) == 2 * 2 * 6 * 4
    assert max(one.cost("tokens").values()) == sum(max(a.tokens.values()) for a in one.agents.values())
    folder = home.root / "report"
    names = {path.name for path in write_report(report, folder)}
    assert {"table.md", "table.tex", "cells.csv", "summary.csv", "curves.png", "costs.png", "forest.png"} <= names
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert all(text in page for text in ("2 seeds cannot show it", "little.hacpo.s1", "95 % interval"))
    assert "http" not in page.replace("http-equiv", "")  # it needs nothing else
    assert '<td class="words">not shown' in page
    assert "<code>hacrl report NAME</code>" in page  # wherever it was written, without a folder of that machine
    assert (folder / "forest.png").stat().st_size > 5000
    rows = (folder / "cells.csv").read_text().splitlines()
    assert len(rows) == 1 + 4 * 2
    assert (folder / "table.tex").read_text().count(r"\\") == 3


def test_the_results_page_is_written_from_the_store_whatever_is_finished(first, place, home, tmp_path):
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "complementary.md.j2").write_text((HERE / "complementary.md.j2").read_text())
    # The real findings are about sweeps that do not exist here.
    (templates / "findings.md.j2").write_text("{{ page.settings() }}")
    write_page({"main": make_report(load_sweep(written(place)), home.root)}, tmp_path, templates)
    text = (tmp_path / "results/complementary.md").read_text()
    assert "| Agents end better under HACPO than under GSPO | not shown (2 seeds cannot show yes or no, " in text
    assert "2 seeds cannot show it" in text
    assert "not run" in text
    assert (tmp_path / "results" / "main-cells.csv").exists()


def test_killed_in_the_middle_it_goes_on_where_it_was(place, tmp_path):
    """A real process, really killed; what it had finished is neither lost nor done again."""
    home = Home(tmp_path / "home")
    path = written(tmp_path, seeds=[1])
    script = (
        "import sys; from pathlib import Path; from rich.console import Console; from flows.home import Home\n"
        "from flows.sweep.run import run_sweep, execute_with_threads\nfrom hacrl_core.config.sweep import load_sweep\n"
        "if __name__ == '__main__':\n"
        "    run_sweep(load_sweep(Path(sys.argv[1])), Home(Path(sys.argv[2])), Console(), execute_with_threads)\n"
    )
    (tmp_path / "go.py").write_text(script)
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "go.py"), str(path), str(home.root)],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + patience(120)
        while not list((home.store / "objects").glob("update/*/manifest.json")) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = len(list((home.store / "objects").glob("*/*/manifest.json")))
    assert done > 0
    # At once: the orphaned worker process may still be there for a moment, and the cell waits for it.
    outcome = run_sweep(load_sweep(path), home, Console(file=io.StringIO()), execute_with_threads, Here(home.store))
    assert not outcome.failures
    assert outcome.plan.stored >= done
    assert plan_sweep(load_sweep(path), home)[0].finished == 2


def test_grids_multiply_and_reach_any_key(tmp_path):
    path = written(tmp_path, grid={"update.learning_rate": [1e-3, 2e-3], "agents.ben.algorithm.alpha": [0, 3]})
    sweep = load_sweep(path)
    assert len(sweep.cells) == 2 * 4 * 2
    assert "hacpo.learning_rate-0_002.alpha-3" in sweep.variants
    cell = next(c for c in sweep.cells if c.variant == "hacpo.learning_rate-0_002.alpha-3")
    assert cell.config.update.learning_rate == 2e-3
    assert cell.config.objective("ben").alpha == 3
    assert cell.config.objective("ada").alpha == 1


def test_extended_sweeps_find_their_campaign_and_null_takes_a_setting_back(tmp_path):
    written(tmp_path, settings={"agents.ben.algorithm.alpha": 3})
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "child.yaml").write_text(
        yaml.safe_dump(
            {"extends": "../sweep.yaml", "name": "child", "variants": {"back": {"agents.ben.algorithm": None}}}
        )
    )
    sweep = load_sweep(tmp_path / "below" / "child.yaml")
    assert sweep.variants == ["gspo", "hacpo", "back"]
    assert [c.config.objective("ben").alpha for c in sweep.cells[:3]] == [3, 3, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"variants": {"a": {"update.learning_rat": 1}}},
            "cell little.a.s1: update.learning_rat: unknown key; did you mean",
        ),
        ({"seeds": [1, 1]}, "names one twice"),
        ({"baseline": "ppo"}, "'ppo' is not a variant; choose one of gspo, hacpo"),
        ({"benchmark": "math500"}, "'math500' is not among the campaign's; choose one of held_out"),
        ({"grid": {"seed": []}}, "grid.seed: no values"),
        ({"campaign": "gone.yaml"}, "No such file"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load_sweep(written(tmp_path, **changes))


def test_dotted_keys():
    assert nested({"a.b": 1, "a": {"c.d": None}, "e": [1]}) == {"a": {"b": 1, "c": {"d": None}}, "e": [1]}


def test_next_seeds_first_versions_do_not_keep_anybody_waiting(tmp_path):
    cells = load_sweep(written(tmp_path, seeds=[1, 2])).cells
    labels = [job.label for job in order_jobs(cells, tmp_path, 2)]
    assert [("first version" in label) for label in labels] == [True, True, True, True, False, False, False, False]
    assert json.dumps(labels).count("s2 first version") == 2


def test_labels_of_a_table_change_neither_latex_nor_markdown() -> None:
    table = Table(("method",), (("a\\b{c}$d^2~e|f%\ng",),))
    assert r"a\textbackslash{}b\{c\}\$d\textasciicircum{}2\textasciitilde{}e|f\% g \\" in table.latex()
    assert "| a\\b{c}$d^2~e\\|f% g |" in table.markdown()
