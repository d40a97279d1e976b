"""A sweep as one HTML page that needs nothing else: what was compared, what may be said, pictures and tables."""

import base64
import time
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from flows.sweep.report import SweepReport
from hacrl_core.place import module

PAGE = "report.html"
_PICTURES = {
    "forest": "Difference to the baseline with its 95 % interval, all panels on one scale",
    "curves": "Learning curves; bands are one standard error over the seeds",
    "costs": "Accuracy against what was sampled for it",
}
_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>sweep {{ name }}</title>
<style>{{ style }}
main { max-width: 1200px; margin: 0 auto; padding: 24px; }
main img { max-width: 100%; background: #fff; border-radius: 8px; }
main td { white-space: nowrap; }
main td:not(:first-child), main th:not(:first-child) { text-align: right; }
main td.words { text-align: left; white-space: normal; }
.scroll { overflow-x: auto; }
</style>
</head>
<body><main>
<h1>sweep {{ name }}</h1>
<p class="soft">{{ variants }} variants, seeds {{ seeds }}, baseline <b>{{ baseline }}</b>; {{ cells }} finished cells.
  Written {{ written }}.</p>
{% if gaps %}<div class="card"><b>Not complete</b><pre>{{ gaps }}</pre></div>{% endif %}
{% for title, table in tables %}
<section><h2>{{ title }}</h2>
<div class="card scroll"><table>
<tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr>{% for cell in row %}<td{% if cell | length > 40 %} class="words"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div></section>
{% endfor %}
{% for title, data in pictures %}
<section><h2>{{ title }}</h2>
<div class="card"><img alt="{{ title }}" src="data:image/png;base64,{{ data }}"></div></section>
{% endfor %}
<section><h2>The cells</h2>
<p class="soft">Every cell is a campaign. <code>hacrl report NAME</code> writes its page, <code>hacrl
  rollouts NAME</code> shows its answers.</p>
<div class="card"><p>{{ names | join(", ") }}</p></div></section>
</main></body></html>
"""


def render(report: SweepReport, pictures: dict[str, Path]) -> str:
    """Return the page; all names and messages in it are escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    style = (files(module("flows.report")) / "page_assets" / "style.css").read_text(encoding="utf-8")
    config = report.sweep.config
    there = {(result.variant, result.seed) for result in report.results}
    return environment.from_string(_TEMPLATE).render(
        name=config.name,
        variants=len(report.variants),
        seeds=", ".join(map(str, config.seeds)),
        baseline=report.labels.get(report.baseline, report.baseline),
        cells=len(report.results),
        written=time.strftime("%Y-%m-%d %H:%M"),
        gaps=report.gaps(),
        tables=[
            ("Accuracy after training", report.accuracy()),
            ("What may be said", report.words()),
            ("Why: diagnostics", report.diagnostics()),
        ],
        pictures=[
            (title, base64.b64encode(pictures[name].read_bytes()).decode())
            for name, title in _PICTURES.items()
            if name in pictures
        ],
        names=[cell.label for cell in report.sweep.cells if (cell.variant, cell.seed) in there],
        style=Markup(style),
    )


def write_page(report: SweepReport, pictures: dict[str, Path], folder: Path) -> Path:
    """Write the page beside the tables and return its path."""
    path = folder / PAGE
    path.write_text(render(report, pictures), encoding="utf-8")
    return path
