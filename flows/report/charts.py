"""Panels drawn twice: as SVG text for the HTML page, and as PNGs with matplotlib for slides and mails.

The SVG has no colours or fonts of its own. They come from the page's style sheet, so light and dark are one drawing.
"""

import math
import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from flows.record.history import History, Points
from flows.report.panels import Bars, Chart, Layers, Line, Panel, Section, sections
from flows.views.text import decimal_time, percent, short
from hacrl_core.artifacts.files import sync

# The palette of Okabe and Ito, which people with colour blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
VERDICT_COLOURS = {
    "correct": "#009E73",
    "incorrect": "#D55E00",
    "unparseable": "#E69F00",
    "timeout": "#CC79A7",
    "error": "#555555",
}
LEARNING_CURVES = "learning-curves.png"
# Size and margins of an SVG chart.
WIDTH, HEIGHT = 420.0, 236.0
LEFT, RIGHT = 44.0, 12.0
TOP, BOTTOM = 10.0, 34.0
# Height of one horizontal bar.
_BAR = 26.0
_MARKS = ("o", "s", "^")
_STYLES = {"solid": "-", "dashed": "--", "dotted": ":", "faint": "-"}
_COLUMNS = 3


# -- SVG --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawing:
    """A chart's SVG, and for the page's script where its points are and what they say."""

    svg: str
    hover: dict[str, Any] | None


