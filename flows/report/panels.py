"""A campaign's charts as data: what to draw, not how. One list of panels feeds the HTML page and the PNGs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from flows.record.history import ANSWERING, History, Points, by_step, smooth
from flows.report.profile import PROFILE_NOTE, Rows, rows_of_profile

# Of a line; more cannot be distinguished on a screen.
MOST_POINTS = 240
VERDICTS = ("correct", "incorrect", "unparseable", "timeout", "error")


@dataclass(frozen=True)
class Line:
    """One curve of a chart. The agent's number decides the colour."""

    name: str
    points: Points
    agent: int
    # solid, dashed, dotted or faint.
    style: str = "solid"
    # Its lower and upper edge.
    band: tuple[Points, Points] | None = None
    # A mark at every point.
    marked: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over iterations, or over a cost."""

    key: str
    title: str
    note: str
    lines: tuple[Line, ...]
    percent: bool = False
    x_title: str = "iterations"
    # A horizontal line to compare with.
    rule: float | None = None
    # The y axis goes from 0 to 1.
    whole: bool = False


@dataclass(frozen=True)
class Layers:
    """Shares that add up to one, over the iterations."""

    key: str
    title: str
    note: str
    # By verdict.
    layers: tuple[tuple[str, Points], ...]
    x_title: str = "iterations"


@dataclass(frozen=True)
class Bars:
    """One horizontal bar for each row, made of the agents' parts."""

    key: str
    title: str
    note: str
    # A label and its parts (agent, seconds); agent -1 is what belongs to no agent.
    rows: Rows
    names: tuple[str, ...]


Panel = Chart | Layers | Bars


@dataclass(frozen=True)
class Section:
    """Panels under one heading, and in one PNG."""

    key: str
    title: str
    panels: tuple[Panel, ...]


def sections(history: History) -> list[Section]:
    """Return the sections that have data: a single agent has no foreign ratios, for example."""
    found = [
        Section("learning", "Learning", tuple(_learning(history))),
        Section("exchange", "What agents take from each other", tuple(_exchange(history))),
        Section("answers", "Answers", tuple(_answers(history))),
        Section("time", "Where the time went", tuple(_time(history))),
    ]
    return [section for section in found if section.panels]


# -- learning ---------------------------------------------------------------------------------------------------------


def _learning(history: History) -> Iterator[Panel]:
    for benchmark in history.benchmarks:
        yield from _kept(
            Chart(
                f"accuracy-{benchmark}",
                f"Accuracy, {benchmark}",
                "Held-out problems, with 95 % intervals.",
                _lines(history, partial(_with_interval, history, benchmark)),
                percent=True,
            )
        )
    yield from _kept(
        Chart(
            "reward",
            "Reward in training",
            "Mean over the iteration's responses (faint), and over its last five iterations.",
            tuple(line for n, a in enumerate(history.agents) for line in _reward_lines(history, n, a)),
        )
    )
    yield from _kept(
        Chart(
            "capability",
            "Capability",
            "What an agent's answers count for: its mean reward of the last iterations.",
            _lines(history, lambda a: (history.capability(a), None)),
        )
    )
    for metric in ("responses", "tokens"):
        yield from _kept(_against_cost(history, metric))
    for benchmark in history.benchmarks:
        yield from _by_tag(history, benchmark)


def _with_interval(history: History, benchmark: str, agent: str) -> tuple[Points, tuple[Points, Points] | None]:
    points = history.accuracy(agent, benchmark)
    low, high = (history.accuracy(agent, benchmark, f"accuracy_{side}") for side in ("low", "high"))
    return points, (low, high) if len(low) == len(high) == len(points) else None


def _reward_lines(history: History, number: int, agent: str) -> list[Line]:
    points = history.rewards(agent)
    return [
        Line(f"{agent}, each", thin(points), number, "faint"),
        Line(agent, thin(smooth(points)), number),
    ]


def _against_cost(history: History, metric: str) -> Chart:
    spent = history.spent_until(metric)

    def line(agent: str) -> tuple[Points, tuple[Points, Points] | None]:
        if len(history.benchmarks) == 1:
            points, band = _with_interval(history, history.benchmarks[0], agent)
            return _moved(points, spent), None if band is None else (_moved(band[0], spent), _moved(band[1], spent))
        return _moved(by_step(history.mean_accuracy(agent)), spent), None

    return Chart(
        f"cost-{metric}",
        f"Accuracy against {metric}",
        f"{metric.capitalize()} that all agents together had written in training.",
        _lines(history, line),
        percent=True,
        x_title=metric,
    )


