"""The page of every method: its differences are those of the cells."""

import shutil
from dataclasses import replace

import arena
import longrun
import methods
import pytest
import tuning

from hacrl_core.config.sweep import load_sweep
from tests.sweep import planted

HEAD = "variant,seed,agent,iterations,before,after,responses,tokens,no_signal,commit\n"


def write(folder, sweep, ends, silent=0.1):
    """``ends``: method → seed → the ends of both agents, the greedy ones ten points higher."""
    for name, more in ((sweep, 0.0), (f"{sweep}-greedy", 0.1)):
        rows = [f"{m},{seed},{agent},20,0.4,{value + more:.4f},3840,75000,{silent},0123456789"
                for m, seeds in ends.items() for seed, both in seeds.items()
                for agent, value in zip(("ada", "ben"), both, strict=True)]  # fmt: skip
        (folder / f"{name}-cells.csv").write_text(HEAD + "\n".join(rows) + "\n")


def seeds(*ends):
    return {201 + i: (end - 0.02, end + 0.02) for i, end in enumerate(ends)}


@pytest.fixture
def folder(tmp_path):
    alone = {"gspo": seeds(0.50, 0.40, 0.45), "gspo_x2": seeds(0.51, 0.42, 0.46)}
    write(tmp_path, "even-methods", alone | {"topr": seeds(0.53, 0.42)})
    return tmp_path


def test_a_difference_is_the_mean_over_agents_and_common_seeds(folder):
    cells = methods.read_cells("even-methods", folder=folder)
    assert cells.seeds() == [201, 202]
    d = cells.difference("topr", "gspo")
    assert (round(d.mean, 9), d.seeds, d.higher) == (0.025, 2, 2)
    assert round(cells.difference("topr", "gspo_x2").mean, 9) == 0.01


def test_rows_of_one_table_have_the_same_seeds_the_best_first(folder):
    cells = methods.read_cells("even-methods", folder=folder)
    rows = methods.methods_table(methods.limited(cells, cells.seeds())).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| TOPR", "| GSPO×2", "| GSPO"]
    # GSPO's mean is that of seeds 201 and 202, without the third.
    assert rows[2].split(" | ")[2] == "45.0"
    assert "+2.5 (" in rows[0]
    assert (rows[0].count("2/2"), rows[0].count("1/2")) == (2, 1)


def test_a_method_that_ran_with_another_version_is_named(tmp_path):
    reward = planted.leads({"gspo": (0.0,), "gspo_x2": (0.0,), "topr": (0.0,), "xgrpo": (0.01,)})
    cells = [planted.cell(m, s, reward) for s in (201, 202) for m in ("gspo", "gspo_x2", "topr", "xgrpo")]
    planted.write(tmp_path, "even-methods", cells)
    assert "another one" not in methods.page(tmp_path)
    again = [replace(c, commits=frozenset({"fedcba9876"})) if c.variant == "xgrpo" else c for c in cells]
    planted.write(tmp_path, "even-methods", again)
    assert "version 0123456789 of this project, and with another one: XGRPO (fedcba9876)." in methods.page(tmp_path)


def test_a_switch_is_compared_with_its_own_method(folder):
    ends = {"hacpo": seeds(0.5, 0.5), "shared_gspo": seeds(0.6, 0.6), "alpha_0": seeds(0.51, 0.52)}
    write(folder, "switches", ends | {"shared_gspo_mixed": seeds(0.59, 0.58)})
    rows = methods.switches_table(methods.read_cells("switches", folder=folder)).splitlines()[2:]
    assert len(rows) == 2
    assert rows[0].startswith("| HACPO | α = 0 | +1.5 (")
    assert rows[1].startswith("| shared GSPO | own and foreign answers mixed in a minibatch | -1.5 (")


def test_the_page_has_a_part_for_what_ran_and_none_for_the_rest(folder):
    assert "## Three agents" not in methods.page(folder)
    write(folder, "even-three", {"gspo": seeds(0.5, 0.5), "gspo_x3": seeds(0.52, 0.5), "hacpo": seeds(0.53, 0.5)})
    text = methods.page(folder)
    assert "## Three agents" in text
    assert "| HACPO | 51.5 | 3,840 |" in text
    assert "## Single switches" not in text
    assert methods.page(folder / "none") is None
    methods.draw(methods.read_cells("even-methods", folder=folder), None, folder / "methods.png")
    assert (folder / "methods.png").stat().st_size > 5000


