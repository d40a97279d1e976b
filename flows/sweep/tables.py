"""The numbers of a sweep as Markdown, LaTeX and CSV."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flows.sweep.comparison import Comparison
from flows.sweep.results import BOTH, DIAGNOSTICS, CellResult

_LATEX = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--"}
_LATEX |= {"α": r"$\alpha$", "δ": r"$\delta$", "ω": r"$\omega$"}


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        rule = "|".join("---" if column == 0 else "--:" for column in range(len(self.head)))
        lines = ["| " + " | ".join(row) + " |" for row in (self.head, *self.rows)]
        return "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"

    def latex(self) -> str:
        lines = [" & ".join(_escaped(cell) for cell in row) + r" \\" for row in (self.head, *self.rows)]
        columns = "l" + "r" * (len(self.head) - 1)
        body = [lines[0], r"\midrule", *lines[1:]]
        return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}", ""])


def accuracy_table(
    comparisons: Sequence[Comparison], results: Sequence[CellResult], labels: dict[str, str], agents: Sequence[str]
) -> Table:
    """Accuracy of every agent after training, its difference to the baseline, and what it cost."""
    by_place = {(c.variant, c.agent): c for c in comparisons}
    head = ["method", "seeds"]
    for agent in (*agents, BOTH):
        head += [agent, "difference", "95 % interval"]
    head += ["d_z", "p", "p (Holm)", "responses", "tokens"]
    rows = []
    for variant in dict.fromkeys(c.variant for c in comparisons):
        both = by_place[variant, BOTH]
        row = [labels.get(variant, variant), str(len(both.seeds))]
        for agent in (*agents, BOTH):
            c = by_place[variant, agent]
            row += [_percent(c.mean, c.deviation), *_difference(c)]
        d = both.difference
        row += [
            _number(d.effect if d else None, "{:+.1f}"),
            _number(d.p if d else None, "{:.3f}"),
            _number(both.p_corrected, "{:.3f}"),
            *(_cost(results, variant, what) for what in ("responses", "tokens")),
        ]
        rows.append(tuple(row))
    return Table(tuple(head), tuple(rows))


def words_table(comparisons: Sequence[Comparison], labels: dict[str, str]) -> Table:
    """What may be said of each difference."""
    rows = [
        (labels.get(c.variant, c.variant), c.agent, c.words())
        for c in comparisons
        if c.difference is not None and c.seeds
    ]
    return Table(("method", "agent", "against the baseline"), tuple(rows))


def diagnostics_table(results: Sequence[CellResult], variants: Sequence[str], labels: dict[str, str]) -> Table:
    """Means over iterations and seeds: why a method did what it did."""
    head = ("method", "agent", *DIAGNOSTICS)
    rows = []
    for variant in variants:
        cells = [r for r in results if r.variant == variant]
        for agent in cells[0].agents if cells else ():
            values = [[c.agents[agent].average(metric) for c in cells] for metric in DIAGNOSTICS.values()]
            means = [
                float(np.mean(known)) if (known := [v for v in found if v is not None]) else None for found in values
            ]
            rows.append((labels.get(variant, variant), agent, *(_number(m, "{:.3g}") for m in means)))
    return Table(head, tuple(rows))


def summary_csv(comparisons: Sequence[Comparison]) -> str:
    head = [
        "variant",
        "agent",
        "seeds",
        "mean",
        "deviation",
        "difference",
        "low",
        "high",
        "d_z",
        "p",
        "p_holm",
        "verdict",
    ]
    rows = []
    for c in comparisons:
        d = c.difference
        numbers = (d.mean, d.low, d.high, d.effect, d.p) if d else (None,) * 5
        rows.append([c.variant, c.agent, len(c.seeds), c.mean, c.deviation, *numbers, c.p_corrected, c.words()])
    return _csv(head, rows)


def cells_csv(results: Sequence[CellResult]) -> str:
    """One row for each agent of each cell: enough to compute every table again."""
    head = ["variant", "seed", "agent", "iterations", "before", "after", "responses", "tokens", *DIAGNOSTICS]
    head += ["version_digest", "commit"]
    rows = []
    for r in results:
        for name, a in r.agents.items():
            last = max(a.accuracy)
            costs = [int(series[max(series)]) for series in (a.responses, a.tokens)]
            why = [a.average(metric) for metric in DIAGNOSTICS.values()]
            commit = "+".join(sorted(c[:10] for c in r.commits))
            rows.append([r.variant, r.seed, name, last, a.before, a.after, *costs, *why, a.version[:16], commit])
    return _csv(head, rows)


def curves_csv(results: Sequence[CellResult]) -> str:
    """Every point of the learning curves."""
    head = ["variant", "seed", "agent", "iterations_done", "accuracy", "reward", "responses", "tokens"]
    rows = []
    for r in results:
        for name, a in r.agents.items():
            for step in sorted(a.accuracy.keys() | a.reward.keys()):
                series = (a.accuracy, a.reward, a.responses, a.tokens)
                rows.append([r.variant, r.seed, name, step, *(s.get(step) for s in series)])
    return _csv(head, rows)


def _csv(head: list[str], rows: list[list[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([[_plain(cell) for cell in row] for row in rows])
    return text.getvalue()


def _plain(value: object) -> object:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _percent(mean: float, deviation: float | None) -> str:
    if math.isnan(mean):
        return ""
    return f"{100 * mean:.1f}" + (f" ± {100 * deviation:.1f}" if deviation is not None else "")


def _difference(c: Comparison) -> list[str]:
    d = c.difference
    if d is None:
        return ["", ""]
    interval = f"{100 * d.low:+.1f} – {100 * d.high:+.1f}" if math.isfinite(d.low) else ""
    return [f"{100 * d.mean:+.1f}", interval]


def _cost(results: Sequence[CellResult], variant: str, what: str) -> str:
    costs = [max(r.cost(what).values()) for r in results if r.variant == variant]
    return f"{np.mean(costs):,.0f}" if costs else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
