"""What finished cells measured, read from the manifests in the store."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flows.record.history import ANSWERING
from flows.record.record import Entry
from flows.sweep.cells import Job, finished_entries
from hacrl_core.artifacts.manifests import read_manifest
from hacrl_core.config.sweep import Cell, Sweep

# The name of the mean over a cell's agents, which is treated as one more agent.
BOTH = "mean"
# Metrics that explain a result: mean over the iterations, per learner.
DIAGNOSTICS = {
    "inside": "update/foreign_inside_fraction",
    "foreign_ratio": "update/foreign_ratio_mean",
    "foreign_ess": "update/foreign_ess_fraction",
    "own_clipped": "update/own_clip_fraction",
    "cosine": "update/gradient_cosine",
    "gradient_norm": "update/gradient_norm_mean",
    "response_length": "generate/response_length_mean",
    "no_signal": "credit/no_signal_share",
}
# Shown in tables beside them; cells.csv keeps its columns. Minus this is an estimate of the entropy per token.
SHOWN = {**DIAGNOSTICS, "own_logprob": "score/own_mean_logprob"}

# What every attempt at an answer costs, also one that does not count.
COSTS = ("generate/responses", "generate/tokens")

# Iterations done → value.
Series = dict[int, float]


@dataclass(frozen=True)
class AgentResult:
    """What one agent of a cell measured."""

    accuracy: Series = field(default_factory=dict)
    reward: Series = field(default_factory=dict)
    # Responses and tokens that this agent has sampled so far.
    responses: Series = field(default_factory=dict)
    tokens: Series = field(default_factory=dict)
    # Everything else that its stages measured.
    metrics: dict[str, Series] = field(default_factory=dict)
    # The content digest of its last version.
    version: str = ""

    @property
    def before(self) -> float:
        """Return the accuracy before training."""
        return self.accuracy[min(self.accuracy)]

    @property
    def after(self) -> float:
        """Return the accuracy after training."""
        return self.accuracy[max(self.accuracy)]

    def average(self, metric: str) -> float | None:
        """Return a metric's mean over the iterations; None if it was not measured."""
        values = self.metrics.get(metric)
        return float(np.mean(list(values.values()))) if values else None


@dataclass(frozen=True)
class CellResult:
    """What one finished cell measured."""

    variant: str
    seed: int
    agents: dict[str, AgentResult]
    commits: frozenset[str]
    packages: dict[str, str]
    # What its stages took when they ran, in this cell or in another one.
    stage_seconds: float
    # When the last of them finished.
    finished_at: float

    def cost(self, what: str) -> Series:
        """Return the responses or tokens sampled by all agents together, by iterations done."""
        total: Series = defaultdict(float)
        for agent in self.agents.values():
            for iteration, value in getattr(agent, what).items():
                total[iteration] += value
        return dict(total)


def read_results(sweep: Sweep, home: Path) -> list[CellResult]:
    """Return the finished cells in the order of the sweep."""
    found = []
    for cell in sweep.cells:
        entries = finished_entries(Job(cell.config, home / "campaigns" / cell.label), home / "store")
        if entries is not None:
            found.append(read_cell(cell, entries, home / "store", sweep.benchmark))
    return found


def read_cell(cell: Cell, entries: Sequence[Entry], store: Path, benchmark: str) -> CellResult:
    """Read one cell's result from the manifests of its entries."""
    agents: dict[str, AgentResult] = {name: AgentResult() for name in cell.config.agents}
    versions: dict[str, tuple[int, str]] = {}
    commits: set[str] = set()
    packages: dict[str, str] = {}
    seconds = 0.0
    finished_at = 0.0
    for entry in entries:
        manifest = read_manifest(store / "objects" / entry.stage / entry.key)
        commits.add(manifest.provenance.commit)
        packages = manifest.provenance.packages
        seconds += manifest.provenance.seconds
        finished_at = max(finished_at, manifest.provenance.finished)
        if entry.agent in agents:
            _take(agents[entry.agent], entry, manifest.metrics, benchmark)
        if entry.stage == "update" and (entry.iteration or 0) >= versions.get(entry.agent, (-1, ""))[0]:
            versions[entry.agent] = (entry.iteration or 0, manifest.content_digest)
    finished = {
        name: AgentResult(
            a.accuracy,
            a.reward,
            _cumulated(a.metrics.get("generate/responses", {})),
            _cumulated(a.metrics.get("generate/tokens", {})),
            a.metrics,
            versions.get(name, (0, ""))[1],
        )
        for name, a in agents.items()
    }
    return CellResult(cell.variant, cell.seed, finished, frozenset(commits), packages, seconds, finished_at)


def _take(agent: AgentResult, entry: Entry, metrics: dict[str, float], benchmark: str) -> None:
    iteration = entry.iteration or 0
    if entry.stage == "evaluate":
        if entry.variant == benchmark and f"evaluate/{benchmark}/accuracy" in metrics:
            agent.accuracy[iteration] = metrics[f"evaluate/{benchmark}/accuracy"]
        step = iteration
    else:
        step = iteration + 1
    superseded = bool(entry.variant) and entry.stage in ANSWERING
    if entry.stage == "verify" and not superseded:
        agent.reward[step] = metrics["verify/reward_mean"]
    if entry.variant != "reference":
        for name, value in metrics.items():
            series = agent.metrics.setdefault(name, {})
            if name in COSTS:
                series[step] = series.get(step, 0.0) + value
            elif not superseded:
                series[step] = value


def _cumulated(values: Series) -> Series:
    total, found = 0.0, {0: 0.0}
    for iteration in sorted(values):
        total += values[iteration]
        found[iteration] = total
    return found
