"""The documentation: links lead somewhere, code is code, commands exist, the site is built whole."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from flows.cli import app

pytestmark = pytest.mark.docs
ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("infra/**/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for indent, kind, body in FENCE.findall(page.read_text()):
            if kind == language:
                found.append((page.name, "\n".join(line.removeprefix(indent) for line in body.splitlines())))
    return found


def slugs(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lost = []
    for link, picture in LINK.findall(text):
        target, _, anchor = (link or picture).partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        place = (page.parent / target).resolve() if target else page
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in slugs(place)):
            lost.append(link or picture)
    assert lost == []


def test_python_blocks_are_python_and_yaml_blocks_are_yaml() -> None:
    assert len(blocks("python")) > 5
    for page, body in blocks("python"):
        try:
            ast.parse(body)
        except SyntaxError as problem:
            raise AssertionError(f"{page}: {problem}: {body}") from None
    for page, body in blocks("yaml"):
        try:
            yaml.safe_load(body.replace("…", "x"))
        except yaml.YAMLError as problem:
            raise AssertionError(f"{page}: {problem}: {body}") from None


def test_every_command_that_a_page_shows_exists_with_its_options() -> None:
    lines = [(page, line) for page, body in blocks("sh") for line in body.splitlines()]
    seen = 0
    for page, line in lines:
        found = re.match(r"(?:\w+=\S+ )*(?:\.venv/bin/)?hacrl (.*)", line.partition(" # ")[0].strip())
        if found is None:
            continue
        seen += 1
        command, words = typer.main.get_command(app), shlex.split(found.group(1).partition(" | ")[0])
        while hasattr(command, "commands"):
            assert words, f"{page}: {line}"
            assert words[0] in command.commands or words[0].startswith("-"), f"{page}: no command {words[0]}: {line}"
            if words[0].startswith("-"):
                break
            command = command.commands[words.pop(0)]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        unknown = [
            w for w in words if w.startswith("--") and w.partition("=")[0] not in {*known, "--help", "--version"}
        ]
        assert unknown == [], f"{page}: {line}"
    assert seen > 30


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    made = subprocess.run([sys.executable, "infra/commands_page.py"], cwd=ROOT, capture_output=True, text=True)
    assert made.stdout == (ROOT / "docs/commands.md").read_text(), "run make reference"


def test_the_site_is_built_whole_and_can_be_searched_without_a_network(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "search/search_index.js").is_file()
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    assert (tmp_path / "llms.txt").is_file()
    for line in (tmp_path / "llms.txt").read_text().splitlines():
        for target in re.findall(r"\]\((\S+\.html)\)", line):
            assert (tmp_path / target).is_file(), target
    for page in pages:
        assert "fonts.googleapis" not in page.read_text(), page
