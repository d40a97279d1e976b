"""Runs tutorials: a page's blocks in order, in an empty folder with an empty home, against what the page prints.

    python -m tests.docs.tutorials                          # check every page of docs/tutorials
    python -m tests.docs.tutorials own-task --renew         # run one and write what it prints into the page

A page is turned into a notebook and executed by nbclient. A block with a file name is written, ``$ `` lines of a
console block are run by bash, a Python block runs in the notebook's kernel. The lines behind ``$ `` and a text block
behind a Python block are what must be printed, unless a comment ``<!-- example: why -->`` above the block says that the
output is an example. Some tutorials are also published as notebooks.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.docs.blocks import ROOT, Block, read_blocks
from tests.docs.printed import clean_lines, clean_text, match_lines, renew_lines

FOLDER = ROOT / "docs/tutorials"
# These are also published as notebooks, with the outputs of their last renewal.
NOTEBOOKS = ("two-models", "look-inside")


@dataclass
class Cell:
    """One step of a tutorial: its source as a notebook's cell, and the lines that the page says it prints."""

    kind: str
    source: str
    expected: list[str] | None = None
    # Where those lines are in the page, and the indentation of the block.
    span: tuple[int, int] | None = None
    printed: list[str] = field(default_factory=list)
    # False: the page shows one example of what is printed, and says why.
    compared: bool = True


def pages() -> list[Path]:
    """Return the tutorials, without their index."""
    return sorted(page for page in FOLDER.glob("*.md") if page.name != "index.md")


def cells_of(page: Path) -> list[Cell]:
    """Return a page as the cells of a notebook."""
    text, cells, done = page.read_text(), [], 0
    blocks = read_blocks(page)
    for number, block in enumerate(blocks):
        if "not run" in block.says or not (block.title or block.language in ("console", "python")):
            continue
        cells.append(Cell("markdown", text[done : block.start].strip()))
        done = block.end
        if block.title:
            cells.append(Cell("code", f"%%writefile {block.title}\n{block.body.rstrip()}"))
        elif block.language == "python":
            cell = Cell("code", block.body.rstrip(), [], compared="example" not in block.says)
            after = blocks[number + 1] if number + 1 < len(blocks) else None
            if after is not None and after.language == "text" and not text[block.end : after.start].strip():
                begin = after.start + text[after.start :].index("\n") + 1
                cell.expected, cell.span = clean_lines(after.body), (begin, after.end - 3)
                done = after.end
            cells.append(cell)
        else:
            cells.extend(_commands(block, text))
    cells.append(Cell("markdown", text[done:].strip()))
    return [cell for cell in cells if cell.source]


def _commands(block: Block, text: str) -> Iterator[Cell]:
    """Yield a cell for each command of a console block; what follows the command is what it prints."""
    at = block.start + text[block.start :].index("\n") + 1
    cell: Cell | None = None
    open_line = False
    for line in text[at : block.end - 3].splitlines(keepends=True):
        if line.startswith("$ ") or open_line:
            if cell is not None and not open_line:
                yield cell
            before = cell.source + "\n" if cell is not None and open_line else "%%bash\n"
            source = before + line.removeprefix("$ ").rstrip("\n")
            end = at + len(line)
            cell = Cell("code", source, [], (end, end), compared="example" not in block.says)
            open_line = line.rstrip().endswith("\\")
        elif cell is not None and cell.span is not None and cell.expected is not None:
            cell.expected.append(line.rstrip())
            cell.span = (cell.span[0], at + len(line))
        at += len(line)
    if cell is not None:
        yield cell


