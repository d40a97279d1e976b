"""Writes what a sweep found into a folder: tables, pictures and the raw numbers, from the store alone."""

from dataclasses import dataclass
from pathlib import Path

from flows.sweep.cells import why_failed
from flows.sweep.comparison import Comparison, compare_variants
from flows.sweep.pictures import draw_costs, draw_curves, draw_forest
from flows.sweep.results import BOTH, CellResult, read_results
from flows.sweep.tables import (
    Table,
    accuracy_table,
    cells_csv,
    curves_csv,
    diagnostics_table,
    summary_csv,
    words_table,
)
from hacrl_core.config.sweep import Sweep


@dataclass(frozen=True)
class Unfinished:
    variant: str
    seed: int
    why: str | None  # the error it ended in; None: not run


@dataclass(frozen=True)
class SweepReport:
    """A sweep's numbers, compared; ``variants`` are those with finished cells."""

    sweep: Sweep
    baseline: str
    results: list[CellResult]
    variants: list[str]
    agents: list[str]
    comparisons: list[Comparison]
    unfinished: list[Unfinished]

    @property
    def failed(self) -> frozenset[str]:
        """Variants of which a cell ended in an error."""
        return frozenset(u.variant for u in self.unfinished if u.why is not None)

    def gaps(self) -> str:
        """A line for each variant that lacks seeds. Comparisons use the others, which may be those that went well."""
        lines = []
        for variant in dict.fromkeys(u.variant for u in self.unfinished):
            mine = [u for u in self.unfinished if u.variant == variant]
            each = "; ".join(f"seed {u.seed} {'not run' if u.why is None else f'failed: {u.why}'}" for u in mine)
            label = self.sweep.config.label(variant)
            lines.append(f"{label}: {len(mine)} of {len(self.sweep.config.seeds)} seeds without a result ({each})")
        return "\n".join(lines)

    @property
    def labels(self) -> dict[str, str]:
        return {v: self.sweep.config.label(v) for v in self.variants}

    def accuracy(self) -> Table:
        return accuracy_table(self.comparisons, self.results, self.labels, self.agents)

    def overview(self) -> str:
        """A line for each variant, for a terminal."""
        lines = []
        for c in self.comparisons:
            if c.agent == BOTH:
                means = "  ".join(
                    f"{a} {100 * next(x.mean for x in self.comparisons if (x.variant, x.agent) == (c.variant, a)):.1f} %"
                    for a in self.agents
                )
                gain = f"  {100 * c.difference.mean:+.1f} points" if c.difference else ""
                lines.append(f"{self.labels[c.variant]:<28} {len(c.seeds)} seeds  {means}{gain}  {c.words()}")
        return "\n".join([*lines, *([self.gaps()] if self.unfinished else [])])

    def metrics(self) -> dict[str, float]:
        """Means over seeds, for the sweep's run in MLflow."""
        return {f"accuracy/{c.variant}/{c.agent}": c.mean for c in self.comparisons if c.seeds}

    def words(self) -> Table:
        return words_table(self.comparisons, self.labels)

    def diagnostics(self) -> Table:
        return diagnostics_table(self.results, self.variants, self.labels)


def make_report(sweep: Sweep, home: Path, baseline: str | None = None) -> SweepReport:
    results = read_results(sweep, home)
    variants = [v for v in sweep.variants if any(r.variant == v for r in results)]
    # Agents that every variant has: one with a third agent is compared on the two that all share.
    agents = [a for a in sweep.cells[0].config.agents if all(a in r.agents for r in results)]
    against = baseline or sweep.config.compared_with
    comparisons = compare_variants(results, variants, against, agents) if against in variants else []
    return SweepReport(sweep, against, results, variants, agents, comparisons, _unfinished(sweep, results, home))


def _unfinished(sweep: Sweep, results: list[CellResult], home: Path) -> list[Unfinished]:
    there = {(r.variant, r.seed) for r in results}
    missing = [c for c in sweep.cells if (c.variant, c.seed) not in there]
    return [Unfinished(c.variant, c.seed, why_failed(home / "campaigns" / c.label)) for c in missing]


def write_report(report: SweepReport, folder: Path, prefix: str = "") -> list[Path]:
    """``folder`` gets the tables as Markdown, LaTeX and CSV and three pictures; nothing without a finished baseline."""
    if not report.comparisons:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    table = report.accuracy()
    texts = {
        "table.md": table.markdown()
        + "\n"
        + report.words().markdown()
        + "\n"
        + report.diagnostics().markdown()
        + ("\n" + report.gaps() + "\n" if report.unfinished else ""),
        "table.tex": table.latex(),
        "summary.csv": summary_csv(report.comparisons),
        "cells.csv": cells_csv(report.results),
        "curves.csv": curves_csv(report.results),
    }
    written = []
    for name, text in texts.items():
        written.append(folder / f"{prefix}{name}")
        written[-1].write_text(text)
    pictures = {name: folder / f"{prefix}{name}.png" for name in ("curves", "costs", "forest")}
    draw_curves(report.results, report.variants, report.labels, report.agents, pictures["curves"])
    draw_costs(report.results, report.variants, report.labels, pictures["costs"])
    draw_forest(report.comparisons, report.labels, report.baseline, report.agents, pictures["forest"])
    return [*written, *pictures.values()]
