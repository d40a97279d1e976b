"""``hacrl status``, ``logs``, ``diagnose``, ``feedback``, ``report`` and ``export``: look at campaigns and agents."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.common import CampaignArgument, HomeOption, one_line_errors
from flows.home import Home
from flows.views.text import size_text

app = typer.Typer()


@app.command()
@one_line_errors
def status(
    campaign: Annotated[str | None, typer.Argument(help="Name of the campaign. Default: all campaigns.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every two seconds until Ctrl-C.")] = False,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also list old campaigns.")] = False,
    home: HomeOption = None,
) -> None:
    """Show running and past campaigns: progress, rate, time left, cost, and how good their agents are.

    [bold]each[/bold] is the wall time of one iteration, [bold]left[/bold] the time that remains at that rate.

    [bold]responses[/bold] and [bold]tokens[/bold] are those of all agents in training.

    [bold]stages[/bold] is the sum of the time of all stages. A narrow terminal leaves columns out.
    """
    from flows.views.status import show_status, watch_status

    (watch_status if watch else show_status)(Console(), Home.find(home), campaign, everything=all_)


@app.command()
@one_line_errors
def logs(
    campaign: CampaignArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines as they come, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of last lines to show; 0 shows all.")] = 40,
    problems: Annotated[bool, typer.Option("--problems", "-p", help="Show only warnings and errors.")] = False,
    worker: Annotated[str | None, typer.Option(help="Show only what the worker process of this agent printed.")] = None,
    home: HomeOption = None,
) -> None:
    """Show the log of a campaign: stages and their seconds, warnings, errors, and the output of worker processes."""
    from flows.views.status import show_log

    show_log(Console(), Home.find(home), campaign, lines=lines, following=follow, problems=problems, worker=worker)


@app.command()
@one_line_errors
def diagnose(
    campaign: CampaignArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Say why a campaign does not learn: rules over its responses, verdicts, scores, updates and evaluations.

    Each finding has a cause, one thing to do, and its evidence; the cause that explains the others comes first. The
    exit code is 1 where something is found.
    """
    from flows.diagnose.diagnose import show_diagnosis

    console = Console(highlight=False, quiet=as_json)
    found = show_diagnosis(console, Home.find(home), campaign)
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps([asdict(finding) for finding in found], indent=1))
    if found:
        raise typer.Exit(1)


@app.command()
@one_line_errors
def feedback(
    campaign: CampaignArgument = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Also write the labelled responses to this file, as JSONL."),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Read the verdicts that people gave to traces in MLflow, and list where the verifier was wrong.

    They are kept in the campaign's folder, and shown by [bold]hacrl rollouts[/bold] and in the report. No past artifact
    changes. With [bold]--out[/bold] they are test cases for the verifier of the next campaign.
    """
    from flows.tracking.feedback import show_feedback

    show_feedback(Console(), Home.find(home), campaign, out)


@app.command()
@one_line_errors
def report(
    campaign: CampaignArgument = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write into. Default: report in the campaign's folder.")
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Also write the charts as PNGs.")] = True,
    home: HomeOption = None,
) -> None:
    """Write a campaign's report: one self-contained HTML page, and the charts as PNGs. Works while it runs, too."""
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
            help="campaign/agent for the latest version, or with @best, @latest or @12 (after 12 iterations).",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into; it must be new or empty.")],
    gguf: Annotated[
        bool,
        typer.Option("--gguf", help="Also write a GGUF file for llama.cpp and Ollama, with a Modelfile beside it."),
    ] = False,
    gguf_type: Annotated[
        str, typer.Option(help="Numbers in the GGUF file: f32, exact, or f16, half the size.")
    ] = "f32",
    home: HomeOption = None,
) -> None:
    """Write an agent as a plain checkpoint that transformers and vLLM load without this project.

    [bold]@best[/bold] is the version with the highest mean accuracy on its campaign's benchmarks.
    """
    from flows.agents.export import export_agent

    done = export_agent(Home.find(home), agent, folder, gguf_type if gguf else None)
    Console().print(f"{done.name} in {done.folder}, {size_text(done.bytes)}", soft_wrap=True, highlight=False)
