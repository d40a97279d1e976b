"""Commands that look at campaigns: status, logs, the report; and the one that takes an agent out."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.common import CampaignArgument, HomeOption, one_line_errors
from flows.home import Home

app = typer.Typer()


@app.command()
@one_line_errors
def status(
    campaign: Annotated[str | None, typer.Argument(help="Name of a campaign; all of them unless given.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every two seconds until Ctrl-C.")] = False,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also campaigns that ended long ago.")] = False,
    home: HomeOption = None,
) -> None:
    """Show running and past campaigns: progress, rate, time left, what they cost, how good their agents are.

    [bold]each[/bold] is the wall time of one iteration, [bold]left[/bold] what remains at that rate; [bold]responses[/bold] and
    [bold]tokens[/bold] are those of all agents in training, [bold]stages[/bold] the time of all stages, side by side or not.
    """
    from flows.views.status import show_status, watch_status

    (watch_status if watch else show_status)(Console(), Home.find(home), campaign, everything=all_)


@app.command()
@one_line_errors
def logs(
    campaign: CampaignArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on showing new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines; 0 shows all.")] = 40,
    problems: Annotated[bool, typer.Option("--problems", "-p", help="Only warnings and errors.")] = False,
    worker: Annotated[str | None, typer.Option(help="Only what this agent's worker process printed.")] = None,
    home: HomeOption = None,
) -> None:
    """Show what happened in a campaign: stages with their seconds, warnings, errors, what worker processes printed."""
    from flows.views.status import show_log

    show_log(Console(), Home.find(home), campaign, lines=lines, following=follow, problems=problems, worker=worker)


@app.command()
@one_line_errors
def report(
    campaign: CampaignArgument = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write into; the campaign's own unless given.")
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Also write the charts as PNGs.")] = True,
    home: HomeOption = None,
) -> None:
    """Write a campaign as one HTML page that needs nothing else, and its charts as PNGs; also while it runs."""
    from flows.report.page import write_report

    console = Console()
    for path in write_report(Home.find(home), campaign, out, pictures=pictures):
        console.print(str(path), soft_wrap=True, highlight=False)


@app.command()
@one_line_errors
def export(
    agent: Annotated[
        str,
        typer.Argument(
            metavar="AGENT",
            help="campaign/agent, its latest version; or with @best, @latest, @12 (after 12 iterations).",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is new or empty.")],
    home: HomeOption = None,
) -> None:
    """Write an agent as a plain checkpoint that transformers and vLLM load without this project.

    [bold]@best[/bold] is the version with the highest mean accuracy on its campaign's benchmarks.
    """
    from flows.agents.export import export_agent

    done = export_agent(Home.find(home), agent, folder)
    Console().print(f"{done.name} in {done.folder}, {done.bytes / 1e6:.1f} MB", soft_wrap=True, highlight=False)
