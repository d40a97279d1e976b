"""The report of a sweep: tables, pictures and raw numbers, from the store alone."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flows.sweep.cells import why_failed
from flows.sweep.results import BOTH, DIAGNOSTICS, SHOWN, CellResult, read_results
from flows.sweep.statistics import Comparison, compare_variants
from flows.views.text import percent
from hacrl_core.config.sweep import Sweep

_LATEX = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--"}
_LATEX |= {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "^": r"\textasciicircum{}"}
_LATEX |= {"~": r"\textasciitilde{}", "\n": " "}
_LATEX |= {"α": r"$\alpha$", "δ": r"$\delta$", "ω": r"$\omega$"}


@dataclass(frozen=True)
class Unfinished:
    """A cell without a result: the error it ended in, or None if it has not run."""

    variant: str
    seed: int
    why: str | None


@dataclass(frozen=True)
class SweepReport:
    """A sweep's results, compared. ``variants`` are those with finished cells."""

    sweep: Sweep
    baseline: str
    results: list[CellResult]
    variants: list[str]
    agents: list[str]
    comparisons: list[Comparison]
    unfinished: list[Unfinished]

    @property
    def failed(self) -> frozenset[str]:
        """Return the variants that have a cell that ended in an error."""
        return frozenset(u.variant for u in self.unfinished if u.why is not None)

    def gaps(self) -> str:
        """Write a line for each variant that lacks seeds; it is compared on the others, which may have gone well."""
        lines = []
        for variant in dict.fromkeys(u.variant for u in self.unfinished):
            mine = [u for u in self.unfinished if u.variant == variant]
            failed = [f"seed {u.seed} failed: {u.why}" for u in mine if u.why is not None]
            waiting = [u.seed for u in mine if u.why is None]
            each = "; ".join([*failed, *([f"seed {_ranges(waiting)} not run"] if waiting else [])])
            label = self.sweep.config.label(variant)
            lines.append(f"{label}: {len(mine)} of {len(self.sweep.config.seeds)} seeds without a result ({each})")
        return "\n".join(lines)

    @property
    def finished_at(self) -> float:
        """Return when the newest artifact of the results was made."""
        return max((result.finished_at for result in self.results), default=0.0)

    @property
    def labels(self) -> dict[str, str]:
        """Return the variants' names in tables and pictures."""
        return {v: self.sweep.config.label(v) for v in self.variants}

    def accuracy(self) -> "Table":
        """Return the table of accuracies, differences and costs."""
        return accuracy_table(self.comparisons, self.results, self.labels, self.agents)

    def overview(self) -> str:
        """Write a line for each variant, for a terminal."""
        accuracies = {(c.variant, c.agent): c.mean for c in self.comparisons}
        lines = []
        for c in self.comparisons:
            if c.agent == BOTH:
                means = "  ".join(f"{a} {percent(accuracies[c.variant, a])}" for a in self.agents)
                gain = f"  {100 * c.difference.mean:+.1f} points" if c.difference else ""
                lines.append(f"{self.labels[c.variant]:<28} {len(c.seeds)} seeds  {means}{gain}  {c.words()}")
        return "\n".join([*lines, *([self.gaps()] if self.unfinished else [])])

    def metrics(self) -> dict[str, float]:
        """Return means over seeds, for the sweep's run in MLflow."""
        return {f"accuracy/{c.variant}/{c.agent}": c.mean for c in self.comparisons if c.seeds}

    def words(self) -> "Table":
        """Return the table of what may be said of each difference."""
        return words_table(self.comparisons, self.labels)

    def diagnostics(self) -> "Table":
        """Return the table of diagnostics."""
        return diagnostics_table(self.results, self.variants, self.labels)


def _ranges(seeds: Sequence[int]) -> str:
    """Write 3, 5, 6, 7 as "3, 5–7"."""
    runs: list[list[int]] = []
    for seed in sorted(seeds):
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def make_report(sweep: Sweep, home: Path, baseline: str | None = None) -> SweepReport:
    """Read the finished cells of a sweep and compare them with the baseline."""
    results = read_results(sweep, home)
    variants = [v for v in sweep.variants if any(r.variant == v for r in results)]
    # Agents that every variant has: one with a third agent is compared on the two that all share.
    agents = [a for a in sweep.cells[0].config.agents if all(a in r.agents for r in results)]
    against = baseline or sweep.config.compared_with
    within = sweep.config.same_within
    comparisons = compare_variants(results, variants, against, agents, within) if against in variants else []
    return SweepReport(sweep, against, results, variants, agents, comparisons, _unfinished(sweep, results, home))