@dataclass(frozen=True)
class Scale:
    """A linear map from values to positions."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)


def draw(panel: Panel) -> Drawing:
    """Draw a panel as SVG."""
    if isinstance(panel, Chart):
        return _chart_svg(panel)
    return _layers_svg(panel) if isinstance(panel, Layers) else _bars_svg(panel)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers inside the interval, about as many as wanted."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next((m * magnitude for m in (1, 2, 2.5, 5) if m * magnitude >= rough), 10 * magnitude)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _chart_svg(chart: Chart) -> Drawing:
    x, y = _scales(chart)
    parts = [_grid(x, y, chart.percent, chart.x_title)]
    if chart.rule is not None and y.low <= chart.rule <= y.high:
        parts.append(
            f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(chart.rule):.1f}" y2="{y(chart.rule):.1f}"/>'
        )
    parts += [_band(line, x, y) for line in chart.lines if line.band is not None]
    parts += [_curve(line, x, y) for line in chart.lines]
    steps = sorted({point for line in chart.lines for point, _ in line.points})
    named = [line for line in chart.lines if line.style != "faint"]
    rows = {step: [_hover_row(line, step, chart.percent) for line in named] for step in steps}
    hover = {
        "x": [round(x(step), 1) for step in steps],
        "title": [f"{chart.x_title} {_step(step)}" for step in steps],
        "rows": [[row for row in rows[step] if row is not None] for step in steps],
    }
    return Drawing(_svg(chart.key, chart.title, HEIGHT, parts), hover)


def _hover_row(line: Line, step: float, as_percent: bool) -> list[Any] | None:
    values = dict(line.points)
    if step not in values:
        return None
    text = _value(values[step], as_percent)
    if line.band is not None:
        low, high = (dict(edge).get(step) for edge in line.band)
        if low is not None and high is not None:
            text += f" ({_value(low, as_percent)} to {_value(high, as_percent)})"
    return [line.agent % 7, line.name, text]


def _scales(chart: Chart) -> tuple[Scale, Scale]:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    ys += [y for line in chart.lines if line.band for edge in line.band for _, y in edge]
    ys += [] if chart.rule is None else [chart.rule]
    low, high = (0.0, 1.0) if chart.whole else _padded(min(ys), max(ys), chart.percent)
    last = max(xs) if max(xs) > min(xs) else min(xs) + 1
    return Scale(min(xs), last, LEFT, WIDTH - RIGHT), Scale(low, high, HEIGHT - BOTTOM, TOP)


def _padded(low: float, high: float, as_percent: bool) -> tuple[float, float]:
    """Add room above and below. Shares stay between 0 and 1, and an axis that starts near zero starts at zero."""
    room = 0.08 * (high - low) or 0.05 * max(abs(high), 0.02)
    bottom = 0.0 if low >= 0 and low - room < 0.15 * high else low - room
    return (max(0.0, bottom), min(1.0, high + room)) if as_percent else (bottom, high + room)


def _grid(x: Scale, y: Scale, as_percent: bool, x_title: str) -> str:
    parts = []
    for value in ticks(y.low, y.high, 4):
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{at + 4:.1f}">{_tick(value, as_percent)}</text>')
    parts += [
        f'<text class="tick mid" x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 15}">{short(value)}</text>'
        for value in ticks(x.low, x.high, 6)
        if x_title != "iterations" or value == int(value)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis mid" x="{middle}" y="{HEIGHT - 4}">{escape(x_title)}</text>')
    return "".join(parts)


def _band(line: Line, x: Scale, y: Scale) -> str:
    assert line.band is not None
    low, high = line.band
    around = [*high, *reversed(low)]
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in around)
    return f'<polygon class="band f{line.agent % 7}" points="{path}"/>'


def _curve(line: Line, x: Scale, y: Scale) -> str:
    number = line.agent % 7
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
    drawn = f'<polyline class="line {line.style} s{number}" points="{path}"/>'
    if line.marked or len(line.points) == 1:
        drawn += "".join(_mark(number, x(a), y(b)) for a, b in line.points)
    return drawn


def _mark(number: int, x: float, y: float) -> str:
    """Give each agent a shape, because colour alone does not tell them apart for everybody."""
    if number % 3 == 0:
        return f'<circle class="f{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    if number % 3 == 1:
        return f'<rect class="f{number}" x="{x - 2.8:.1f}" y="{y - 2.8:.1f}" width="5.6" height="5.6"/>'
    return f'<path class="f{number}" d="M{x:.1f},{y - 3.8:.1f}l3.6,6.4h-7.2z"/>'


def _layers_svg(panel: Layers) -> Drawing:
    steps = [x for x, _ in panel.layers[0][1]]
    x = Scale(steps[0], steps[-1] if len(steps) > 1 else steps[0] + 1, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    parts, below = [], [0.0] * len(steps)
    for verdict, points in panel.layers:
        above = [min(1.0, base + value) for base, (_, value) in zip(below, points, strict=True)]
        edge = [*zip(steps, above, strict=True), *reversed(list(zip(steps, below, strict=True)))]
        if len(steps) == 1:
            edge = [(steps[0], above[0]), (steps[0] + 1, above[0]), (steps[0] + 1, below[0]), (steps[0], below[0])]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in edge)
        parts.append(f'<polygon class="layer v-{verdict}" points="{path}"/>')
        below = above
    parts.append(_grid(x, y, True, panel.x_title))
    hover = {
        "x": [round(x(step), 1) for step in steps],
        "title": [f"{panel.x_title} {_step(step)}" for step in steps],
        "rows": [[[f"v-{v}", v, _value(points[i][1], True)] for v, points in panel.layers] for i in range(len(steps))],
    }
    return Drawing(_svg(panel.key, panel.title, HEIGHT, parts), hover)


def _bars_svg(panel: Bars) -> Drawing:
    longest = max(sum(value for _, value in parts) for _, parts in panel.rows) or 1.0
    total = sum(value for _, parts in panel.rows for _, value in parts) or 1.0
    left, right = 76.0, 92.0
    scale, height = Scale(0.0, longest, left, WIDTH - right), _BAR * len(panel.rows) + 8
    drawn = []
    for number, (label, parts) in enumerate(panel.rows):
        top, at = 4 + _BAR * number, left
        drawn.append(f'<text class="tick end" x="{left - 8}" y="{top + 17:.0f}">{escape(label)}</text>')
        for agent, value in parts:
            width = scale(value) - left
            name = panel.names[agent] if agent >= 0 else "everybody"
            shade = f"f{agent % 7}" if agent >= 0 else "nobody"
            title = f"<title>{escape(label)}, {escape(name)}: {value:.1f} s</title>"
            drawn.append(
                f'<rect class="bar {shade}" x="{at:.1f}" y="{top + 4:.0f}" '
                f'width="{max(width, 0.5):.1f}" height="17">{title}</rect>'
            )
            at += width
        whole = sum(value for _, value in parts)
        drawn.append(
            f'<text class="tick" x="{at + 6:.1f}" y="{top + 17:.0f}">{decimal_time(whole)}, {whole / total:.0%}</text>'
        )
    return Drawing(_svg(panel.key, panel.title, height, drawn), None)


def small_curve(points: Points, number: int) -> str:
    """Draw a small curve for a headline as SVG."""
    if len(points) < 2:
        return ""
    x = Scale(points[0][0], points[-1][0], 2, 118)
    values = [value for _, value in points]
    y = Scale(min(values), max(values) if max(values) > min(values) else min(values) + 1, 30, 4)
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    end = f'<circle class="f{number % 7}" cx="{x(points[-1][0]):.1f}" cy="{y(points[-1][1]):.1f}" r="3"/>'
    curve = f'<polyline class="line solid s{number % 7}" points="{path}"/>'
    return f'<svg class="spark" viewBox="0 0 122 34" aria-hidden="true">{curve}{end}</svg>'


def _svg(key: str, title: str, height: float, parts: list[str]) -> str:
    body = "".join(parts)
    return (
        f'<svg id="chart-{escape(key)}" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f'{body}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/></svg>'
    )


def _value(value: float, as_percent: bool) -> str:
    return percent(value) if as_percent else f"{value:.3g}"


def _tick(value: float, as_percent: bool) -> str:
    if as_percent:
        return f"{100 * value:.3g} %"
    return short(value) if abs(value) >= 1000 else f"{value:g}"


def _step(step: float) -> str:
    return f"{step:,.0f}" if abs(step - round(step)) < 1e-6 else f"{step:,.1f}"


# -- PNG --------------------------------------------------------------------------------------------------------------


def draw_learning_curves(history: History, folder: Path) -> Path | None:
    """Draw reward in training and held-out accuracy into the folder; return None if there is nothing to draw."""
    panels = [panel for section in sections(history) if section.key == "learning" for panel in section.panels]
    chosen = [panel for panel in panels if panel.key == "reward" or panel.key.startswith("accuracy-")]
    return draw_panels(tuple(chosen), history.agents, folder / LEARNING_CURVES) if chosen else None


def known_learning_curves(folder: Path) -> Path | None:
    """Return the picture in a campaign's folder; None if there is none, or the record is newer."""
    drawn, record = folder / LEARNING_CURVES, folder / "stages.jsonl"
    is_new = drawn.exists() and record.exists() and drawn.stat().st_mtime >= record.stat().st_mtime
    return drawn if is_new else None


