"""Panels as PNGs, one picture for each section, for slides and mails. The HTML page does not need them."""

from pathlib import Path
from typing import Any

from flows.record.history import History, short
from flows.report.panels import Bars, Chart, Layers, Panel, Section

# Okabe and Ito's colours, told apart by people who see fewer of them.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
VERDICT_COLOURS = {
    "correct": "#009E73",
    "incorrect": "#D55E00",
    "unparseable": "#E69F00",
    "timeout": "#CC79A7",
    "error": "#555555",
}
_MARKS = ("o", "s", "^")
_STYLES = {"solid": "-", "dashed": "--", "dotted": ":", "faint": "-"}
_COLUMNS = 3


def draw_sections(sections: list[Section], history: History, folder: Path) -> list[Path]:
    """``learning.png`` and so on; returns where they are."""
    return [draw_panels(section.panels, history.agents, folder / f"{section.key}.png") for section in sections]


def draw_panels(panels: tuple[Panel, ...], agents: list[str], path: Path) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.4 * columns, 3.3 * rows), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_title(panel.title, fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        if isinstance(panel, Bars):
            _bars(axis, panel)
        else:
            axis.grid(alpha=0.25)
            axis.set_xlabel(panel.x_title)
            if panel.x_title == "iterations":
                axis.xaxis.get_major_locator().set_params(integer=True)
            else:  # counts: 20k, 40k, so that they do not run into each other
                axis.xaxis.get_major_locator().set_params(nbins=6)
                axis.xaxis.set_major_formatter(lambda value, _: short(value))
            _chart(axis, panel, len(agents)) if isinstance(panel, Chart) else _layers(axis, panel)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    handles = [plt.Line2D([], [], color=COLOURS[n % 7], marker=_MARKS[n % 3], label=a) for n, a in enumerate(agents)]
    # Five times as fast as a constrained layout, which solves for every label; the legend gets a strip of its own.
    figure.tight_layout(rect=(0, 0.32 / (3.3 * rows), 1, 1), w_pad=1.5, h_pad=1.5)
    figure.legend(handles=handles, loc="lower center", ncols=min(len(agents), 8), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _chart(axis: Any, chart: Chart, agents: int) -> None:
    for line in chart.lines:
        colour = COLOURS[line.agent % 7]
        xs, ys = zip(*line.points, strict=True)
        if line.band is not None:
            low, high = ([y for _, y in edge] for edge in line.band)
            axis.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        faint = line.style == "faint"
        mark = _MARKS[line.agent % 3] if line.marked or len(xs) == 1 else ""
        axis.plot(
            xs,
            ys,
            _STYLES[line.style],
            color=colour,
            alpha=0.35 if faint else 1,
            linewidth=1 if faint else 1.6,
            marker=mark,
            markersize=3.5,
        )
    if chart.rule is not None:
        axis.axhline(chart.rule, color="#888888", linewidth=0.8, zorder=0)
    if chart.whole:
        axis.set_ylim(0, 1)
    if chart.percent:
        axis.yaxis.set_major_formatter("{x:.0%}")


def _layers(axis: Any, panel: Layers) -> None:
    steps = [x for x, _ in panel.layers[0][1]]
    values = [[y for _, y in points] for _, points in panel.layers]
    names = [name for name, _ in panel.layers]
    if len(steps) == 1:
        steps, values = [steps[0], steps[0] + 1], [[v[0], v[0]] for v in values]
    axis.stackplot(steps, values, labels=names, colors=[VERDICT_COLOURS[n] for n in names], alpha=0.85)
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.legend(loc="lower right", fontsize=8)


def _bars(axis: Any, panel: Bars) -> None:
    labels = [label for label, _ in panel.rows]
    for place, (_, parts) in enumerate(panel.rows):
        start = 0.0
        for agent, value in parts:
            axis.barh(place, value, left=start, color=COLOURS[agent % 7] if agent >= 0 else "#999999", height=0.7)
            start += value
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
