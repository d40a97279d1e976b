"""``hacrl init``: write a first campaign."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.common import one_line_errors

app = typer.Typer()


@app.command()
@one_line_errors
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the campaign; NAME.yaml is written here.")],
    more: Annotated[list[str] | None, typer.Argument(metavar="", hidden=True)] = None,
    task: Annotated[
        str,
        typer.Option(
            metavar="TASK",
            help="What the agents learn: maths, code, reasoning_gym:NAME, or own, which also writes a task file with a "
            "verifier and its test.",
        ),
    ] = "maths",
    agents: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A B …",
            help="Who learns: folders of checkpoints, .gguf files, hub ids (org/model), or plain words for tiny agents "
            "that are made on the spot. Default: two tiny agents, ada and ben.",
        ),
    ] = None,
) -> None:
    """Write a commented campaign, check it, and say what to run next. Without options it runs on a CPU in minutes.

    [bold]hacrl init first[/bold]
    [bold]hacrl init mine --task own --agents Qwen/Qwen3-0.6B models/other[/bold]
    """
    from flows.scaffold.write import write_campaign
    from hacrl_core.errors import ConfigError

    if more and not agents:
        raise ConfigError(f"{more[0]!r}: not expected here; name agents with --agents {' '.join(more)}")
    written = write_campaign(name, task, [*(agents or ()), *(more or ())], Path())
    console = Console(soft_wrap=True, highlight=False)
    for path in written.files:
        console.print(f"wrote {path}")
    console.print()

    from flows.doctor.campaign import check_campaign
    from hacrl_core.config.campaign import CampaignConfig
    from hacrl_core.config.loading import load_config

    code = check_campaign(console, load_config(written.config, CampaignConfig, ()))
    if code:
        console.print(f"\nmend it in {written.config}, then check again: hacrl doctor --config {written.config}")
        raise typer.Exit(code)
    if written.task is not None:
        console.print(f"\nlook at your task: hacrl task try {written.task}")
    console.print(f"\nnext: hacrl run {written.config}")
