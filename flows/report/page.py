"""``hacrl report``: a campaign as one HTML page that needs nothing else, and as PNGs."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from flows.diagnose.diagnose import diagnose
from flows.home import Home
from flows.record.feedback import Label, counted, read_labels
from flows.record.history import History, last, read_history, state_of
from flows.record.record import find_campaign
from flows.report.charts import draw, draw_sections, small_curve
from flows.report.examples import examples
from flows.report.panels import Chart, Panel, sections
from flows.views.text import clock, percent, short, signed
from hacrl_core.artifacts import open_store
from hacrl_core.place import module

PAGE = "report.html"
# Rows of the lineage; versions with an evaluation take precedence.
_MOST_VERSIONS = 40


@dataclass(frozen=True)
class Headline:
    """An agent at a glance."""

    agent: str
    number: int
    origin: str
    benchmark: str
    accuracy: float | None
    low: float | None
    high: float | None
    # Since its first version.
    gain: float | None
    best: float | None
    best_version: int | None
    reward: float | None
    capability: float | None
    curve: Markup


@dataclass(frozen=True)
class Version:
    """One row of an agent's lineage."""

    number: int
    digest: str
    parent: str
    accuracy: float | None
    seconds: float
    finished: str
    commit: str
    marks: str


def write_report(home: Home, name: str | None, out: Path | None, *, pictures: bool = True) -> list[Path]:
    """Write the page and the PNGs and return their paths. A running campaign's report shows what is finished."""
    folder = find_campaign(home, name)
    history = read_history(open_store(home.store), folder)
    place = out or folder / "report"
    place.mkdir(parents=True, exist_ok=True)
    page = place / PAGE
    page.write_text(render(history, state_of(history, folder), read_labels(folder)), encoding="utf-8")
    if not pictures:
        return [page]
    return [page, *draw_sections(sections(history), history, place)]


def render(history: History, state: str, labels: Sequence[Label] = ()) -> str:
    """Return the page; ``labels`` are the verdicts that people gave.

    All text of prompts and responses is escaped; only our own SVG is inserted verbatim."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(short=short, clock=clock, percent=percent, signed=signed)
    source = files(module("flows.report")) / "page_assets"
    charts = sections(history)
    drawn = {panel.key: draw(panel) for section in charts for panel in section.panels}
    hover = {key: drawing.hover for key, drawing in drawn.items() if drawing.hover is not None}
    iteration, shown = examples(history)
    return environment.from_string((source / "report.html.j2").read_text(encoding="utf-8")).render(
        history=history,
        config=history.config,
        state=state,
        cost=history.cost(),
        headlines=[_headline(history, number, agent) for number, agent in enumerate(history.agents)],
        sections=[(s, [(p, Markup(drawn[p.key].svg), _legend(p)) for p in s.panels]) for s in charts],
        findings=diagnose(history),
        accuracies=_accuracies(history),
        labels=labels,
        labels_counted=counted(labels),
        examples=shown,
        examples_iteration=None if iteration is None else iteration + 1,
        lineage={agent: _lineage(history, agent) for agent in history.agents},
        settings=yaml.safe_dump(
            history.config.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True
        ),
        facts=_facts(history),
        style=Markup((source / "style.css").read_text(encoding="utf-8")),
        script=Markup((source / "hover.js").read_text(encoding="utf-8")),
        hover=Markup(_json_for_script(hover)),
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _headline(history: History, number: int, agent: str) -> Headline:
    benchmark = next((b for b in history.benchmarks if history.accuracy(agent, b)), "")
    points = history.accuracy(agent, benchmark) if benchmark else []
    edges = [history.accuracy(agent, benchmark, f"accuracy_{side}") if benchmark else [] for side in ("low", "high")]
    settings, best = history.config.agents[agent], history.best(agent)
    origin = (
        f"{settings.warmstart.model.architecture}, warm start"
        if settings.warmstart
        else str(settings.checkpoint.path if settings.checkpoint else "")
    )
    means = history.mean_accuracy(agent)
    return Headline(
        agent,
        number,
        origin,
        benchmark,
        last(points),
        last(edges[0]),
        last(edges[1]),
        points[-1][1] - points[0][1] if len(points) > 1 else None,
        None if best is None else means[best + settings.joins],
        best,
        last(history.rewards(agent)),
        last(history.capability(agent)),
        Markup(small_curve(points if len(points) > 1 else history.rewards(agent), number)),
    )


def _accuracies(history: History) -> tuple[list[str], list[list[str]]]:
    """Return the table of all evaluations: a row for each evaluated iteration, a column for agent and benchmark."""
    columns = [(agent, benchmark) for agent in history.agents for benchmark in history.benchmarks]
    found = {column: dict(history.accuracy(*column)) for column in columns}
    columns = [column for column in columns if found[column]]
    steps = sorted({step for column in columns for step in found[column]})
    head = ["after iteration", *(f"{agent}, {benchmark}" for agent, benchmark in columns)]
    return head, [[str(int(step)), *(percent(found[column].get(step)) for column in columns)] for step in steps]


def _lineage(history: History, agent: str) -> tuple[list[Version], int]:
    """Return the agent's versions with what each was made from, and how many were left out."""
    versions, joins = history.versions[agent], history.config.agents[agent].joins
    accuracy, best = history.mean_accuracy(agent), history.best(agent)
    rows: list[Version] = []
    known = {(h.entry.stage, h.entry.key): h.manifest for h in history.finished}
    for number, entry in enumerate(versions):
        manifest = known.get((entry.stage, entry.key))
        if manifest is None:
            # Deleted by a clean-up.
            continue
        marks = [word for word, yes in (("best", number == best), ("latest", number == len(versions) - 1)) if yes]
        rows.append(
            Version(
                number,
                manifest.content_digest[:10],
                manifest.identity.inputs.get("agent", "")[:10] or entry.stage,
                accuracy.get(number + joins),
                manifest.provenance.seconds,
                time.strftime("%d %b %H:%M", time.localtime(manifest.provenance.finished)),
                manifest.provenance.commit[:10],
                ", ".join(marks),
            )
        )
    informative = [row for row in rows if row.accuracy is not None or row.marks or row.number == 0]
    shown = rows if len(rows) <= _MOST_VERSIONS else informative[:: -(-len(informative) // _MOST_VERSIONS)]
    return shown, len(rows) - len(shown)


def _facts(history: History) -> list[tuple[str, str]]:
    """Return packages, machine and commit of the newest stage."""
    if not history.finished:
        return []
    newest = max((h.manifest.provenance for h in history.finished), key=lambda p: p.finished)
    facts = {**newest.packages, **newest.hardware, "commit": newest.commit[:10]}
    return [(name, value) for name, value in facts.items() if value]


def _legend(panel: Panel) -> list[tuple[str, str]]:
    """Return the classes and names of a panel's legend; empty where colours alone tell the agents apart."""
    if isinstance(panel, Chart):
        named = [line for line in panel.lines if line.style != "faint"]
        plain = all(line.style == "solid" for line in named)
        return [] if plain else [(f"d{line.agent % 7} k-{line.style}", line.name) for line in named]
    layers = getattr(panel, "layers", ())
    return [(f"v-{name}", name) for name, _ in layers]


def _json_for_script(value: Any) -> str:
    """Return JSON that cannot end the script element around it, whatever names it holds."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