def _moved(points: Points, spent: dict[int, float]) -> Points:
    """Replace iterations by what they had cost."""
    return [(spent[int(step)], value) for step, value in points if int(step) in spent]


def _by_tag(history: History, benchmark: str) -> Iterator[Panel]:
    """Yield a panel for each tag with two or three values, e.g. kind: addition, subtraction."""
    names = sorted({n for h in history.finished if h.entry.variant == benchmark for n in h.manifest.metrics})
    parts = [n.removeprefix(f"evaluate/{benchmark}/").split("/") for n in names if "@" not in n]
    for tag, values in groupby((p for p in parts if len(p) == 2), key=lambda p: p[0]):
        kinds = [value for _, value in values]
        if not 2 <= len(kinds) <= 3:
            continue
        lines = [
            Line(f"{agent}, {kind}", history.accuracy(agent, benchmark, f"{tag}/{kind}"), number, style, marked=True)
            for number, agent in enumerate(history.agents)
            for kind, style in zip(kinds, ("solid", "dashed", "dotted"), strict=False)
        ]
        key = f"tag-{benchmark}-{tag}"
        yield from _kept(
            Chart(key, f"Accuracy by {tag}", f"Of {benchmark}. {_legend(kinds)}", tuple(lines), percent=True)
        )


def _legend(kinds: list[str]) -> str:
    return (
        ", ".join(f"{style}: {kind}" for style, kind in zip(("Solid", "dashed", "dotted"), kinds, strict=False)) + "."
    )


# -- exchange ---------------------------------------------------------------------------------------------------------


def _exchange(history: History) -> Iterator[Panel]:
    for chart in (*_ratios(history), *_pull(history)):
        yield from _kept(chart)


def _ratios(history: History) -> tuple[Chart, ...]:
    """Return the charts of how close the learner is to the samplers, and how many responses count."""
    return (
        Chart(
            "foreign-ratio",
            "Ratio of foreign responses",
            "Learner now against the sampler then, mean. "
            "The dashed lines are the lower edge of the window in the first and in the last foreign minibatch; the "
            "upper edge is 1.",
            (
                *_update_lines(history, "foreign_ratio_mean"),
                *_update_lines(history, "window_first_low", "dashed", only="foreign_ratio_mean"),
                *_update_lines(history, "window_last_low", "dashed", only="foreign_ratio_mean"),
            ),
            rule=1.0,
        ),
        Chart(
            "own-ratio",
            "Ratio of own responses",
            "Learner now against itself at the start of the iteration; the band goes from smallest to largest.",
            _update_lines(history, "own_ratio_mean", band=("own_ratio_min", "own_ratio_max")),
            rule=1.0,
        ),
        Chart(
            "inside",
            "Foreign responses inside the window",
            "The first thing to look at: what is outside teaches nothing.",
            _update_lines(history, "foreign_inside_fraction"),
            percent=True,
            whole=True,
        ),
        Chart(
            "clipped",
            "Clipped",
            "Solid: foreign responses; dashed: own.",
            (
                *_update_lines(history, "foreign_clip_fraction"),
                *_update_lines(history, "own_clip_fraction", "dashed"),
            ),
            percent=True,
            whole=True,
        ),
    )


def _pull(history: History) -> tuple[Chart, ...]:
    """Return the charts of where the updates go, and how far."""
    return (
        Chart(
            "cosine",
            "Gradient alignment",
            "Cosine between the own and the foreign gradient before the first update; above 0 they pull the same way. "
            "Dashed: between two halves of the own responses, for comparison.",
            (*_update_lines(history, "gradient_cosine"), *_update_lines(history, "gradient_cosine_own", "dashed")),
            rule=0.0,
        ),
        Chart(
            "sample-size",
            "Effective share of foreign responses",
            "Effective sample size of the foreign weights, as a share of the foreign responses.",
            _update_lines(history, "foreign_ess_fraction"),
            percent=True,
            whole=True,
        ),
        Chart(
            "kl",
            "Distance from the start",
            "KL divergence per token to the campaign's first version, on own responses.",
            _update_lines(history, "kl_to_start"),
        ),
        Chart(
            "gradient",
            "Gradient norm",
            "Mean over the iteration's updates, before clipping.",
            _update_lines(history, "gradient_norm_mean"),
        ),
    )


