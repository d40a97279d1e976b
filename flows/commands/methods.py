"""``hacrl methods``: the ways of sharing experience, with their equations and sources."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flows.commands.common import one_line_errors
from hacrl_core.config.algorithm import PRESETS
from hacrl_core.errors import ConfigError
from hacrl_core.methods import METHODS
from hacrl_core.methods.page import PAGE

app = typer.Typer()
SWITCHES = (
    "algorithm.alpha",
    "algorithm.ratio_length",
    "algorithm.foreign_failure_cap",
    "algorithm.replay_iterations",
    "update.minibatch_order",
    "resample",
)


@app.command()
@one_line_errors
def methods(name: Annotated[str | None, typer.Argument(help="Show one method in full.")] = None) -> None:
    """List the methods that algorithm.preset names: equation, source and version.

    s is the ratio of a response under the learner to that under its sampler, A its advantage.
    """
    console = Console()
    if name is not None:
        _show(console, name)
        return
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for title in ("preset", "term of a response", "source"):
        table.add_column(title, overflow="fold", no_wrap=title == "preset")
    for preset, (equation, source) in PAGE.items():
        table.add_row(preset, equation, source)
    for method in METHODS.values():
        table.add_row(method.name, method.equation, f"{method.source} (version {method.version})")
    console.print(table)
    others = [preset for preset in PRESETS if preset not in PAGE and preset not in METHODS]
    console.print(f"Ablations of hacpo: {', '.join(others)}.", soft_wrap=True)
    console.print(f"Switches over a method: {', '.join(SWITCHES)}; hacrl config explain tells each.", soft_wrap=True)


def _show(console: Console, name: str) -> None:
    if name in METHODS:
        method = METHODS[name]
        rows = [("term", method.equation), ("source", method.source), ("reading", method.reading)]
        rows.append(("code", f"hacrl_core/methods/{name}.py, version {method.version}"))
    elif name in PAGE:
        rows = [("term", PAGE[name][0]), ("source", PAGE[name][1])]
        settings = ", ".join(f"{key}: {value}" for key, value in PRESETS[name].items()) or "the defaults"
        rows.append(("code", f"hacrl_core/algorithm/hacpo.py with {settings}"))
    else:
        raise ConfigError(f"method {name!r} is not known; choose one of {', '.join([*PAGE, *METHODS])}")
    for what, text in rows:
        console.print(f"[dim]{what:8}[/dim] {text}", highlight=False, soft_wrap=True)
