"""Write the pages of results from the store: every number comes from manifests, nothing is trained again.

docs/results.md is about the pair that was taught the same lessons (even.yaml), docs/results/complementary.md about the
pair with opposite strengths (main.yaml and what follows it). A page is written if its sweep has results.

``python docs/results/build/page.py --home HOME``; ``make reproduce`` runs the sweeps first. ``--only even-longer
switches`` writes the tables and pictures of these sweeps alone, for a home that has no others. ``--keep even-methods``
keeps the committed cells of methods that this home did not run.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fresh
import jinja2
import longer
import longrun
import methods
import numpy as np
from claims import CLAIMS, CONFIRMED, EVEN, EXTENSIONS, REMOVALS, STABILITY, Answered, Claim, answer_claims
from readme_picture import read_rows

from flows.home import Home
from flows.sweep.cells import STAGES
from flows.sweep.pictures import draw_costs, draw_curves, draw_forest
from flows.sweep.report import SweepReport, cells_csv, curves_csv, make_report, summary_csv
from flows.sweep.results import BOTH, DIAGNOSTICS, SHOWN, AgentResult, CellResult
from flows.sweep.statistics import Comparison, compare_variants
from hacrl_core.config.sweep import load_sweep
from hacrl_core.contracts.manifest import digest_of
from hacrl_core.errors import ConfigError
from stages.spec import find_stage

SWEEPS = (
    "tuning",
    "main",
    "ablations",
    "extensions",
    "rivals",
    "confirm",
    "answers",
    "gap",
    "three",
    "longer",
    "alpha",
    "even-tuning",
    "even-tuning-methods",
    "even",
    "even-longer",
    "even-fresh",
    "even-methods",
    "even-three",
    "switches",
    "even-resample",
)
# Template → page below docs, and the sweep that it cannot do without.
PAGES = {
    "results.md.j2": ("results.md", "even"),
    "complementary.md.j2": ("results/complementary.md", "main"),
    "shared-gspo.md.j2": ("shared-gspo.md", "confirm"),
}
# Sweeps that also have a table of greedy accuracies, their secondary outcome.
GREEDY = ("even", "even-longer", "even-fresh", "even-methods", "even-three", "switches", "even-resample")
# Sweeps whose curves are kept, and those of which the entropy is asked.
CURVES = ("main", "extensions", "rivals", "longer", "even", "even-longer", "even-fresh")
ENTROPY = ("even-longer", "even-fresh")
# Sweeps of one task and one set of seeds.
MAIN_TASK = ("main", "ablations", "extensions", "rivals", "alpha")
HERE = Path(__file__).resolve().parent


def difference_cells(numbers: str, agents: Sequence[str], *, with_p: bool = False) -> str:
    """Write "mean +2.7 (+1.2 to +4.1; 7 of 8 seeds up, p 0.047); ada …; every agent p 0.1" as cells of a table."""
    cells, p_mean = [], ""
    for name in ("mean", *agents):
        found = re.search(rf"\b{name} ([+-][\d.]+) \(([^;]+); (\d+ of \d+) seeds up(?:, p ([^)]+))?\)", numbers)
        cells.append(f"{found[1]} ({found[2]}), {found[3]}" if found else "")
        p_mean = p_mean or ((found[4] or "") if found else "")
    every = re.search(r"every agent p (\S+)", numbers)
    return " | ".join([*cells, *([p_mean, every[1] if every else ""] if with_p else [])])


@dataclass(frozen=True)
class Page:
    """What the templates may use."""

    reports: Mapping[str, SweepReport]
    # The sweep that the page is about.
    subject: str = "main"

    def has(self, sweep: str) -> bool:
        """Say whether the sweep has comparisons."""
        return sweep in self.reports and bool(self.reports[sweep].comparisons)

    def of(self, sweep: str, variant: str, agent: str) -> Comparison:
        """Return one comparison with the sweep's baseline."""
        return next(c for c in self.reports[sweep].comparisons if (c.variant, c.agent) == (variant, agent))

    def cells(self) -> list[CellResult]:
        """Return all cells of the main task, whichever sweep ran them; one that several sweeps have counts once."""
        found: dict[tuple[str, int], CellResult] = {}
        for name in MAIN_TASK:
            for result in self.reports[name].results if name in self.reports else ():
                same = found.setdefault((result.variant, result.seed), result)
                if any(same.agents[a].version != agent.version for a, agent in result.agents.items()):
                    raise ConfigError(
                        f"sweep {name}: {result.variant}, seed {result.seed} ended with other weights than in a sweep "
                        "before it; the settings of both must agree"
                    )
        return list(found.values())

    def failed(self, sweep: str | None) -> frozenset[str]:
        """Return the variants that have a failed cell, in one sweep or in all of the main task."""
        names = MAIN_TASK if sweep is None else (sweep,)
        found: set[str] = set()
        return frozenset(found.union(*(self.reports[name].failed for name in names if name in self.reports)))

    def claims(self, claims: tuple[Claim, ...], sweep: str | None = None) -> list[Answered]:
        """Answer claims from the main task, or from one sweep without claims about methods that it does not have."""
        if sweep is None:
            return answer_claims(claims, self.cells(), self.agents, self.failed(None))
        results = self.reports[sweep].results
        there = {r.variant for r in results}
        asked = [c for c in claims if {c.method, c.baseline} <= there]
        return answer_claims(asked, results, self.agents, self.failed(sweep))

    def against(self, variant: str, baseline: str, sweep: str | None = None) -> str:
        """Write one difference with its interval, without a corrected p."""
        return self.claims((Claim("", variant, baseline),), sweep)[0].numbers(with_p=False)

    def row(self, label: str, variant: str, baseline: str, sweep: str | None = None) -> str:
        """Write one difference as a row of a table: label, mean over the agents, then each agent."""
        return f"| {label} | {difference_cells(self.against(variant, baseline, sweep), self.agents)} |"

    def said(self, variant: str, baseline: str, sweep: str) -> str:
        """Say one difference of the mean over the agents in words: how much, the interval, in how many seeds."""
        d = self.claims((Claim("", variant, baseline),), sweep)[0].differences[BOTH]
        word = "higher" if d.mean > 0 else "lower"
        interval = f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"
        return f"{abs(100 * d.mean):.1f} points {word} ({interval}; higher in {d.higher} of {d.seeds} seeds)"

    def verdict(self, claim: Claim, family: tuple[Claim, ...], sweep: str) -> str:
        """Say what a claim's answer is within its family."""
        found = next(a for a in self.claims(family, sweep) if a.claim == claim)
        return {"yes": "shown", "no": "the opposite is shown"}.get(found.answer, found.answer)

    def silent(self, sweep: str, variant: str) -> float:
        """Return the share of prompts without a signal: the mean over agents, iterations and seeds."""
        found = [a.average(DIAGNOSTICS["no_signal"]) for a in self._agents(sweep, variant)]
        return float(np.mean([value for value in found if value is not None]))

    def _agents(self, sweep: str, variant: str) -> list[AgentResult]:
        return [a for r in self.reports[sweep].results if r.variant == variant for a in r.agents.values()]

    def rates(self) -> str:
        """Write the table of the tuning: the mean reward of both agents by method and learning rate, in percent."""
        found: dict[str, dict[float, list[float]]] = {}
        for cell in self.reports["even-tuning"].sweep.cells:
            ends = [a.after for r in self.reports["even-tuning"].results for a in r.agents.values()
                    if (r.variant, r.seed) == (cell.variant, cell.seed)]  # fmt: skip
            found.setdefault(cell.variant.split(".")[0], {}).setdefault(cell.config.update.learning_rate, []).extend(
                ends
            )
        rates = sorted({rate for by_rate in found.values() for rate in by_rate})
        lines = ["| method | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---" + "|--:" * len(rates) + "|"]
        for method, by_rate in found.items():
            cells = [f"{100 * np.mean(by_rate[rate]):.1f}" if by_rate.get(rate) else "" for rate in rates]
            lines.append(f"| {self.reports['even'].labels[method]} | " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"

    @property
    def agents(self) -> list[str]:
        """Return the agents of the page's sweep."""
        return self.reports[self.subject].agents

    def start(self, agent: str, sweep: str | None = None) -> float:
        """Return the mean accuracy of the agent before training, in percent."""
        first = {r.seed: r.agents[agent].before for r in self.reports[sweep or self.subject].results}
        return 100 * sum(first.values()) / len(first)

    def average(self, variant: str, agent: str, metric: str) -> float:
        """Return a diagnostic's mean over iterations and seeds."""
        cells = [r for r in self.cells() if r.variant == variant]
        values = [v for r in cells if (v := r.agents[agent].average(metric)) is not None]
        return sum(values) / len(values) if values else float("nan")

    def settings(self) -> str:
        """Describe the campaign of the page's sweep in a sentence, from its config."""
        c = self.reports[self.subject].sweep.cells[0].config
        rates = {cell.config.update.learning_rate for cell in self.reports[self.subject].sweep.cells}
        rate = f" {rates.pop():g}" if len(rates) == 1 else ""
        return (
            f"{c.iterations} iterations of {c.prompts_per_iteration} prompts, "
            f"{c.samples_per_prompt} responses of each agent to each, "
            f"minibatches of {c.update.minibatch_prompts} prompts, AdamW{rate}."
        )

    def hours(self) -> float:
        """Return the time that the stages of all sweeps took."""
        return sum(r.stage_seconds for report in self.reports.values() for r in report.results) / 3600

    def commits(self) -> list[str]:
        """Return the commits that the artifacts were made with."""
        found = {c[:12] for report in self.reports.values() for r in report.results for c in r.commits if c}
        return sorted(found)

    def packages(self) -> str:
        """Return the versions of the packages, as of the first cell."""
        first = next(r for report in self.reports.values() for r in report.results)
        return ", ".join(f"{name} {version}" for name, version in sorted(first.packages.items()))

    def versions(self) -> str:
        """Return the versions of the stages."""
        return ", ".join(f"{name} {find_stage(name).version}" for name in STAGES)

    def digest(self, sweep: str) -> str:
        """Return one digest for the final versions of all agents of a sweep: equal digests, equal weights."""
        rows = [
            (r.variant, r.seed, a, found.version) for r in self.reports[sweep].results for a, found in r.agents.items()
        ]
        return digest_of(sorted(rows))[:16]


def main() -> None:
    """Read the sweeps' results from the store and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=None)
    parser.add_argument("--sweeps", type=Path, default=Path("configs/sweeps"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=SWEEPS)
    parser.add_argument("--keep", nargs="+", choices=SWEEPS, default=[])
    options = parser.parse_args()
    home = Home.find(options.home)
    reports = {name: make_report(load_sweep(options.sweeps / f"{name}.yaml"), home.root) for name in options.only}
    for name in set(GREEDY) & set(options.only):
        greedy = load_sweep(options.sweeps / f"{name}.yaml", ["benchmark=greedy"])
        reports[f"{name}-greedy"] = make_report(greedy, home.root)
    for name in (n for n in reports if n.removesuffix("-greedy") in options.keep):
        reports[name] = with_kept(reports[name], options.docs / "results" / f"{name}-cells.csv")
    write_page({name: report for name, report in reports.items() if report.results}, options.docs)


def with_kept(report: SweepReport, file: Path) -> SweepReport:
    """Add the committed cells of methods of which the home has none, and say which they are."""
    committed = read_cells(file) if file.exists() else []
    kept = [r for r in committed if r.variant in report.sweep.variants and r.variant not in report.variants]
    names = dict.fromkeys(r.variant for r in kept)
    print(
        f"{file.name}: {', '.join(report.variants)} from the home; kept as committed: {', '.join(names) or 'nothing'}"
    )
    order = report.sweep.variants
    variants = [v for v in order if v in report.variants or v in names]
    results = sorted([*report.results, *kept], key=lambda r: (r.seed, order.index(r.variant)))
    within = report.sweep.config.same_within
    against = report.baseline if report.baseline in variants else ""
    compared = compare_variants(results, variants, against, report.agents, within) if against else []
    unfinished = [u for u in report.unfinished if u.variant not in names]
    return replace(report, results=results, variants=variants, comparisons=compared, unfinished=unfinished)


def read_cells(file: Path) -> list[CellResult]:
    """Read committed cells as results: ends, costs and diagnostics, without their curves."""
    cells: dict[tuple[str, int], dict[str, Mapping[str, str]]] = {}
    for row in read_rows(file):
        cells.setdefault((row["variant"], int(row["seed"])), {})[row["agent"]] = row
    found = []
    for (variant, seed), agents in cells.items():
        results = {}
        for name, row in agents.items():
            last = int(row["iterations"])
            results[name] = AgentResult(
                accuracy={0: float(row["before"]), last: float(row["after"])},
                responses={last: float(row["responses"])},
                tokens={last: float(row["tokens"])},
                metrics={metric: {last: float(row[column])} for column, metric in DIAGNOSTICS.items() if row[column]},
                version=row["version_digest"],
            )
        commits = frozenset(next(iter(agents.values()))["commit"].split("+"))
        found.append(CellResult(variant, seed, results, commits, {}, 0.0, 0.0))
    return found


def write_page(reports: Mapping[str, SweepReport], docs: Path, templates: Path = HERE) -> None:
    """Write the pages into ``docs``, and their tables and pictures into ``docs/results``."""
    folder = docs / "results"
    folder.mkdir(parents=True, exist_ok=True)
    for name, report in reports.items():
        _write_files(name, report, folder)
    texts = jinja2.DictLoader({"findings": (templates / "findings.md.j2").read_text()})
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=texts, keep_trailing_newline=True
    )
    environment.filters["points"] = lambda value: f"{100 * value:+.1f}"
    environment.filters["percent"] = lambda value: f"{100 * value:.1f}"
    sets: dict[str, Any] = {
        "CLAIMS": CLAIMS,
        "REMOVALS": REMOVALS,
        "STABILITY": STABILITY,
        "EXTENSIONS": EXTENSIONS,
        "CONFIRMED": CONFIRMED,
        "EVEN": EVEN,
        "difference_cells": difference_cells,
        "longer": longer.sentence(longrun.committed(longer.STUDY)),
        "fresh": fresh.sentences(fresh.complete()),
        "methods": methods.sentences(),
    }
    for template, (page, subject) in PAGES.items():
        if subject in reports:
            text = environment.from_string((templates / template).read_text())
            (docs / page).write_text(text.render(page=Page(reports, subject), reports=reports, **sets))


def _write_files(name: str, report: SweepReport, folder: Path) -> None:
    (folder / f"{name}-cells.csv").write_text(cells_csv(report.results))
    if not report.comparisons:
        return
    (folder / f"{name}-summary.csv").write_text(summary_csv(report.comparisons))
    (folder / f"{name}-table.tex").write_text(report.accuracy().latex())
    draw_forest(report.comparisons, report.labels, report.baseline, report.agents, folder / f"{name}-forest.png")
    if name in CURVES:
        (folder / f"{name}-curves.csv").write_text(curves_csv(report.results))
        draw_curves(report.results, report.variants, report.labels, report.agents, folder / f"{name}-curves.png")
        draw_costs(report.results, report.variants, report.labels, folder / f"{name}-costs.png")
    if name in ENTROPY:
        (folder / f"{name}-entropy.csv").write_text(entropy_csv(report.results))


def entropy_csv(results: Sequence[CellResult]) -> str:
    """Write the mean log-prob of own responses by iteration; minus it estimates the entropy per token."""
    lines = ["variant,seed,agent,iterations_done,own_logprob"]
    for r in results:
        for name, agent in r.agents.items():
            series = agent.metrics[SHOWN["own_logprob"]]
            lines += [f"{r.variant},{r.seed},{name},{step},{series[step]:.6g}" for step in sorted(series)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
