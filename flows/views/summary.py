"""What finished commands print: the result of ``hacrl run`` and the cost of its stages; that of ``hacrl eval``."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.agents.evaluate import Evaluation
from flows.record.history import History
from flows.run.launch import Summary
from flows.tracking.links import page_of
from flows.views.text import gib, hacrl_command, percent
from hacrl_core.config.addresses import is_http, without_userinfo
from hacrl_core.contracts.tables import EVALUATION, read_table
from hacrl_core.evaluation import Outcomes, by_tag, summarise
from stages.evaluate import MOST_TAG_VALUES, outcomes_of

Metrics = Mapping[str, float]


# -- hacrl run --------------------------------------------------------------------------------------------------------


def show_summary(console: Console, summary: Summary) -> None:
    """Print accuracy before and after, what the stages cost, and where to look further."""
    history, name = summary.history, summary.history.config.name
    accuracies = {
        (agent, benchmark): dict(points)
        for agent in history.agents
        for benchmark in history.benchmarks
        if (points := history.accuracy(agent, benchmark))
    }
    if accuracies:
        console.print()
        console.print(_gains(accuracies))
    if summary.ran and (costs := stage_costs(history)):
        console.print()
        console.print(_costs(costs))
    console.print()
    if summary.ran == 0:
        console.print(f"All {summary.cached} stages were in the cache; nothing had to run. {summary.seconds:.1f} s.")
    else:
        console.print(f"{summary.ran} stages ran, {summary.cached} were in the cache. {summary.seconds:.0f} s.")
    if summary.picture is not None:
        console.print(f"learning curves: {_relative(summary.picture)}", soft_wrap=True)
    console.print(f"whole report:    {hacrl_command()} report {name}", soft_wrap=True)
    if summary.tracking_uri is not None:
        page = page_of(summary.home.campaign(name), summary.tracking_uri)
        if (command := _start_mlflow(summary.tracking_uri)) is not None:
            console.print(f"start MLflow:    {command}", soft_wrap=True)
        console.print(f"open MLflow:     {page}", soft_wrap=True, highlight=False)


def _gains(accuracies: Mapping[tuple[str, str], Mapping[float, float]]) -> Table:
    table = _table("Held-out accuracy", ("agent", "benchmark"), ("before", "after", "gain"))
    for (agent, benchmark), points in sorted(accuracies.items()):
        first, last = points[min(points)], points[max(points)]
        gain = f"{100 * (last - first):+.1f} points"
        style = "green" if last > first else "red"
        table.add_row(agent, benchmark, f"{first:.1%}", f"{last:.1%}", f"[{style}]{gain}[/{style}]")
    return table


def _start_mlflow(uri: str) -> str | None:
    """Return the command that serves a database; None where a server runs."""
    if is_http(uri):
        return None
    command = _relative(Path(sys.executable).with_name("mlflow"))
    if not uri.startswith("sqlite:///"):
        return f"{command} ui --backend-store-uri {without_userinfo(uri)}"
    return f"{command} ui --backend-store-uri sqlite:///{_relative(uri.removeprefix('sqlite:///'))}"


def _relative(path: str | Path) -> str:
    """Shorten a path below the current folder."""
    place = Path(path)
    return str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else str(place)


# -- the cost of stages -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageCost:
    """What one stage of one agent cost in a campaign."""

    agent: str
    stage: str
    runs: int
    mean_seconds: float
    # Of the agent's worker process.
    peak_bytes: int
    # Allocated by torch on a GPU.
    peak_device_bytes: int


def stage_costs(history: History) -> list[StageCost]:
    """Return the cost of each agent and stage that ran in a worker; artifacts without a manifest are left out."""
    found: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    for finished in history.finished:
        entry, made = finished.entry, finished.manifest.provenance
        if not entry.agent or entry.stage == "credit":
            continue
        one = (made.seconds, made.peak_memory_bytes, made.peak_device_bytes)
        found.setdefault((entry.agent, entry.stage), []).append(one)
    costs = []
    for (agent, stage), rows in found.items():
        seconds, host, device = zip(*rows, strict=True)
        costs.append(StageCost(agent, stage, len(rows), sum(seconds) / len(rows), max(host), max(device)))
    return costs


def _costs(costs: Sequence[StageCost]) -> Table:
    """Group the costs by agent, in the order in which stages first ran."""
    has_device = any(cost.peak_device_bytes for cost in costs)
    device_title = ["GPU GiB"] if has_device else []
    table = _table("Time and memory by stage", ("agent", "stage"), ("runs", "seconds each", "peak GiB", *device_title))
    for agent in dict.fromkeys(cost.agent for cost in costs):
        for place, cost in enumerate(c for c in costs if c.agent == agent):
            peaks = [cost.peak_bytes, *([cost.peak_device_bytes] if has_device else [])]
            name = agent if place == 0 else ""
            sizes = [gib(size, 2) if size else "–" for size in peaks]
            table.add_row(name, cost.stage, str(cost.runs), f"{cost.mean_seconds:.1f}", *sizes)
    return table


# -- hacrl eval -------------------------------------------------------------------------------------------------------


def show_evaluations(console: Console, agent: str, results: list[Evaluation]) -> None:
    """Print a line per benchmark, accuracy by tag, and the file with every answer."""
    outcomes = [outcomes_of(read_table(r.table, EVALUATION).to_pydict(), r.benchmark.samples) for r in results]
    console.print(Text(agent, style="bold"), soft_wrap=True)
    console.print(_overview(results, outcomes))
    for result, found in zip(results, outcomes, strict=True):
        for tag, values in by_tag(found, (1,)).items():
            if _is_informative(values, len(found.tags_P)):
                console.print()
                console.print(_breakdown(f"{result.benchmark.name} by {tag}", values, result.benchmark.samples))
    console.print()
    for result in results:
        how = "from the cache" if result.outcome.cached else f"{result.outcome.seconds:.1f} s"
        console.print(
            f"{result.benchmark.name}: {how}; every answer in {result.table}", soft_wrap=True, highlight=False
        )


def _overview(results: list[Evaluation], outcomes: list[Outcomes]) -> Table:
    ks = sorted({k for result in results for k in result.benchmark.reported_ks if k > 1})
    many = [f"{kind}@{k}" for k in ks for kind in ("pass", "best", "maj")]
    found = [summarise(o, r.benchmark.reported_ks) for r, o in zip(results, outcomes, strict=True)]
    unverified = any(metrics["unverified_share"] for metrics in found)
    titles = ["problems", "samples", "accuracy", "95 % interval", *many, "tokens", "cut off"]
    table = _table(None, ("benchmark",), [*titles, *(["not verified"] if unverified else [])], edge=0)
    for result, metrics in zip(results, found, strict=True):
        table.add_row(
            result.benchmark.name,
            *_counts(metrics, "problems", "samples"),
            *_accuracy(metrics, result.benchmark.samples),
            *(percent(metrics.get(name)) for name in many),
            f"{metrics['tokens_mean']:,.0f}",
            percent(metrics["truncated_share"]),
            *([percent(metrics["unverified_share"])] if unverified else []),
        )
    return table


def _breakdown(title: str, values: Mapping[str, Metrics], samples: int) -> Table:
    table = _table(title, ("",), ("problems", "accuracy", "95 % interval"), edge=0)
    for value, metrics in values.items():
        table.add_row(value, *_counts(metrics, "problems"), *_accuracy(metrics, samples))
    return table


def _is_informative(values: Mapping[str, Metrics], problems: int) -> bool:
    """One value repeats the overview; about one value per problem is a list of problems, not a breakdown."""
    return 1 < len(values) <= min(MOST_TAG_VALUES, problems // 2)


def _counts(metrics: Metrics, *names: str) -> list[str]:
    return [f"{metrics[name]:,.0f}" for name in names]


def _accuracy(metrics: Metrics, samples: int) -> list[str]:
    average = f"avg@{samples}"
    if average not in metrics:
        # Nothing could be verified.
        return ["", ""]
    interval = f"{100 * metrics[f'{average}/low']:.1f} – {percent(metrics[f'{average}/high'])}"
    return [percent(metrics[average]), interval]


def _table(title: str | None, left: Sequence[str], right: Sequence[str], edge: int = 2) -> Table:
    """Make a table without lines; ``edge`` is the room before its first column."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, edge), header_style="dim")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table