def notebook_of(cells: list[Cell]) -> Any:
    """Return the cells as a notebook without outputs; their ids are fixed, so that it changes only with the page."""
    book = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
    for number, cell in enumerate(cells):
        make = nbformat.v4.new_markdown_cell if cell.kind == "markdown" else nbformat.v4.new_code_cell
        book.cells.append(make(cell.source, id=f"cell-{number}"))
    return book


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a stranger: an empty home, this project's commands first on the path, no settings."""
    kept = {name: value for name, value in os.environ.items() if not re.match("HACRL|PREFECT|MLFLOW|HF_|JUPYTER", name)}
    return {
        **kept,
        "HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
        "COLUMNS": "100",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def execute(cells: list[Cell], folder: Path) -> Any:
    """Run the cells in a new notebook below an empty folder, keep what each one prints, and return the notebook."""
    for name in ("home", "work"):
        (folder / name).mkdir()
    surroundings = environment(folder)
    os.environ.clear()
    os.environ.update(surroundings)
    book = notebook_of(cells)
    work = str(folder / "work")
    places = {f"{Path(sys.executable).parent}/": "", f"{work}/": "", work: ".", str(folder / "home"): "~"}
    place = {"metadata": {"path": str(folder / "work")}}
    client = NotebookClient(book, kernel_name="python3", timeout=1800, startup_timeout=300, resources=place)
    try:
        client.execute()
    except CellExecutionError as problem:
        raise AssertionError(f"a step failed:\n{problem}") from None
    finally:
        # A tutorial that failed half-way may have left servers.
        subprocess.run([Path(sys.executable).parent / "hacrl", "down"], cwd=work, capture_output=True)
        for cell, made in zip(cells, book.cells, strict=True):
            _tidy(made, places)
            cell.printed = clean_lines("".join(_texts(made)))
    return book


def _texts(made: Any) -> Iterator[str]:
    for output in made.get("outputs", []):
        if output.output_type == "stream":
            yield output.text
        elif "data" in output:
            yield output.data.get("text/plain", "") + "\n"


def _tidy(made: Any, places: dict[str, str]) -> None:
    """Take colours, this machine's folders and what changes with every run out of a cell's outputs."""
    if made.cell_type != "code":
        return
    made.metadata.pop("execution", None)
    # Standard error has warnings of libraries; a command that fails ends the tutorial anyway.
    kept: list[Any] = []
    for output in made.outputs:
        if kept and output.get("name") == kept[-1].get("name") == "stdout":
            kept[-1].text += output.text  # what is printed comes in pieces
        elif output.get("name") != "stderr":
            kept.append(output)
    made.outputs = kept
    for output in made.outputs:
        if output.output_type == "stream":
            output.text = clean_text(output.text, places)
        for kind in [kind for kind in output.get("data", {}) if kind.startswith("text/")]:
            output.data[kind] = clean_text(output.data[kind], places)


def differences(cells: list[Cell]) -> list[str]:
    """Return for each step that printed something else what was expected and what came."""
    return [
        f"{cell.source}\n--- the page says\n{_joined(cell.expected)}\n--- printed\n{_joined(cell.printed)}"
        for cell in cells
        if cell.compared and cell.expected is not None and match_lines(cell.expected, cell.printed) is None
    ]


def _joined(lines: list[str]) -> str:
    return "\n".join(lines)


def renew(page: Path, cells: list[Cell], book: Any) -> None:
    """Write what was printed into the page, and the notebook beside it where it is published."""
    text = page.read_text()
    for cell in reversed(cells):
        if cell.span is not None and cell.expected is not None:
            lines = renew_lines(cell.expected, cell.printed) if cell.compared else cell.printed
            text = text[: cell.span[0]] + "".join(f"{line}\n" for line in lines) + text[cell.span[1] :]
    page.write_text(text)
    if page.stem in NOTEBOOKS:
        # The outputs are this run's; the sources those of the page.
        nbformat.write(book, page.with_suffix(".ipynb"))


def run_page(page: Path, renewed: bool = False) -> list[str]:
    """Run one tutorial and return where it printed something else than its page says."""
    cells = cells_of(page)
    with tempfile.TemporaryDirectory(prefix="tutorial-") as folder:
        book = execute(cells, Path(folder))
    found = differences(cells)
    if renewed:
        renew(page, cells, book)
    return found


def main() -> int:
    """Run the named tutorials, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of pages; all when none is given")
    parser.add_argument("--renew", action="store_true", help="write what is printed into the pages")
    given = parser.parse_args()
    failed = 0
    for page in [FOLDER / f"{name}.md" for name in given.names] or pages():
        found = run_page(page, given.renew)
        failed += bool(found)
        print(f"{page.name}: {'as the page says' if not found else f'{len(found)} steps print something else'}")
        for text in found:
            print(text, end="\n\n")
    return 0 if given.renew else min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