def test_switches_with_every_column_of_real_cells(folder):
    variants = load_sweep(tuning.CONFIGS / "switches.yaml").variants
    # Everything that the sweep runs has a row, but the two methods themselves.
    assert set(variants) - {"hacpo", "shared_gspo"} == set(methods.SWITCHES)
    ends = {v: (0.01 * i,) for i, v in enumerate(variants)}
    cells = [planted.cell(v, seed, planted.leads(ends, size=0.0002)) for seed in range(201, 209) for v in variants]
    planted.write(folder, "switches", cells)
    rows = methods.switches_table(methods.read_cells("switches", folder)).splitlines()[2:]
    assert len(rows) == 10
    # One step above HACPO, which is first, and one above shared GSPO.
    assert rows[0].startswith("| HACPO | α = -1 | +1.0 (")
    assert rows[7].startswith("| shared GSPO | foreign failures with a ratio of at most 1 | +1.0 (")
    assert rows[0].count("8/8") == 2
    assert "## Single switches" in methods.page(folder)
    said = methods.sentences(folder)
    assert "moved the end by +1.0 to +7.0 points; 10 of 10 intervals" in said
    assert "Three agents of this kind have a sweep and were not run." in said
    methods.draw(methods.read_cells("even-methods", folder), methods.read_cells("switches", folder), folder / "m.png")
    assert (folder / "m.png").stat().st_size > 20_000


def test_three_agents_are_compared_with_gspo_and_with_three_times_the_answers(folder):
    ends = {"gspo": (0.0,), "gspo_x3": (0.01,), "hacpo": (0.02,), "shared_gspo": (0.03,)}
    sweep = load_sweep(tuning.CONFIGS / "even-three.yaml")
    assert sweep.variants == list(ends) == list(methods.THREE_AGENTS)
    reward = planted.leads(ends, size=0.0002)
    cells = [
        planted.cell(v, s, reward, agents=("ada", "ben", "cleo"), responses=576 if v == "gspo_x3" else 192)
        for s in range(201, 209)
        for v in ends
    ]
    planted.write(folder, "even-three", cells)
    table = methods.page(folder).split("## Three agents")[1].split("## ")[0]
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in table.splitlines() if line.startswith("| ")}
    assert [rows[m][1] for m in ("| GSPO", "| GSPO×3", "| HACPO")] == ["3,840", "11,520", "3,840"]
    assert rows["| shared GSPO"][2].startswith("+3.0 (")
    assert rows["| shared GSPO"][3].startswith("+2.0 (")
    assert rows["| HACPO"][3].startswith("+1.0 (")
    assert "HACPO +1.0 (" in methods.sentences(folder)
    # In the arena the rival of three agents has three times the answers.
    task = next(t for t in arena.TASKS if t.sweeps == ("even-three",))
    (best, cell, mean), *others = arena.arena({task.name: arena.ends_of(task, folder)})
    assert (best, round(mean, 1)) == ("shared GSPO", 2.0)
    assert cell[0].endswith("8/8")
    assert [label for label, *_ in others] == ["HACPO", "GSPO"]


def test_sweeps_that_were_stopped_early_are_shown_as_far_as_they_are_whole(folder):
    reward = planted.leads({v: (0.01 * i,) for i, v in enumerate([*methods.THREE_AGENTS, "alpha_0"])})
    # No switch has its method beside it; of three agents one seed is whole.
    planted.write(folder, "switches", [planted.cell("hacpo", 201, reward), planted.cell("alpha_0", 202, reward)])
    cells = [planted.cell(v, 201, reward) for v in methods.THREE_AGENTS]
    planted.write(folder, "even-three", [*cells, planted.cell("gspo", 202, reward)])
    text = methods.page(folder)
    assert "## Single switches" not in text
    assert "Single switches have a sweep and were not run." in methods.sentences(folder)
    alone = next(line for line in text.split("## Three agents")[1].splitlines() if line.startswith("| GSPO |"))
    assert alone.split(" | ")[1] == f"{100 * reward('gspo', 201, 20):.1f}"
    task = next(t for t in arena.TASKS if t.sweeps == ("even-three",))
    planted.write(folder, "even-three", [planted.cell("gspo", 202, reward)])
    assert arena.arena({task.name: arena.ends_of(task, folder)}) == []