def current_learning_curves(history: History, folder: Path) -> Path | None:
    """Return the picture in a campaign's folder, drawn again if the record is newer: several pages show the same."""
    if (known := known_learning_curves(folder)) is not None:
        return known
    with tempfile.TemporaryDirectory(dir=folder, prefix=".drawing-") as place:
        path = draw_learning_curves(history, Path(place))
        if path is None:
            return None
        sync(path)
        drawn = path.replace(folder / LEARNING_CURVES)
        sync(folder)
        return drawn


def draw_sections(sections: list[Section], history: History, folder: Path) -> list[Path]:
    """Draw ``learning.png`` and so on, one picture for each section; return their paths."""
    return [draw_panels(section.panels, history.agents, folder / f"{section.key}.png") for section in sections]


def draw_panels(panels: tuple[Panel, ...], agents: list[str], path: Path) -> Path:
    """Draw the panels side by side into one PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.4 * columns, 3.3 * rows), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_title(panel.title, fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        if isinstance(panel, Bars):
            _bars_png(axis, panel)
        else:
            axis.grid(alpha=0.25)
            axis.set_xlabel(panel.x_title)
            if panel.x_title == "iterations":
                axis.xaxis.get_major_locator().set_params(integer=True)
            else:
                # Counts as 20k, 40k, so that they do not run into each other.
                axis.xaxis.get_major_locator().set_params(nbins=6)
                axis.xaxis.set_major_formatter(lambda value, _: short(value))
            if isinstance(panel, Chart):
                _chart_png(axis, panel)
            else:
                _layers_png(axis, panel)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    handles = [Line2D([], [], color=COLOURS[n % 7], marker=_MARKS[n % 3], label=a) for n, a in enumerate(agents)]
    # Five times as fast as a constrained layout, which solves for every label. The legend has a strip of its own.
    figure.tight_layout(rect=(0, 0.32 / (3.3 * rows), 1, 1), w_pad=1.5, h_pad=1.5)
    figure.legend(handles=handles, loc="lower center", ncols=min(len(agents), 8), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _chart_png(axis: Any, chart: Chart) -> None:
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
        # Marks at halves of a percent only where nothing else fits, and then with their half.
        axis.yaxis.get_major_locator().set_params(steps=[1, 2, 5, 10])
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")


def _layers_png(axis: Any, panel: Layers) -> None:
    steps = [x for x, _ in panel.layers[0][1]]
    values = [[y for _, y in points] for _, points in panel.layers]
    names = [name for name, _ in panel.layers]
    if len(steps) == 1:
        steps, values = [steps[0], steps[0] + 1], [[v[0], v[0]] for v in values]
    axis.stackplot(steps, values, labels=names, colors=[VERDICT_COLOURS[n] for n in names], alpha=0.85)
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.legend(loc="lower right", fontsize=8)


def _bars_png(axis: Any, panel: Bars) -> None:
    labels = [label for label, _ in panel.rows]
    for place, (_, parts) in enumerate(panel.rows):
        start = 0.0
        for agent, value in parts:
            axis.barh(place, value, left=start, color=COLOURS[agent % 7] if agent >= 0 else "#999999", height=0.7)
            start += value
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