def _update_lines(
    history: History, metric: str, style: str = "solid", *, band: tuple[str, str] | None = None, only: str = ""
) -> tuple[Line, ...]:
    """Return a line per agent that has the metric, and ``only`` too where it is given."""
    lines = []
    for number, agent in enumerate(history.agents):
        points = history.series("update", agent, metric)
        if not points or (only and not history.series("update", agent, only)):
            continue
        edges = tuple(thin(history.series("update", agent, edge)) for edge in band) if band else None
        name = agent if style == "solid" else f"{agent}, {metric.replace('_', ' ').removesuffix(' fraction')}"
        lines.append(Line(name, thin(points), number, style, edges if edges is None else (edges[0], edges[1])))
    return tuple(lines)


# -- answers, time ----------------------------------------------------------------------------------------------------


def _answers(history: History) -> Iterator[Panel]:
    for agent in history.agents:
        layers = tuple((v, thin(history.series("verify", agent, f"{v}_share"))) for v in VERDICTS)
        layers = tuple((v, points) for v, points in layers if any(value for _, value in points))
        if layers:
            yield Layers(f"verdicts-{agent}", f"Verdicts, {agent}", "Share of its responses in training.", layers)
    for name in history.metric_names("verify", "part/"):
        yield from _kept(
            Chart(
                f"part-{name.removeprefix('part/').replace('/', '-')}",
                f"Reward: {name.removeprefix('part/')}",
                "Mean of this part of the reward in training, in its own range.",
                _lines(history, lambda a, name=name: (history.series("verify", a, name), None)),  # type: ignore[misc]
            )
        )
    yield from _kept(
        Chart(
            "length",
            "Length of responses",
            "Tokens, mean, in each agent's own tokens.",
            _lines(history, lambda a: (history.series("generate", a, "response_length_mean"), None)),
        )
    )
    yield from _kept(
        Chart(
            "signal",
            "Prompts without a signal",
            f"All rewards equal: nothing to learn from.{_attempts_note(history)}",
            _lines(history, lambda a: (history.series("credit", a, "no_signal_share"), None)),
            percent=True,
            whole=True,
        )
    )


def _attempts_note(history: History) -> str:
    again = history.config.resample
    return f" An agent's own such prompts were answered again before this, up to {again} times." if again else ""


def _time(history: History) -> Iterator[Panel]:
    numbers = {agent: number for number, agent in enumerate(history.agents)}
    rows = tuple(
        (stage, tuple((numbers.get(agent, -1), seconds) for agent, seconds in sorted(parts.items())))
        for stage, parts in history.seconds_by_stage().items()
    )
    if rows:
        note = "Seconds of all iterations and evaluations; stages of different agents run side by side."
        yield Bars("stages", "Time by stage", note, rows, tuple(history.agents))
    if profiled := rows_of_profile(history):
        yield Bars("profile", "What the processes did", PROFILE_NOTE, profiled, tuple(history.agents))
    yield from _kept(
        Chart(
            "pace",
            "Seconds of an iteration",
            "The stages of each agent, added up, without evaluations.",
            _lines(history, lambda a: (_pace(history, a), None)),
        )
    )


def _pace(history: History, agent: str) -> Points:
    total: dict[int, float] = {}
    for stage in ("generate", "verify", "credit", "score", "update"):
        for attempt in history.config.attempts if stage in ANSWERING else ("",):
            for finished in history.stages(stage, agent, attempt):
                total[finished.step] = total.get(finished.step, 0.0) + finished.manifest.provenance.seconds
    return by_step(total)


# -- helpers ----------------------------------------------------------------------------------------------------------


def _lines(history: History, of: Callable[[str], tuple[Points, tuple[Points, Points] | None]]) -> tuple[Line, ...]:
    lines: list[Line] = []
    for number, agent in enumerate(history.agents):
        points, band = of(agent)
        edges = None if band is None else (thin(band[0]), thin(band[1]))
        # On top of an equal line a solid one would hide it.
        style = "dashed" if points and any(points == line.points for line in lines) else "solid"
        lines.append(Line(agent, thin(points), number, style, band=edges, marked=len(points) <= 40))
    return tuple(lines)


def _kept(chart: Chart) -> Iterator[Chart]:
    """Yield the chart without empty lines; nothing if all are empty."""
    lines = tuple(line for line in chart.lines if line.points)
    if lines:
        yield replace(chart, lines=lines)


def thin(points: Points) -> Points:
    """Return at most MOST_POINTS points, each the mean of its neighbourhood."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-len(points) // MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