@pytest.fixture
def tuned(folder):
    """All methods are best at 1e-4 but TOPR, which is best at 2e-4."""
    variants = load_sweep(tuning.CONFIGS / "even-tuning-methods.yaml").variants
    ends = {v: (0.03 if v.endswith(("0_0001", "topr.learning_rate-0_0002")) else 0.0,) for v in variants}
    ends["topr.learning_rate-0_0001"] = (0.01,)
    reward = planted.leads(ends, size=0.0005)
    planted.write(
        folder, "even-tuning-methods", [planted.cell(v, s, reward) for s in (101, 102, 103) for v in variants]
    )
    shutil.copy(longrun.RESULTS / "even-tuning-cells.csv", folder)
    return folder


def test_the_rate_with_the_highest_mean_is_chosen(tuned):
    found = tuning.read_tuning(tuned)
    assert len(found) == len(methods.METHODS) == 14
    assert {m: t.chosen for m, t in found.items() if t.chosen != 1e-4} == {"gspo": 2e-4, "topr": 2e-4}
    assert found["topr"].seeds == [101, 102, 103]
    rows = tuning.table(found, methods.NAMES).splitlines()
    assert rows[0] == "| method | 5e-5 | 1e-4 | 2e-4 |"
    assert rows[2] == "| GSPO | 57.6 | 59.5 | **59.7** |"
    assert all(row.count("**") == 2 for row in rows[2:])
    assert next(row for row in rows if "TOPR" in row).endswith("** |")


def test_a_rate_is_the_mean_over_the_seeds_that_all_rates_have():
    found = tuning.Tuned({5e-5: {101: 0.4, 102: 0.5}, 1e-4: {101: 0.45, 102: 0.4, 103: 0.9}})
    assert (found.seeds, found.chosen, found.edge) == ([101, 102], 5e-5, True)


def test_the_page_says_who_was_tuned(tuned, monkeypatch):
    (tuned / "even-tuning-methods-cells.csv").rename(tuned / "away")
    assert "were not tuned themselves" in methods.page(tuned)
    assert "without tuning" in methods.sentences(tuned)
    (tuned / "away").rename(tuned / "even-tuning-methods-cells.csv")
    text = methods.page(tuned)
    assert "were not tuned" not in text
    assert "## How the learning rates were chosen" in text
    assert "that was tried for GSPO, TOPR:" in text
    configured = dict.fromkeys(methods.METHODS, 1e-4) | {"gspo": 2e-4}
    monkeypatch.setattr(tuning, "configured", lambda: configured)
    assert "tuned in the same way, but 1 of them not at their best rate" in methods.sentences(tuned)
    configured["topr"] = 2e-4
    assert "tuned in the same way. There, " in methods.sentences(tuned)
    found = tuning.read_tuning(tuned)
    at = {method: t.chosen for method, t in found.items()}
    assert "Each runs at its best one." in tuning.note(found, methods.NAMES, at)
    assert "But TOPR was tuned to 2e-4 and ran at 1e-4." in tuning.note(found, methods.NAMES, at | {"topr": 1e-4})


def test_the_methods_run_at_the_rates_that_were_tuned():
    found = tuning.read_tuning()
    if not found:
        pytest.skip("even-tuning-methods-cells.csv is not committed: nine methods have no tuned rate yet")
    assert {method: t.chosen for method, t in found.items()} == tuning.configured()
    assert all(t.seeds == [101, 102, 103] for t in found.values())
    assert {len(t.rewards) for t in found.values()} == {3}
    fresh = load_sweep(tuning.CONFIGS / "even-fresh.yaml")
    assert all(c.config.update.learning_rate == found[c.variant].chosen for c in fresh.cells)


def test_the_pages_say_what_the_committed_cells_say():
    results = (longrun.RESULTS.parent / "results.md").read_text()
    assert longrun.replaced(results, "methods.py", methods.sentences()) == results
    assert (longrun.RESULTS / "methods.md").read_text() == methods.page()
