"""The page of every method: its differences are those of the cells."""

import methods
import pytest

HEAD = "variant,seed,agent,iterations,before,after,responses,tokens,no_signal\n"


def write(folder, sweep, ends, silent=0.1):
    """``ends``: method → seed → the ends of both agents, the greedy ones ten points higher."""
    for name, more in ((sweep, 0.0), (f"{sweep}-greedy", 0.1)):
        rows = [f"{m},{seed},{agent},20,0.4,{value + more:.4f},3840,75000,{silent}"
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
