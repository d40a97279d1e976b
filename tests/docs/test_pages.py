"""The documentation: links lead somewhere, commands parse, settings are valid, Python's names exist.

This is the quick part, which ``make test`` runs too. What is executed is in the other files of this folder.
"""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, all_pages, read_blocks
from tests.docs.checks import command_faults, inline_faults, link_faults, python_faults, yaml_faults

PAGES = all_pages()
# Made by a command from the code; a test of its own compares it.
GENERATED = "docs/commands.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert link_faults(page) == []


def test_every_command_that_a_page_shows_is_one() -> None:
    faults, seen = [], 0
    for page in PAGES:
        if str(page.relative_to(ROOT)) == GENERATED:
            continue
        for block in read_blocks(page):
            lines = block.body.replace("\\\n", " ").splitlines()
            if block.language == "console":
                lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            elif block.language != "sh":
                continue
            seen += sum("hacrl" in line for line in lines)
            faults += [f"{block.where}: {fault}" for line in lines for fault in command_faults(line)]
    assert faults == []
    assert seen > 60


def test_every_command_in_running_text_is_one() -> None:
    faults = [
        f"{page.relative_to(ROOT)}: {fault}"
        for page in PAGES
        if page.parent.name != "decisions"
        for text in re.findall(r"`hacrl ([^`]+)`", page.read_text())
        for fault in inline_faults(text.replace("\n", " "))
    ]
    assert faults == []


def test_every_block_of_settings_is_valid() -> None:
    blocks = [block for page in PAGES for block in read_blocks(page) if block.language == "yaml"]
    faults = [
        f"{block.where}: {fault}"
        for block in blocks
        if "not run" not in block.says
        for fault in yaml_faults(block.body, block.says.get("yaml", ""))
    ]
    assert faults == []
    assert len(blocks) > 20


def test_every_block_of_python_uses_names_that_exist() -> None:
    blocks = [block for page in PAGES for block in read_blocks(page) if block.language == "python"]
    assert [f"{b.where}: {fault}" for b in blocks for fault in python_faults(b.body)] == []
    assert len(blocks) > 15


def test_a_block_that_is_not_run_says_why() -> None:
    for page in PAGES:
        for block in read_blocks(page):
            assert len(block.says.get("not run", "a reason")) >= 8, block.where


def test_a_block_belongs_to_the_comment_just_above_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: it takes hours -->\n```sh\nmake a\n```\n\nText\n\n"
        "<!-- example: numbers differ -->\n```sh\nmake b\n```\n\n```sh\nmake c\n```\n"
    )
    assert [block.says for block in read_blocks(page)] == [
        {"not run": "it takes hours"},
        {"example": "numbers differ"},
        {},
    ]


@pytest.mark.parametrize(
    "line",
    [
        "hacrl run first.yaml --iteratons 3",
        "hacrl rnu first.yaml",
        "hacrl status && hacrl report demo --outt x",
        "PATH=x hacrl export demo/ada@best folder surplus",
        "make demoo",
        "hacrl run first.yaml --set",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    assert command_faults(line)


def test_right_commands_are_accepted() -> None:
    for line in (
        "hacrl run first.yaml --set iterations=3 -s seed=1 | tail -n 3  # a comment --with option",
        "until grep -q done night.txt; do sleep 1; done; cat night.txt",
        ".venv/bin/hacrl --version",
        "make demo test",
    ):
        assert command_faults(line) == []


@pytest.mark.parametrize(
    "body",
    [
        "update: {learning_rat: 1.0e-4}",
        "agents: {a: {checkpoint: {paths: x}}}",
        "algorithm: {preset: hacpoo}",
        "name: s\ncampaign: c.yaml\nvariants: {a: {}}\nseeds: [1, 1]",
        "a: [",
    ],
)
def test_wrong_settings_are_found(body: str) -> None:
    assert yaml_faults(body)


@pytest.mark.parametrize("body", ["from hacrl import Problm", "import hacrl\nhacrl.opne()", "def f(:"])
def test_wrong_python_is_found(body: str) -> None:
    assert python_faults(body)


def test_a_wrong_option_in_running_text_is_found() -> None:
    assert inline_faults("status --wach")
    assert inline_faults("sttaus")
    assert inline_faults("init NAME [--task own] [--agents A B …]") == []
