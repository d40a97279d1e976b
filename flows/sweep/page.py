"""Writes docs/results.md from the store: every number in it comes from manifests, nothing is trained again.

``python -m flows.sweep.page --home HOME``; ``make reproduce`` runs the sweeps first.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from flows.home import Home
from flows.sweep.cells import STAGES
from flows.sweep.claims import Answered, Claim, answer_claims, drawdown
from flows.sweep.comparison import Comparison
from flows.sweep.pictures import draw_costs, draw_curves, draw_forest
from flows.sweep.report import SweepReport, make_report
from flows.sweep.results import CellResult
from flows.sweep.tables import cells_csv, summary_csv
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
)
MAIN_TASK = ("main", "ablations", "extensions", "rivals", "alpha")  # sweeps of one task and one set of seeds
_MECHANISMS = {
    "no_omega_advantage": "the capability-aware advantage",
    "no_omega_gradient": "ω in the gradient",
    "alpha_0": "the exponent α",
    "no_stepwise": "stepwise clipping",
}
CLAIMS = (
    Claim("Both agents end better under HACPO than under GSPO", "hacpo", "gspo"),
    Claim("Both agents end better under HACPO than under GSPO×2, at half its rollouts", "hacpo", "gspo_x2"),
    Claim("Naive sharing (foreign responses as one's own) is worse than GSPO", "naive", "gspo", "lower"),
    Claim("Naive sharing (ratio to the sampler) is worse than GSPO", "naive_sampler_ratio", "gspo", "lower"),
)
REMOVALS = tuple(
    Claim(f"Removing {what} hurts both agents", name, "hacpo", "lower") for name, what in _MECHANISMS.items()
)
STABILITY = (
    Claim(
        "Without clipping training is unstable: the reward falls further from its best",
        "no_clipping",
        "hacpo",
        "higher",
        drawdown,
    ),
    Claim("Without clipping, both agents end worse", "no_clipping", "hacpo", "lower"),
)
_RIVALS = {
    "hacpo": "HACPO",
    "gspo_x2": "GSPO×2",
    "naive": "Naive (as own)",
    "naive_sampler_ratio": "Naive (ratio to sampler)",
}
_EXTENSIONS = {
    "pessimistic": "Pessimistic",
    "undamped": "Pessimistic with α = 0",
    "closed": "Pessimistic with α = 0 and δ = 0",
    "calibrated": "Calibrated",
    "calibrated_pessimistic": "Calibrated and pessimistic",
}
EXTENSIONS = {  # a table, and so a family of claims, for each method
    method: tuple(Claim(f"{method} beats {other}", name, against) for against, other in _RIVALS.items())
    for name, method in _EXTENSIONS.items()
}
# Written down before confirm.yaml ran, on seeds of its own: what seeds 1 to 8 suggested. One family.
CONFIRMED = (
    Claim("HACPO beats GSPO×2", "hacpo", "gspo_x2"),
    Claim("Pessimistic beats GSPO×2", "pessimistic", "gspo_x2"),
    Claim("Pessimistic beats HACPO", "pessimistic", "hacpo"),
    Claim("Ratio to the sampler (Naive's second reading) beats GSPO×2", "naive_sampler_ratio", "gspo_x2"),
    Claim("Ratio to the sampler beats HACPO", "naive_sampler_ratio", "hacpo"),
    Claim("Pessimistic with α = 0 and δ = 0 beats GSPO×2", "closed", "gspo_x2"),
)


@dataclass(frozen=True)
class Page:
    """What the template may ask for."""

    reports: Mapping[str, SweepReport]

    def has(self, sweep: str) -> bool:
        return sweep in self.reports and bool(self.reports[sweep].comparisons)

    def of(self, sweep: str, variant: str, agent: str) -> Comparison:
        return next(c for c in self.reports[sweep].comparisons if (c.variant, c.agent) == (variant, agent))

    def cells(self) -> list[CellResult]:
        """All cells of the main task, whichever sweep ran them; one that several sweeps have counts once."""
        found: dict[tuple[str, int], CellResult] = {}
        for name in MAIN_TASK:
            for result in self.reports[name].results if name in self.reports else ():
                same = found.setdefault((result.variant, result.seed), result)
                if any(same.agents[a].version != agent.version for a, agent in result.agents.items()):
                    raise ConfigError(
                        f"sweep {name}: {result.variant}, seed {result.seed} ended with other weights than in a sweep before it; "
                        "the settings of both must agree"
                    )
        return list(found.values())

    def failed(self, sweep: str | None) -> frozenset[str]:
        return frozenset().union(
            *(self.reports[n].failed for n in (MAIN_TASK if sweep is None else (sweep,)) if n in self.reports)
        )

    def claims(self, claims: tuple[Claim, ...], sweep: str | None = None) -> list[Answered]:
        """Of the main task, or of one sweep, where claims about methods that it does not have are left out."""
        if sweep is None:
            return answer_claims(claims, self.cells(), self.agents, self.failed(None))
        results = self.reports[sweep].results
        there = {r.variant for r in results}
        asked = [c for c in claims if {c.method, c.baseline} <= there]
        return answer_claims(asked, results, self.agents, self.failed(sweep))

    def against(self, variant: str, baseline: str, sweep: str | None = None) -> str:
        """One difference in words; the correction is the claims' business."""
        return self.claims((Claim("", variant, baseline),), sweep)[0].numbers(with_p=False)

    @property
    def agents(self) -> list[str]:
        return self.reports["main"].agents

    def start(self, agent: str, sweep: str = "main") -> float:
        first = {r.seed: r.agents[agent].before for r in self.reports[sweep].results}
        return 100 * sum(first.values()) / len(first)

    def average(self, variant: str, agent: str, metric: str) -> float:
        """A diagnostic's mean over iterations and seeds."""
        cells = [r for r in self.cells() if r.variant == variant]
        values = [v for r in cells if (v := r.agents[agent].average(metric)) is not None]
        return sum(values) / len(values) if values else float("nan")

    def settings(self) -> str:
        """The campaign in a sentence, from its config."""
        c = self.reports["main"].sweep.cells[0].config
        return (
            f"{c.iterations} iterations of {c.prompts_per_iteration} prompts, {c.samples_per_prompt} responses of each agent to each, "
            f"minibatches of {c.update.minibatch_prompts} prompts, AdamW {c.update.learning_rate:g}."
        )

    def hours(self) -> float:
        return sum(r.stage_seconds for report in self.reports.values() for r in report.results) / 3600

    def commits(self) -> list[str]:
        found = {c[:12] for report in self.reports.values() for r in report.results for c in r.commits if c}
        return sorted(found)

    def packages(self) -> str:
        first = next(r for report in self.reports.values() for r in report.results)
        return ", ".join(f"{name} {version}" for name, version in sorted(first.packages.items()))

    def versions(self) -> str:
        return ", ".join(f"{name} {find_stage(name).version}" for name in STAGES)

    def digest(self, sweep: str) -> str:
        """One digest for all final versions of a sweep's agents: equal digests, equal weights everywhere."""
        rows = [
            (r.variant, r.seed, a, found.version) for r in self.reports[sweep].results for a, found in r.agents.items()
        ]
        return digest_of(sorted(rows))[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=None)
    parser.add_argument("--sweeps", type=Path, default=Path("configs/sweeps"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args()
    home = Home.find(options.home)
    reports = {name: make_report(load_sweep(options.sweeps / f"{name}.yaml"), home.root) for name in SWEEPS}
    write_page({name: report for name, report in reports.items() if report.results}, options.docs)


def write_page(reports: Mapping[str, SweepReport], docs: Path) -> None:
    folder = docs / "results"
    folder.mkdir(parents=True, exist_ok=True)
    for name, report in reports.items():
        _write_files(name, report, folder)
    texts = jinja2.DictLoader({"findings": (folder / "findings.md").read_text()})
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
    }
    for template, target in (("template.md", "results.md"), ("winner.md", "shared-gspo.md")):
        if template == "template.md" or "confirm" in reports:
            text = environment.from_string((folder / template).read_text())
            (docs / target).write_text(text.render(page=Page(reports), reports=reports, **sets))


def _write_files(name: str, report: SweepReport, folder: Path) -> None:
    (folder / f"{name}-cells.csv").write_text(cells_csv(report.results))
    if not report.comparisons:
        return
    (folder / f"{name}-summary.csv").write_text(summary_csv(report.comparisons))
    (folder / f"{name}-table.tex").write_text(report.accuracy().latex())
    draw_forest(report.comparisons, report.labels, report.baseline, report.agents, folder / f"{name}-forest.png")
    if name in ("main", "extensions", "rivals", "longer"):
        draw_curves(report.results, report.variants, report.labels, report.agents, folder / f"{name}-curves.png")
        draw_costs(report.results, report.variants, report.labels, folder / f"{name}-costs.png")


if __name__ == "__main__":
    main()
