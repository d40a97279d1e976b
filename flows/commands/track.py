"""Commands for MLflow."""

from typing import Annotated

import typer
from rich.console import Console

from flows.commands.common import HomeOption, one_line_errors
from flows.home import Home

app = typer.Typer(no_args_is_help=True, help="MLflow: bring it up to date with what the campaigns measured.")


@app.command("sync")
@one_line_errors
def sync(
    campaign: Annotated[str | None, typer.Argument(help="Name of a campaign. Default: all campaigns.")] = None,
    home: HomeOption = None,
) -> None:
    """Send MLflow what it missed while it was away. Nothing is sent twice."""
    from flows.tracking.feed import sync_campaigns

    raise typer.Exit(sync_campaigns(Console(), Home.find(home), campaign))
