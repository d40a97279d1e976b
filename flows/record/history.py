"""A campaign's history, read from its manifests: metrics over the iterations, costs, times, the best version."""

import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from flows.record.goal import grows_by
from flows.record.log import failure
from flows.record.record import Entry, Record, is_running, read_campaign, read_entries, versions_of
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.manifest import Manifest
from hacrl_core.errors import ArtifactError

# Pairs of (iterations done, or another cost; value).
Points = list[tuple[float, float]]
# How many of the last iterations the rate is taken from.
RECENT = 9
# An agent may answer and be verified several times in an iteration. What counts has no variant.
ANSWERING = ("generate", "verify")
# One thread at a time reads the history of a run; the others wait for it.
_reading = threading.Lock()


@dataclass(frozen=True)
class FinishedStage:
    """One finished stage call of the campaign, and its manifest."""

    entry: Entry
    manifest: Manifest

    @property
    def step(self) -> int:
        """Return the iterations done: an evaluation's own label, and one more than that of any other stage."""
        number = self.entry.iteration or 0
        return number if self.entry.stage == "evaluate" or self.entry.iteration is None else number + 1


@dataclass(frozen=True)
class Cost:
    """What rollouts cost."""

    responses: int
    tokens: int
    # The sum over the stages of all workers.
    seconds: float


class History:
    """A campaign's finished iterations, without entries of an unfinished one or of settings that it no longer has."""

    def __init__(self, config: CampaignConfig, store: Store, entries: Sequence[Entry]) -> None:
        self.config, self.store = config, store
        self.versions = {agent: versions_of(store, entries, agent, config) for agent in config.agents}
        self.done = self._iterations_done()
        self.finished = [
            FinishedStage(entry, manifest)
            for entry in entries
            if (entry.iteration is None or entry.iteration < self.done + (entry.stage == "evaluate"))
            and entry.agent in ("", *config.agents)
            and (entry.stage not in ANSWERING or entry.variant in config.attempts)
            and (manifest := _manifest(store, entry)) is not None
        ]
        self._series: dict[tuple[str, str, str], list[FinishedStage]] = {}
        for f in sorted(self.finished, key=lambda f: f.step):
            self._series.setdefault((f.entry.stage, f.entry.agent, f.entry.variant), []).append(f)

    @property
    def agents(self) -> list[str]:
        """Return the agents' names in the order of the config."""
        return list(self.config.agents)

    @property
    def benchmarks(self) -> list[str]:
        """Return the names of the campaign's benchmarks."""
        return [benchmark.name for benchmark in self.config.evaluate.benchmarks]

    @property
    def complete(self) -> bool:
        """Say whether every iteration of the config is done, and every evaluation that is due."""
        return self.done == self.config.iterations and not self.missing_evaluations()

    def missing_evaluations(self) -> list[str]:
        """Name the evaluations that were due in the iterations done, and that did not run on the present versions."""
        known = {(f.entry.agent, f.entry.variant, f.step): f.manifest for f in self.finished if _is_evaluation(f)}
        missing = []
        for agent, settings in self.config.agents.items():
            last = min(settings.leaves or self.config.iterations, self.config.iterations)
            for index, version in enumerate(self.versions[agent]):
                completed = settings.joins + index
                for benchmark in self.config.evaluate.due(completed, last, settings.joins):
                    found, evaluated = known.get((agent, benchmark.name, completed)), _manifest(self.store, version)
                    stale = found and evaluated and found.identity.inputs["agent"] != evaluated.content_digest
                    if found is None or stale:
                        missing.append(f"{benchmark.name} of {agent} after {completed}")
        return missing

    # -- metrics ---------------------------------------------------------------------------------------------------

    def stages(self, stage: str, agent: str = "", variant: str = "") -> list[FinishedStage]:
        """Return the finished calls of a stage in the order of iterations."""
        return self._series.get((stage, agent, variant), [])

    def series(self, stage: str, agent: str, metric: str, variant: str = "") -> Points:
        """Return one metric of a stage over the iterations."""
        name = f"{stage}/{metric}"
        return [
            (f.step, f.manifest.metrics[name]) for f in self.stages(stage, agent, variant) if name in f.manifest.metrics
        ]

    def metric_names(self, stage: str, beginning: str) -> list[str]:
        """Return the metrics of a stage whose names begin so, of any agent, without the stage's name."""
        start = f"{stage}/{beginning}"
        found = {
            name.removeprefix(f"{stage}/")
            for agent in self.agents
            for finished in self.stages(stage, agent, "")
            for name in finished.manifest.metrics
            if name.startswith(start)
        }
        return sorted(found)

    def rewards(self, agent: str) -> Points:
        """Return the mean reward of the agent's responses in training."""
        return self.series("verify", agent, "reward_mean")

    def capability(self, agent: str) -> Points:
        """Return the agent's capability estimate."""
        return self.series("credit", agent, "capability")

    def accuracy(self, agent: str, benchmark: str, which: str = "accuracy") -> Points:
        """Return the accuracy on a benchmark; ``which`` may also be ``accuracy_low`` or ``accuracy_high`` (95 %)."""
        return self.series("evaluate", agent, f"{benchmark}/{which}", benchmark)

    def mean_accuracy(self, agent: str) -> dict[int, float]:
        """Return the mean over the benchmarks by iterations done, where all of them have a result."""
        found = [dict(self.accuracy(agent, benchmark)) for benchmark in self.benchmarks]
        return mean_of_all([{int(step): value for step, value in points.items()} for points in found])

    def best(self, agent: str) -> int | None:
        """Return the version with the highest mean accuracy, the later of equals; None if none was evaluated."""
        first = self.config.agents[agent].joins
        known = {
            s - first: a for s, a in self.mean_accuracy(agent).items() if 0 <= s - first < len(self.versions[agent])
        }
        return best_of(known)

    # -- cost and time ---------------------------------------------------------------------------------------------

    def cost(self, agent: str | None = None) -> Cost:
        """Return what the rollouts of one agent, or of all agents, cost."""
        chosen = [f for f in self.finished if agent in (None, f.entry.agent)]
        generated = [f.manifest.metrics for f in chosen if f.entry.stage == "generate"]
        return Cost(
            int(sum(m.get("generate/responses", 0.0) for m in generated)),
            int(sum(m.get("generate/tokens", 0.0) for m in generated)),
            sum(f.manifest.provenance.seconds for f in chosen),
        )

    def spent_until(self, metric: str) -> dict[int, float]:
        """Return the responses or tokens that all agents together had written, by iterations done."""
        each: dict[int, float] = {}
        for agent in self.agents:
            for attempt in self.config.attempts:
                for step, value in self.series("generate", agent, metric, attempt):
                    each[int(step)] = each.get(int(step), 0.0) + value
        total, found = 0.0, {0: 0.0}
        for step in sorted(each):
            total += each[step]
            found[step] = total
        return found

    def seconds_by_stage(self) -> dict[str, dict[str, float]]:
        """Return stage → agent → seconds, the most expensive stage first."""
        found: dict[str, dict[str, float]] = {}
        for f in self.finished:
            agents = found.setdefault(f.entry.stage, {})
            agents[f.entry.agent] = agents.get(f.entry.agent, 0.0) + f.manifest.provenance.seconds
        return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))

    def seconds_per_iteration(self) -> float | None:
        """Return the median wall time of the last iterations, of two the shorter: a pause hardly counts."""
        ends: dict[int, float] = {}
        for f in self.finished:
            if f.entry.stage == "update":
                ends[f.step] = max(ends.get(f.step, 0.0), f.manifest.provenance.finished)
        steps = sorted(ends)[-RECENT - 1 :]
        gaps = [ends[b] - ends[a] for a, b in pairwise(steps) if ends[b] > ends[a]]
        return statistics.median_low(gaps) if gaps else None

    def seconds_left(self) -> float | None:
        """Estimate the wall time of the remaining iterations; None before there is a rate."""
        each = self.seconds_per_iteration()
        return None if each is None else each * (self.config.iterations - self.done)

    def _iterations_done(self) -> int:
        """Count the iterations that every participating agent has finished with the present settings."""
        for iteration in range(self.config.iterations):
            for agent in filter(self.config.has_weights_of, self.config.present(iteration)):
                if len(self.versions[agent]) - 1 <= iteration - self.config.agents[agent].joins:
                    return iteration
        return self.config.iterations


