"""Panels as SVG text. Colours and fonts come from the page's style sheet, so that light and dark are one drawing."""

import math
from dataclasses import dataclass
from html import escape
from typing import Any

from flows.record.history import Points, short
from flows.report.panels import Bars, Chart, Layers, Line, Panel

WIDTH, HEIGHT = 420.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 12.0, 10.0, 34.0
_BAR = 26.0  # height of one horizontal bar


@dataclass(frozen=True)
class Drawing:
    svg: str
    hover: dict[str, Any] | None  # for the page's script: where the points are, and what they say


@dataclass(frozen=True)
class Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)


def draw(panel: Panel) -> Drawing:
    if isinstance(panel, Chart):
        return _chart(panel)
    return _layers(panel) if isinstance(panel, Layers) else _bars(panel)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers inside the interval, about as many as wanted."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next((m * magnitude for m in (1, 2, 2.5, 5) if m * magnitude >= rough), 10 * magnitude)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


# -- charts --------------------------------------------------------------------------------------------------------------


def _chart(chart: Chart) -> Drawing:
    x, y = _scales(chart)
    parts = [_grid(x, y, chart.percent, chart.x_title)]
    if chart.rule is not None and y.low <= chart.rule <= y.high:
        parts.append(
            f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(chart.rule):.1f}" y2="{y(chart.rule):.1f}"/>'
        )
    parts += [_band(line, x, y) for line in chart.lines if line.band is not None]
    parts += [_curve(line, x, y) for line in chart.lines]
    steps = sorted({point for line in chart.lines for point, _ in line.points})
    told = [line for line in chart.lines if line.style != "faint"]
    rows = {step: [_told(line, step, chart.percent) for line in told] for step in steps}
    hover = {
        "x": [round(x(step), 1) for step in steps],
        "title": [f"{chart.x_title} {_plain(step)}" for step in steps],
        "rows": [[row for row in rows[step] if row is not None] for step in steps],
    }
    return Drawing(_svg(chart.key, chart.title, HEIGHT, parts), hover)


def _told(line: Line, step: float, percent: bool) -> list[Any] | None:
    values = dict(line.points)
    if step not in values:
        return None
    text = _value(values[step], percent)
    if line.band is not None:
        low, high = (dict(edge).get(step) for edge in line.band)
        if low is not None and high is not None:
            text += f" ({_value(low, percent)} to {_value(high, percent)})"
    return [line.agent % 7, line.name, text]


def _scales(chart: Chart) -> tuple[Scale, Scale]:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    ys += [y for line in chart.lines if line.band for edge in line.band for _, y in edge]
    ys += [] if chart.rule is None else [chart.rule]
    low, high = (0.0, 1.0) if chart.whole else _padded(min(ys), max(ys), chart.percent)
    return Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, LEFT, WIDTH - RIGHT), Scale(
        low, high, HEIGHT - BOTTOM, TOP
    )


def _padded(low: float, high: float, percent: bool) -> tuple[float, float]:
    """A little air above and below; shares stay between 0 and 1, and what starts near zero starts at zero."""
    room = 0.08 * (high - low) or 0.05 * max(abs(high), 0.02)
    bottom = 0.0 if low >= 0 and low - room < 0.15 * high else low - room
    return (max(0.0, bottom), min(1.0, high + room)) if percent else (bottom, high + room)


def _grid(x: Scale, y: Scale, percent: bool, x_title: str) -> str:
    parts = []
    for value in ticks(y.low, y.high, 4):
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{at + 4:.1f}">{_tick(value, percent)}</text>')
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
    """A shape for each agent: colour alone does not tell them apart for everybody."""
    if number % 3 == 0:
        return f'<circle class="f{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    if number % 3 == 1:
        return f'<rect class="f{number}" x="{x - 2.8:.1f}" y="{y - 2.8:.1f}" width="5.6" height="5.6"/>'
    return f'<path class="f{number}" d="M{x:.1f},{y - 3.8:.1f}l3.6,6.4h-7.2z"/>'


# -- layers and bars -----------------------------------------------------------------------------------------------------


def _layers(panel: Layers) -> Drawing:
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
        "title": [f"{panel.x_title} {_plain(step)}" for step in steps],
        "rows": [[[f"v-{v}", v, _value(points[i][1], True)] for v, points in panel.layers] for i in range(len(steps))],
    }
    return Drawing(_svg(panel.key, panel.title, HEIGHT, parts), hover)


def _bars(panel: Bars) -> Drawing:
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
                f'<rect class="bar {shade}" x="{at:.1f}" y="{top + 4:.0f}" width="{max(width, 0.5):.1f}" height="17">{title}</rect>'
            )
            at += width
        whole = sum(value for _, value in parts)
        drawn.append(
            f'<text class="tick" x="{at + 6:.1f}" y="{top + 17:.0f}">{_seconds(whole)}, {whole / total:.0%}</text>'
        )
    return Drawing(_svg(panel.key, panel.title, height, drawn), None)


# -- text ----------------------------------------------------------------------------------------------------------------


def sparkline(points: Points, number: int) -> str:
    """A small curve for a headline."""
    if len(points) < 2:
        return ""
    x = Scale(points[0][0], points[-1][0], 2, 118)
    values = [value for _, value in points]
    y = Scale(min(values), max(values) if max(values) > min(values) else min(values) + 1, 30, 4)
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    end = f'<circle class="f{number % 7}" cx="{x(points[-1][0]):.1f}" cy="{y(points[-1][1]):.1f}" r="3"/>'
    return f'<svg class="spark" viewBox="0 0 122 34" aria-hidden="true"><polyline class="line solid s{number % 7}" points="{path}"/>{end}</svg>'


def _svg(key: str, title: str, height: float, parts: list[str]) -> str:
    body = "".join(parts)
    return (
        f'<svg id="chart-{escape(key)}" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f'{body}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/></svg>'
    )


def _value(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.3g}"


def _tick(value: float, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else short(value) if abs(value) >= 1000 else f"{value:g}"


def _plain(step: float) -> str:
    return f"{step:,.0f}" if abs(step - round(step)) < 1e-6 else f"{step:,.1f}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min" if value < 5400 else f"{value / 3600:.1f} h"
