"""Checks code blocks without running what takes time: commands parse, settings are valid, Python's names exist."""

import ast
import base64
import copy
import importlib
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import typer.main
import yaml

from flows.cli import app
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.config.loading import _UniqueKeys, merge, read_yaml, validate
from hacrl_core.config.sweep import SweepConfig
from hacrl_core.errors import ConfigError
from tests.docs.blocks import ROOT

_ENDS = {"|", "||", "&&", ";", ">", "2>", ">>", "<", "&"}
_SWEEP = {"name": "s", "campaign": "c.yaml", "variants": {"gspo": {}}, "seeds": [1]}


# -- commands ---------------------------------------------------------------------------------------------------------


def command_faults(line: str) -> list[str]:
    """Return what is wrong with the ``hacrl`` and ``make`` commands of one line of a shell."""
    words = list(_words(line))
    faults = []
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        end = next((i for i, other in enumerate(rest) if other in _ENDS), len(rest))
        first = place == 0 or words[place - 1] in _ENDS or "=" in words[place - 1]
        if first and word in ("hacrl", ".venv/bin/hacrl"):
            faults += [f"hacrl {' '.join(rest[:end])}: {fault}" for fault in _parse(rest[:end])]
        if first and word == "make":
            faults += [
                f"make {t}: no such target" for t in rest[:end] if re.fullmatch("[a-z-]+", t) and t not in _targets()
            ]
    return faults


def _words(line: str) -> Iterator[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        yield from lexer
    except ValueError:
        return


def _parse(words: list[str]) -> list[str]:
    """Return what the real command line would refuse: unknown commands and options, missing or surplus arguments."""
    command: Any = typer.main.get_command(app)
    context = click.Context(command, info_name="hacrl")
    while hasattr(command, "commands"):
        if not words or words[0].startswith("-"):
            return [] if set(words) <= {"--help", "-h", "--version"} and words else [f"no command in {words}"]
        if words[0] not in command.commands:
            return [f"there is no command {words[0]!r}"]
        name = words[0]
        command, words = command.commands[name], words[1:]
        context = click.Context(command, info_name=name, parent=context)
    if set(words) & {"--help", "-h"}:
        return []
    try:
        # The values are not converted: files that a page names need not exist here.
        parser = command.make_parser(context)
        _, surplus, _ = parser.parse_args(args=list(words))
    except Exception as problem:
        # Typer brings a click of its own, whose errors are of other types than those of click.
        if not hasattr(problem, "format_message"):
            raise
        return [str(problem.format_message())]
    return [f"surplus arguments {surplus}"] if surplus else []


def inline_faults(text: str) -> list[str]:
    """Return what is wrong with a command in running text, where brackets and capitals stand for something else."""
    words = re.sub(r"[\[\]]", " ", text).replace("…", " ").split()
    command: Any = typer.main.get_command(app)
    for place, word in enumerate(words):
        if not hasattr(command, "commands"):
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            options = [w.partition("=")[0].rstrip(",:;.") for w in words[place:] if re.match("--[a-z]", w)]
            return [f"{text}: no option {o}" for o in options if o not in {*known, "--help", "--version"}]
        if not re.fullmatch("[a-z]+", word.rstrip(",")):
            return []
        if word.rstrip(",") not in command.commands:
            return [f"{text}: there is no command {word!r}"]
        command = command.commands[word.rstrip(",")]
    return []


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# -- settings ---------------------------------------------------------------------------------------------------------


def yaml_faults(body: str, kind: str = "") -> list[str]:
    """Return what is wrong with a block of settings.

    A block with ``campaign`` is a sweep. A block with ``extends``, or with all that a campaign needs, is a campaign.
    Another one is a part of a campaign: it must be valid inside the demo. ``kind`` says what else it is: a benchmark,
    or a part of a sweep.
    """
    # Any valid keys, each another one, for pages that write "ed25519:…".
    number = itertools.count()
    keyed = re.sub("(?<=ed25519:)…", lambda _: base64.b64encode(next(number).to_bytes(32)).decode(), body)
    try:
        raw = yaml.load(re.sub(r"<(\w+)>", r"\1", keyed.replace("…", "x")), Loader=_UniqueKeys)
    except yaml.YAMLError as problem:
        return [str(problem).replace("\n", " ")]
    if not isinstance(raw, dict):
        return [f"holds a {type(raw).__name__}, not settings"]
    try:
        if kind == "benchmark":
            validate({"name": "x", **raw}, BenchmarkConfig, "page")
        elif kind == "sweep" or "campaign" in raw:
            validate({**_SWEEP, **raw}, SweepConfig, "page")
        else:
            raw.pop("extends", None)
            validate(_in_the_demo(raw), CampaignConfig, "page")
    except ConfigError as problem:
        return [str(problem)]
    return []


def _in_the_demo(part: dict[str, Any]) -> dict[str, Any]:
    base = copy.deepcopy(_demo())
    # Warm starts fit arithmetic only; checkpoints fit anything.
    base["agents"] = {} if "agents" in part else {name: {"checkpoint": {"path": name}} for name in base["agents"]}
    for key in {"problems", "evaluate"} & part.keys():
        base.pop(key)
    return merge(base, part)


@cache
def _demo() -> dict[str, Any]:
    return read_yaml(ROOT / "configs/demo.yaml")


# -- Python -----------------------------------------------------------------------------------------------------------


def python_faults(body: str) -> list[str]:
    """Return what is wrong with a block of Python that is not run: its syntax, and names that modules do not have."""
    try:
        tree = ast.parse(body)
    except SyntaxError as problem:
        return [str(problem)]
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module):
            module = importlib.import_module(node.module)
            faults += [f"{node.module} has no {name.name}" for name in node.names if not hasattr(module, name.name)]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hacrl":
            known = hasattr(importlib.import_module("hacrl"), node.attr)
            faults += [] if known else [f"hacrl has no {node.attr}"]
    return faults


def _is_ours(module: str) -> bool:
    return (
        module.partition(".")[0] in {"hacrl", "hacrl_core", "stages", "flows", "transformers"} or module in sys.modules
    )


# -- links ------------------------------------------------------------------------------------------------------------

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def link_faults(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere: files that are not there, headings that no page has."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lost = []
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        place = (page.parent / target).resolve() if target else page
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in _slugs(place)):
            lost.append(link)
    return lost


def _slugs(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).strip().replace(" ", "-") for title in titles}
