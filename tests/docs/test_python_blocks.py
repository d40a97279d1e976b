"""Blocks of Python outside the tutorials run, page by page, beside a small finished campaign."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, all_pages, read_blocks
from tests.flow.conftest import TINY

pytestmark = [pytest.mark.docs, pytest.mark.timeout(1200)]
# The pages name a campaign "demo" with two agents and at least twelve iterations.
CAMPAIGN = {**TINY, "name": "demo", "iterations": 12, "prompts_per_iteration": 4, "update": {"learning_rate": 1e-3}}
BLOCKS = {
    page: [b.body for b in read_blocks(page) if b.language == "python" and not b.title and "not run" not in b.says]
    for page in all_pages()
    if page.parent.name != "tutorials"
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reader")
    run_python(f"import hacrl; hacrl.run({CAMPAIGN!r})", place)
    return place


def run_python(source: str, place: Path) -> None:
    settings = {
        name: value for name, value in os.environ.items() if not name.startswith(("HACRL", "PREFECT", "MLFLOW"))
    }
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=place, env={**settings, "HOME": str(place)}, capture_output=True, text=True
    )
    assert done.returncode == 0, source + done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.parametrize(
    "page", [page for page in BLOCKS if BLOCKS[page]], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_blocks_of_a_page_run(page: Path, folder: Path) -> None:
    run_python("\n".join(BLOCKS[page]), folder)


def test_there_are_such_pages() -> None:
    assert {page.name for page in BLOCKS if BLOCKS[page]} >= {"python.md", "algorithm.md", "sandbox.md", "tasks.md"}