def read_history(store: Store, folder: Path) -> History:
    """Read the history of a campaign's folder; raise ConfigError if there is none or another version wrote it."""
    return History(read_campaign(folder), store, read_entries(folder))


def history_of_run(record: Record, store: Store) -> History:
    """Return the history of a run so far, which the record keeps until it changes.

    At the end of a run several pages show the same history, each from its own thread, and reading it takes milliseconds
    for each iteration.
    """
    with _reading:
        changes = record.changes
        if record.kept is None or record.kept[0] != changes:
            record.kept = (changes, History(record.config, store, record.entries()))
        found = record.kept[1]
        assert isinstance(found, History)
        return found


def state_of(history: History, folder: Path) -> str:
    """Return ``running``, ``complete``, ``idle``, ``failed`` or ``stopped``.

    A campaign whose scheduled runs add iterations has no end: between two runs it is ``idle``.
    """
    if is_running(folder):
        return "running"
    if history.complete:
        return "complete" if grows_by(folder, history.config.iterations) is None else "idle"
    return "failed" if failure(folder) else "stopped"


def mean_of_all(found: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean of several curves, where all of them have a value."""
    if not found:
        return {}
    shared = set(found[0]).intersection(*found[1:])
    return {step: statistics.fmean(points[step] for points in found) for step in sorted(shared)}


def best_of(accuracy: Mapping[int, float]) -> int | None:
    """Return the version with the highest accuracy, the later of equals; None if there is none."""
    return max(accuracy, key=lambda number: (accuracy[number], number)) if accuracy else None


def smooth(points: Points, width: int = 5) -> Points:
    """Return the running mean over the last ``width`` points."""
    values = [value for _, value in points]
    return [(x, statistics.fmean(values[max(0, i - width + 1) : i + 1])) for i, (x, _) in enumerate(points)]


def last(points: Points) -> float | None:
    """Return the last value; None if there is none."""
    return points[-1][1] if points else None


def by_step(points: Mapping[int, float]) -> Points:
    """Return a mapping from steps as points in the order of steps."""
    return [(float(step), value) for step, value in sorted(points.items())]


def _is_evaluation(finished: FinishedStage) -> bool:
    return finished.entry.stage == "evaluate"


def _manifest(store: Store, entry: Entry) -> Manifest | None:
    try:
        return store.manifest(entry.stage, entry.key)
    except ArtifactError:
        # Deleted by a clean-up.
        return None
