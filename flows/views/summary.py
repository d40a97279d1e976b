"""The end of a run: accuracy before and after, the picture, and how to look further."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.record.history import History
from flows.run.launch import Summary
from flows.views.costs import show_costs, stage_costs
from hacrl_core.artifacts import Store


def show_summary(console: Console, summary: Summary) -> None:
    history = History(summary.config, Store(summary.home.store), summary.entries)
    accuracies = {
        (agent, benchmark): dict(points)
        for agent in history.agents
        for benchmark in history.benchmarks
        if (points := history.accuracy(agent, benchmark))
    }
    if accuracies:
        table = Table(title="Held-out accuracy", title_justify="left", box=None, padding=(0, 2), header_style="dim")
        for title, side in (
            ("agent", "left"),
            ("benchmark", "left"),
            ("before", "right"),
            ("after", "right"),
            ("gain", "right"),
        ):
            table.add_column(title, justify=side)  # type: ignore[arg-type]
        for (agent, benchmark), points in sorted(accuracies.items()):
            first, last = points[min(points)], points[max(points)]
            gain = f"{100 * (last - first):+.1f} points"
            style = "green" if last > first else "red"
            table.add_row(agent, benchmark, f"{first:.1%}", f"{last:.1%}", f"[{style}]{gain}[/{style}]")
        console.print()
        console.print(table)
    if summary.ran and (costs := stage_costs(history.store, summary.entries)):
        console.print()
        show_costs(console, costs)
    console.print()
    if summary.ran == 0:
        console.print(f"All {summary.cached} stages were in the cache; nothing had to run. {summary.seconds:.1f} s.")
    else:
        console.print(f"{summary.ran} stages ran, {summary.cached} were in the cache. {summary.seconds:.0f} s.")
    if summary.picture is not None:
        console.print(f"learning curves: {_short(summary.picture)}", soft_wrap=True)
    console.print(f"whole report:    hacrl report {summary.config.name}", soft_wrap=True)
    if summary.tracking_uri is not None:
        console.print(f"open MLflow:     {_open_mlflow(summary.tracking_uri)}", soft_wrap=True)


def _open_mlflow(uri: str) -> str:
    """The command that shows a local database, or the address of a server."""
    if not uri.startswith("sqlite:///"):
        return uri
    command = Path(sys.executable).with_name("mlflow")
    return f"{_short(command)} ui --backend-store-uri sqlite:///{_short(uri.removeprefix('sqlite:///'))}"


def _short(path: str | Path) -> str:
    place = Path(path)
    try:
        return str(place.relative_to(Path.cwd()))
    except ValueError:
        return str(place)
