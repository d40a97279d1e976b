"""What ``hacrl eval`` prints: a line per benchmark, accuracy by tag, and where the single answers are."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.agents.evaluate import Evaluation
from hacrl_core.contracts.tables import EVALUATION, read_table
from hacrl_core.evaluation import Outcomes, by_tag, summarise
from stages.evaluate import MOST_TAG_VALUES, outcomes_of

Metrics = Mapping[str, float]


def show_evaluations(console: Console, agent: str, results: list[Evaluation]) -> None:
    outcomes = [outcomes_of(read_table(r.table, EVALUATION).to_pydict(), r.benchmark.samples) for r in results]
    console.print(Text(agent, style="bold"), soft_wrap=True)
    console.print(_overview(results, outcomes))
    for result, found in zip(results, outcomes, strict=True):
        for tag, values in by_tag(found, (1,)).items():
            if _tells(values, len(found.tags_P)):
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
    table = _table(None, "benchmark", "problems", "samples", "accuracy", "95 % interval", *many, "tokens", "cut off")
    if unverified:
        table.add_column("not verified", justify="right")
    for result, metrics in zip(results, found, strict=True):
        table.add_row(
            result.benchmark.name,
            *_counts(metrics, "problems", "samples"),
            *_accuracy(metrics, result.benchmark.samples),
            *(_share(metrics.get(name)) for name in many),
            f"{metrics['tokens_mean']:,.0f}",
            _share(metrics["truncated_share"]),
            *([_share(metrics["unverified_share"])] if unverified else []),
        )
    return table


def _breakdown(title: str, values: Mapping[str, Metrics], samples: int) -> Table:
    table = _table(title, "", "problems", "accuracy", "95 % interval")
    for value, metrics in values.items():
        table.add_row(value, *_counts(metrics, "problems"), *_accuracy(metrics, samples))
    return table


def _tells(values: Mapping[str, Metrics], problems: int) -> bool:
    """One value says what the overview says; about one value per problem is no breakdown but a list of problems."""
    return 1 < len(values) <= min(MOST_TAG_VALUES, problems // 2)


def _table(title: str | None, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right")
    return table


def _counts(metrics: Metrics, *names: str) -> list[str]:
    return [f"{metrics[name]:,.0f}" for name in names]


def _accuracy(metrics: Metrics, samples: int) -> list[str]:
    average = f"avg@{samples}"
    if average not in metrics:  # nothing could be verified
        return ["", ""]
    return [_share(metrics[average]), f"{100 * metrics[f'{average}/low']:.1f} – {_share(metrics[f'{average}/high'])}"]


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