def _unfinished(sweep: Sweep, results: list[CellResult], home: Path) -> list[Unfinished]:
    there = {(r.variant, r.seed) for r in results}
    missing = [c for c in sweep.cells if (c.variant, c.seed) not in there]
    return [Unfinished(c.variant, c.seed, why_failed(home / "campaigns" / c.label)) for c in missing]


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of texts, written as Markdown or LaTeX."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Write the table as Markdown; all columns but the first are aligned to the right."""
        rule = "|".join("---" if column == 0 else "--:" for column in range(len(self.head)))
        cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (self.head, *self.rows)]
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        return "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"

    def latex(self) -> str:
        """Write the table as a LaTeX tabular with booktabs rules."""
        lines = [" & ".join(_escaped(cell) for cell in row) + r" \\" for row in (self.head, *self.rows)]
        columns = "l" + "r" * (len(self.head) - 1)
        body = [lines[0], r"\midrule", *lines[1:]]
        return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}", ""])


def accuracy_table(
    comparisons: Sequence[Comparison], results: Sequence[CellResult], labels: dict[str, str], agents: Sequence[str]
) -> Table:
    """Return the accuracy after training, of the agents' mean and of each, the differences, and what it cost."""
    by_place = {(c.variant, c.agent): c for c in comparisons}
    head = ["method", "seeds"]
    for agent in (BOTH, *agents):
        head += [agent, "difference", "95 % interval"]
    head += ["d_z", "p", "p (Holm)", "p same (Holm)", "responses", "tokens"]
    rows = []
    for variant in dict.fromkeys(c.variant for c in comparisons):
        both = by_place[variant, BOTH]
        row = [labels.get(variant, variant), str(len(both.seeds))]
        for agent in (BOTH, *agents):
            c = by_place[variant, agent]
            row += [_mean_text(c.mean, c.deviation), *_difference(c)]
        d = both.difference
        row += [
            _formatted(d.effect if d else None, "{:+.1f}"),
            _formatted(d.p if d else None, "{:.3f}"),
            _formatted(both.p_corrected, "{:.3f}"),
            _formatted(both.p_same_corrected, "{:.3f}"),
            *(_cost(results, variant, what) for what in ("responses", "tokens")),
        ]
        rows.append(tuple(row))
    return Table(tuple(head), tuple(rows))


def words_table(comparisons: Sequence[Comparison], labels: dict[str, str]) -> Table:
    """Return what may be said of each difference."""
    rows = [
        (labels.get(c.variant, c.variant), c.agent, c.words())
        for c in comparisons
        if c.difference is not None and c.seeds
    ]
    return Table(("method", "agent", "against the baseline"), tuple(rows))


def diagnostics_table(results: Sequence[CellResult], variants: Sequence[str], labels: dict[str, str]) -> Table:
    """Return means of diagnostics over iterations and seeds: why a method did what it did."""
    head = ("method", "agent", *SHOWN)
    rows = []
    for variant in variants:
        cells = [r for r in results if r.variant == variant]
        for agent in cells[0].agents if cells else ():
            values = [[c.agents[agent].average(metric) for c in cells] for metric in SHOWN.values()]
            means = [
                float(np.mean(known)) if (known := [v for v in found if v is not None]) else None for found in values
            ]
            rows.append((labels.get(variant, variant), agent, *(_formatted(m, "{:.3g}") for m in means)))
    return Table(head, tuple(rows))


def summary_csv(comparisons: Sequence[Comparison]) -> str:
    """Write one row for each comparison."""
    head = ["variant", "agent", "seeds", "mean", "deviation"]
    head += ["difference", "low", "high", "d_z", "p", "p_holm", "p_same_holm", "verdict"]
    rows: list[list[object]] = []
    for c in comparisons:
        d = c.difference
        numbers = (d.mean, d.low, d.high, d.effect, d.p) if d else (None,) * 5
        corrected = (c.p_corrected, c.p_same_corrected)
        rows.append([c.variant, c.agent, len(c.seeds), c.mean, c.deviation, *numbers, *corrected, c.words()])
    return _csv(head, rows)


def cells_csv(results: Sequence[CellResult]) -> str:
    """Write one row for each agent of each cell: enough to compute every table again."""
    head = ["variant", "seed", "agent", "iterations", "before", "after", "responses", "tokens", *DIAGNOSTICS]
    head += ["version_digest", "commit"]
    rows: list[list[object]] = []
    for r in results:
        for name, a in r.agents.items():
            last = max(a.accuracy)
            costs = [int(series[max(series)]) for series in (a.responses, a.tokens)]
            why = [a.average(metric) for metric in DIAGNOSTICS.values()]
            commit = "+".join(sorted(c[:10] for c in r.commits))
            rows.append([r.variant, r.seed, name, last, a.before, a.after, *costs, *why, a.version[:16], commit])
    return _csv(head, rows)


def curves_csv(results: Sequence[CellResult]) -> str:
    """Write every point of the learning curves."""
    head = ["variant", "seed", "agent", "iterations_done", "accuracy", "reward", "responses", "tokens"]
    rows: list[list[object]] = []
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


def _mean_text(mean: float, deviation: float | None) -> str:
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


def _formatted(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
