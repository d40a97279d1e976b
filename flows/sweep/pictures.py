"""Pictures of a sweep: learning curves with bands, accuracy against cost, differences to the baseline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flows.report.charts import COLOURS
from flows.sweep.results import BOTH, CellResult, Series
from flows.sweep.statistics import Comparison

_LINES = ("-", "--", ":", "-.")


def draw_curves(
    results: Sequence[CellResult], variants: Sequence[str], labels: dict[str, str], agents: Sequence[str], path: Path
) -> None:
    """Draw reward in training above, held-out accuracy below, an agent per column; bands are ± one standard error."""
    figure, axes = _canvas(2, len(agents), 4.6 * len(agents), 7)
    for column, agent in enumerate(agents):
        for number, variant in enumerate(variants):
            cells = [r.agents[agent] for r in results if r.variant == variant]
            style = _style(number, labels.get(variant, variant))
            _band(axes[0][column], [_smooth(cell.reward) for cell in cells], style)
            _band(axes[1][column], [cell.accuracy for cell in cells], style, marker="o")
        axes[0][column].set(title=f"{agent}: reward while training", xlabel="iterations")
        axes[1][column].set(title=f"{agent}: held-out accuracy", xlabel="iterations")
        for axis in axes[:, column]:
            # There is no iteration 1.25.
            axis.xaxis.get_major_locator().set_params(integer=True)
    axes[1][0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def draw_costs(results: Sequence[CellResult], variants: Sequence[str], labels: dict[str, str], path: Path) -> None:
    """Draw the agents' mean accuracy against what all of them sampled, in responses and in tokens."""
    figure, axes = _canvas(1, 2, 10, 4)
    for number, variant in enumerate(variants):
        cells = [r for r in results if r.variant == variant]
        style = _style(number, labels.get(variant, variant))
        for axis, what in zip(axes[0], ("responses", "tokens"), strict=True):
            points = [_against(cell, what) for cell in cells]
            if points:
                x, y = (np.mean([[p[i] for p in cell] for cell in points], axis=0) for i in (0, 1))
                axis.plot(x, 100 * y, marker="o", markersize=3, **style)
            axis.set(xlabel=f"thousand {what} sampled by all agents", ylabel="held-out accuracy, mean of agents (%)")
            axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}")
    axes[0][1].legend(frameon=False, fontsize=8)
    _save(figure, path)


def draw_forest(
    comparisons: Sequence[Comparison], labels: dict[str, str], baseline: str, agents: Sequence[str], path: Path
) -> None:
    """Draw the difference to the baseline with its 95 % interval, for the agents' mean and for each, on one scale."""
    shown = [v for v in dict.fromkeys(c.variant for c in comparisons) if v != baseline]
    outcomes = (BOTH, *agents)
    figure, axes = _canvas(1, len(outcomes), 3.4 * len(outcomes) + 1.5, 1 + 0.36 * len(shown), sharey=True, sharex=True)
    for axis, agent in zip(axes[0], outcomes, strict=True):
        axis.axvline(0, color="#888888", linewidth=1)
        for row, variant in enumerate(shown):
            d = next(c.difference for c in comparisons if (c.variant, c.agent) == (variant, agent))
            if d is None:
                continue
            colour = "#666666"
            if d.excludes_zero:
                colour = COLOURS[0] if d.mean > 0 else COLOURS[1]
            if np.isfinite(d.low):
                axis.plot([100 * d.low, 100 * d.high], [row, row], color=colour, linewidth=2)
            axis.plot(100 * d.mean, row, "o", color=colour)
        axis.set(title=agent, xlabel=f"points over {labels.get(baseline, baseline)}")
    axes[0][0].set_yticks(range(len(shown)), [labels.get(v, v) for v in shown])
    axes[0][0].invert_yaxis()
    _save(figure, path)


def _canvas(rows: int, columns: int, width: float, height: float, **shared: Any) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **shared)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _style(number: int, label: str) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": _LINES[number // len(COLOURS) % len(_LINES)],
        "label": label,
    }


def _band(axis: Any, series: list[Series], style: dict[str, Any], **more: Any) -> None:
    if not series:
        return
    steps = sorted(set.intersection(*(set(s) for s in series)))
    values = 100 * np.array([[s[step] for step in steps] for s in series])
    mean = values.mean(axis=0)
    axis.plot(steps, mean, markersize=3, **style, **more)
    if len(series) > 1:
        error = values.std(axis=0, ddof=1) / np.sqrt(len(series))
        axis.fill_between(steps, mean - error, mean + error, color=style["color"], alpha=0.12, linewidth=0)
    axis.set_ylabel("%")


def _against(cell: CellResult, what: str) -> list[tuple[float, float]]:
    cost = cell.cost(what)
    steps = sorted(set.intersection(*(set(a.accuracy) for a in cell.agents.values())))
    return [(cost[step], float(np.mean([a.accuracy[step] for a in cell.agents.values()]))) for step in steps]


def _smooth(series: Series, width: int = 5) -> Series:
    steps = sorted(series)
    return {s: float(np.mean([series[t] for t in steps[max(0, i - width + 1) : i + 1]])) for i, s in enumerate(steps)}
