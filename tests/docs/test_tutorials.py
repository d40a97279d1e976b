"""Tutorials: each one runs in an empty folder and prints what its page says; published notebooks are those pages."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.printed import clean_lines, clean_text, match_lines, renew_lines

TUTORIALS = sorted(page.stem for page in (ROOT / "docs/tutorials").glob("*.md") if page.name != "index.md")


@cache
def own_network() -> list[str]:
    """Return the words that start a command in a network of its own, with nothing but loopback; none where refused."""
    words = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "--"]
    try:
        return words if subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []
    except FileNotFoundError:
        return []


@pytest.mark.docs
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_prints_what_its_page_says(name: str) -> None:
    done = subprocess.run(
        [*own_network(), sys.executable, "-m", "tests.docs.tutorials", name], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.docs
def test_a_published_notebook_has_the_cells_of_its_page_and_their_outputs() -> None:
    import nbformat

    from tests.docs.tutorials import FOLDER, NOTEBOOKS, cells_of, notebook_of

    missing = [name for name in NOTEBOOKS if not (FOLDER / f"{name}.ipynb").is_file()]
    if missing:
        pytest.skip(f"not written yet: {', '.join(missing)}; run make tutorials")
    for name in NOTEBOOKS:
        published = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        nbformat.validate(published)
        made = notebook_of(cells_of(FOLDER / f"{name}.md"))
        assert [cell.source for cell in published.cells] == [cell.source for cell in made.cells], "run make tutorials"
        assert any(cell.get("outputs") for cell in published.cells)


def test_every_step_of_a_tutorial_says_what_it_prints() -> None:
    """Without nbclient: a page whose outputs were never written in would pass for nothing."""
    for name in TUTORIALS:
        text = (ROOT / f"docs/tutorials/{name}.md").read_text()
        assert len(re.findall(r"^\$ hacrl", text, re.MULTILINE)) >= 1, name
        assert len(text.splitlines()) > 60, f"{name}: no outputs; run make tutorials"


PAGE = ["wrote first.yaml", "...", "  ada  held_out  55.7%  +21.3 points", "next: hacrl run ..."]


def test_numbers_and_spaces_may_differ_and_words_may_not() -> None:
    printed = ["wrote first.yaml", "", "one line", "two", " ada   held_out  9.9%  -1.0 points", "next: hacrl run x"]
    lines = clean_lines("\n".join(printed))
    assert match_lines(PAGE, lines) == [0, None, 4, 5]
    assert match_lines([PAGE[0], "", *PAGE[1:]], lines) == [0, None, None, 4, 5]
    assert match_lines(PAGE, [line.replace("points", "percent") for line in lines]) is None
    assert match_lines(PAGE, lines[1:]) is None
    assert match_lines(PAGE, [*lines, "one more"]) is None
    assert match_lines([], []) == []
    assert match_lines([], ["something"]) is None
    assert match_lines(["..."], []) == [None]
    assert match_lines(["disk: 3.2 MB more"], ["disk: 41 GB more"]) == [0]


def test_colours_and_folders_of_this_machine_are_no_part_of_an_output() -> None:
    assert clean_lines(clean_text("\n\n\x1b[1mat /a/\x1b[0mb/c\n\n\n\nd\n\n", {"/a/b/": ""})) == ["at c", "", "d"]


def test_renewing_keeps_what_was_left_out_and_writes_new_words_whole() -> None:
    lines = ["wrote first.yaml", "noise", "  ada  held_out  60.0%  +1.0 points", "next: hacrl run y"]
    assert renew_lines(PAGE, lines) == ["wrote first.yaml", "...", lines[2], "next: hacrl run ..."]
    assert renew_lines(PAGE, ["other words"]) == ["other words"]
    shown = ["...", "iteration 2/2 ...", "..."]
    assert renew_lines(shown, ["begun", "iteration 1/2 a", "iteration 2/2 b", "done"]) == shown
    assert renew_lines(["reward 0.5 then ..."], ["reward 0.75 then 3 words"]) == ["reward 0.75 then ..."]


@pytest.mark.docs
def test_a_tutorial_that_prints_something_else_or_fails_is_found(tmp_path: Path) -> None:
    from tests.docs.tutorials import cells_of, differences

    page = tmp_path / "page.md"
    page.write_text("# T\n\n```console\n$ echo three words here\nthree words there\n$ echo 5\n7\n```\n")
    code = (
        "import sys; from pathlib import Path; from tests.docs.tutorials import *\n"
        f"cells = cells_of(Path({str(page)!r})); execute(cells, Path({str(tmp_path)!r}))\n"
        "print(len(differences(cells)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stdout + done.stderr
    assert [cell.source for cell in cells_of(page)][1:] == ["%%bash\necho three words here", "%%bash\necho 5"]
    assert len(differences(cells_of(page))) == 2
