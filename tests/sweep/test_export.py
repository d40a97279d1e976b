"""Exporting cells: the files that pages are written from, and cells that are kept from an earlier export."""

import re
from pathlib import Path

import arena
import fresh
import longrun
import page
import pytest

from flows.sweep.report import SweepReport, cells_csv
from flows.sweep.statistics import compare_variants
from hacrl_core.config.sweep import load_sweep
from tests.sweep.planted import cell, leads, write

ROOT = Path(__file__).resolve().parents[2]
FRESH = {"gspo": (0, 0), "gspo_x2": (0, 0), "hacpo": (0, 0), "raft_foreign": (0.03, 0.02)}


def report(name, cells, benchmark=None):
    sweep = load_sweep(ROOT / f"configs/sweeps/{name}.yaml", [f"benchmark={benchmark}"] if benchmark else [])
    there = [v for v in sweep.variants if any(c.variant == v for c in cells)]
    against = sweep.config.compared_with
    compared = compare_variants(cells, there, against, ["ada", "ben"]) if against in there else []
    return SweepReport(sweep, against, cells, there, ["ada", "ben"], compared, [])


@pytest.mark.parametrize("file", sorted((ROOT / "docs/results").glob("even*-cells.csv")), ids=lambda f: f.stem)
def test_committed_cells_are_read_as_they_were_written(file):
    assert cells_csv(page.read_cells(file)) == file.read_text()


def test_what_a_home_has_becomes_the_files_of_the_fresh_seeds(tmp_path):
    cells = [cell(m, s, leads(FRESH), iterations=40) for s in range(225, 234) for m in FRESH]
    reports = {"even-fresh": report("even-fresh", cells), "even-fresh-greedy": report("even-fresh", cells, "greedy")}
    page.write_page(reports, tmp_path)
    (tmp_path / "twin").mkdir()
    write(tmp_path / "twin", "even-fresh", cells)
    for twin in (tmp_path / "twin").iterdir():
        assert (tmp_path / "results" / twin.name).read_text() == twin.read_text()
    assert fresh.complete(tmp_path / "results").seeds == tuple(range(225, 234))
    assert not (tmp_path / "results.md").exists()


def test_methods_that_a_home_did_not_run_are_kept(tmp_path, capsys):
    before = {"gspo": (0.0,), "gspo_x2": (0.01,), "topr": (0.0,), "cispo": (0.0,)}
    file = tmp_path / "even-methods-cells.csv"
    old = [cell(m, s, leads(before)) for s in range(201, 209) for m in before]
    file.write_text(cells_csv(old))
    again = [cell("topr", s, leads({"topr": (0.05,)})) for s in range(201, 209)]
    merged = page.with_kept(report("even-methods", again), file)
    assert "topr from the home; kept as committed: gspo, gspo_x2, cispo" in capsys.readouterr().out
    assert merged.variants == ["gspo", "gspo_x2", "topr", "cispo"]
    expected = [next(c for c in again if c.seed == o.seed) if o.variant == "topr" else o for o in old]
    assert cells_csv(merged.results) == cells_csv(expected)
    # GSPO×2 is the sweep's baseline; it was kept, and what ran again is compared with it.
    topr = next(c for c in merged.comparisons if (c.variant, c.agent) == ("topr", "mean"))
    assert topr.difference.seeds == 8
    assert 100 * topr.difference.mean == pytest.approx(4, abs=0.2)


def test_kept_cells_do_not_replace_what_a_home_has(tmp_path):
    file = tmp_path / "even-methods-cells.csv"
    file.write_text(cells_csv([cell("topr", s, leads({"topr": (0.0,)})) for s in range(201, 209)]))
    again = [cell("topr", 201, leads({"topr": (0.05,)}))]
    merged = page.with_kept(report("even-methods", again), file)
    assert merged.results == again
    assert merged.comparisons == []


def test_the_arena_has_a_column_for_fresh_seeds_after_twenty_iterations(tmp_path):
    for file in longrun.RESULTS.glob("*-cells.csv"):
        (tmp_path / file.name).write_text(file.read_text())
    for file in tmp_path.glob("even-fresh*"):
        file.unlink()
    assert "fresh seeds | opposite" not in arena.page(tmp_path)
    without = {("hacpo", 230)}
    cells = [cell(m, s, leads(FRESH), iterations=40) for s in range(225, 234) for m in FRESH if (m, s) not in without]
    write(tmp_path, "even-fresh", cells)
    text = arena.page(tmp_path)
    head = next(line for line in text.splitlines() if line.startswith("| method")).split(" | ")
    raft = next(line for line in text.splitlines() if "(RAFT)" in line).split(" | ")
    # Three points halfway, not the two at the end; a seed that HACPO lacks is left out.
    found = raft[head.index("taught the same, fresh seeds")]
    assert float(found.split()[0]) == pytest.approx(3, abs=0.2)
    assert found.endswith(", 8/8")
    assert "225, 226, 227, 228, 229, 231" in text


def test_make_runs_every_sweep_that_is_exported():
    made = re.search(r"^SWEEPS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert sorted(made[1].replace("\\", " ").split()) == sorted(page.SWEEPS)
