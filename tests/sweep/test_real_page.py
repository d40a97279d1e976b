"""The page of two real models: which seeds count, what is compared, and what it cost."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import real_page

from benchmarks.stage_cpu import Ran, Slice, by_stage, read

LEAD = {"gspo": 0.0, "hacpo": 0.03, "shared_gspo": -0.02}
START = {"smol": 0.3, "gemma": 0.2}
CELLS = ("variant", "seed", "agent", "iterations", "before", "after", "responses", "tokens")
CELLS += ("inside", "foreign_ratio", "own_clipped", "no_signal")


def write(folder, seeds, *, without=()):
    """Cells with known leads over GSPO, the same for both agents; one seed's is a point higher."""
    with (folder / "real-cells.csv").open("w") as file:
        cells = csv.writer(file)
        cells.writerow(CELLS)
        for method, lead in LEAD.items():
            for seed in (s for s in seeds if (method, s) not in without):
                for agent, start in START.items():
                    after = start + 0.1 + lead + (0.01 if lead and seed == seeds[0] else 0.0)
                    foreign = ["", ""] if method == "gspo" else [0.4, 0.8]
                    cells.writerow([method, seed, agent, 3, start, after, 72, 900, *foreign, 0.2, 0.25])
    rows = ["stage,agent,calls,seconds,cpu_seconds", "adopt,gemma,1,90.0,40.0", "update,gemma,27,700.0,420.0"]
    rows += ["update,smol,27,300.0,120.0", "sample,,9,1.0,0.6", ",,,600.0,19.4"]
    (folder / "real-costs.csv").write_text("\n".join(rows) + "\n")
    return real_page.read_run(folder)


def test_a_seed_counts_if_all_methods_have_it(tmp_path):
    run = write(tmp_path, (1, 2, 3), without={("shared_gspo", 2)})
    assert run.seeds == (1, 3)
    assert {int(row["seed"]) for row in run.cells} == {1, 3}


def test_differences_are_paired_and_of_both_agents(tmp_path):
    run = write(tmp_path, (1, 2, 3))
    assert run.values("gspo", real_page.BOTH, "before") == pytest.approx([0.25] * 3)
    assert 100 * run.lead("hacpo", real_page.BOTH).mean == pytest.approx(3 + 1 / 3)
    assert run.lead("shared_gspo", "gemma").higher == 0
    lines = real_page.table(run).splitlines()
    hacpo = next(line for line in lines if line.startswith("| HACPO | both"))
    assert hacpo == "| HACPO | both | 25.0 | 38.3 | +3.3 (+3.0 to +4.0) | +4.0, +3.0, +3.0 | 0.80 | 0.40 | 0.25 | 144 |"
    gspo = next(line for line in lines if line.startswith("|  | gemma"))
    assert gspo == "|  | gemma | 20.0 | 30.0 |  |  |  |  | 0.25 | 72 |"


def test_one_seed_has_no_interval(tmp_path):
    run = write(tmp_path, (1, 2), without={("gspo", 2)})
    page = " ".join(real_page.page(run).split())
    assert "one seed has neither an interval nor a test" in page
    assert "1 of 3 seeds are complete" in page
    assert "| HACPO | both | 25.0 | 39.0 | +4.0 | +4.0 |" in page
    real_page.draw(run, tmp_path / "real.png")


def test_costs_are_added_up_by_stage(tmp_path):
    run = write(tmp_path, (1, 2, 3))
    assert real_page.cpu_minutes(run) == pytest.approx(10)
    lines = real_page.costs_table(run).splitlines()
    assert lines[2] == "| update | 120 | 420 |  | 54 | 1,000 |"
    assert lines[-1] == "| outside of stages |  |  | 19 |  |  |"


def test_the_page_fits_its_lines_and_says_what_does_not_count(tmp_path):
    page = real_page.page(write(tmp_path, (1, 2, 3)))
    assert max(len(line) for line in page.splitlines() if not line.startswith(("|", "!"))) <= 120
    assert "+3.3 points (3 of 3 seeds up) for HACPO" in " ".join(page.split())
    assert "of the updates" not in page
    assert "{" not in page
    assert "no two-sided test of 3 seeds can fall below 0.25" in " ".join(page.split())
    page = real_page.page(write(tmp_path, (1, 2, 3), without={("hacpo", 2)}))
    assert "18 of the updates are of cells whose seed is not complete" in " ".join(page.split())


def test_cpu_seconds_go_to_the_stage_that_ran_in_the_process():
    slices = [
        Slice(0.0, 1.0, "7", 0.4),
        Slice(1.0, 2.0, "7", 0.8),
        Slice(2.0, 3.0, "7", 0.2),
        Slice(1.0, 2.0, "8", 0.5),
    ]
    ran = [Ran("score", 0.5, 1.5, "7"), Ran("update", 1.5, 2.0, "7"), Ran("update", 1.0, 1.5, "8")]
    assert by_stage(slices, ran) == pytest.approx({"score": 0.2 + 0.4, "update": 0.4 + 0.25, "": 0.2 + 0.2 + 0.25})


def test_a_command_is_watched_and_its_exit_code_kept(tmp_path):
    work = "import time; end = time.process_time() + 0.7\nwhile time.process_time() < end: pass\nraise SystemExit(3)"
    command = [sys.executable, "-m", "benchmarks.stage_cpu", str(tmp_path / "cpu.csv"), sys.executable, "-c", work]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode == 3
    assert sum(s.cpu for s in read(tmp_path / "cpu.csv")) >= 0.7


def test_the_picture_is_drawn(tmp_path):
    real_page.draw(write(tmp_path, (1, 2, 3)), tmp_path / "real.png")
    assert (tmp_path / "real.png").stat().st_size > 10_000


def test_the_page_says_what_the_committed_cells_say():
    assert (real_page.RESULTS / "real.md").read_text() == real_page.page(real_page.read_run())
