"""What happened in a campaign, read from its manifests: every metric over the iterations, costs, times, the best version."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from flows.record.log import failure
from flows.record.record import Entry, is_running, read_campaign, read_entries, versions_of
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.manifest import Manifest
from hacrl_core.errors import ArtifactError

Points = list[tuple[float, float]]  # iterations done (or another cost), value
RECENT = 9  # iterations that the rate is taken from


@dataclass(frozen=True)
class Happened:
    """One stage of the campaign with what its manifest says."""

    entry: Entry
    manifest: Manifest

    @property
    def step(self) -> int:
        """Iterations done: an evaluation is labelled by them, every other stage by the iteration it belongs to."""
        number = self.entry.iteration or 0
        return number if self.entry.stage == "evaluate" or self.entry.iteration is None else number + 1


@dataclass(frozen=True)
class Cost:
    responses: int
    tokens: int
    seconds: float  # the stages' own, all workers together


class History:
    """A campaign's finished iterations. Entries of an iteration under way, or of settings it no longer has, are left out."""

    def __init__(self, config: CampaignConfig, store: Store, entries: Sequence[Entry]) -> None:
        self.config, self.store = config, store
        self.versions = {agent: versions_of(store, entries, agent, config) for agent in config.agents}
        self.done = self._iterations_done()
        self.happened = [
            Happened(entry, manifest)
            for entry in entries
            if (entry.iteration is None or entry.iteration < self.done + (entry.stage == "evaluate"))
            and entry.agent in ("", *config.agents)
            and (manifest := _manifest(store, entry)) is not None
        ]
        self._by_place = {(h.entry.stage, h.entry.agent, h.entry.variant): [] for h in self.happened}
        for h in sorted(self.happened, key=lambda h: h.step):
            self._by_place[h.entry.stage, h.entry.agent, h.entry.variant].append(h)

    @property
    def agents(self) -> list[str]:
        return list(self.config.agents)

    @property
    def benchmarks(self) -> list[str]:
        return [benchmark.name for benchmark in self.config.evaluate.benchmarks]

    @property
    def complete(self) -> bool:
        return self.done == self.config.iterations

    # -- metrics ---------------------------------------------------------------------------------------------------

    def stages(self, stage: str, agent: str = "", variant: str = "") -> list[Happened]:
        """In the order of iterations."""
        return self._by_place.get((stage, agent, variant), [])

    def series(self, stage: str, agent: str, metric: str, variant: str = "") -> Points:
        name = f"{stage}/{metric}"
        return [
            (h.step, h.manifest.metrics[name]) for h in self.stages(stage, agent, variant) if name in h.manifest.metrics
        ]

    def rewards(self, agent: str) -> Points:
        return self.series("verify", agent, "reward_mean")

    def capability(self, agent: str) -> Points:
        return self.series("credit", agent, "capability")

    def accuracy(self, agent: str, benchmark: str, which: str = "accuracy") -> Points:
        """``accuracy``, or its ``accuracy_low`` and ``accuracy_high`` (95 %)."""
        return self.series("evaluate", agent, f"{benchmark}/{which}", benchmark)

    def mean_accuracy(self, agent: str) -> dict[int, float]:
        """By iterations done, over the benchmarks; only where all of them have a result."""
        found = [dict(self.accuracy(agent, benchmark)) for benchmark in self.benchmarks]
        if not found:
            return {}
        shared = set(found[0]).intersection(*found[1:])
        return {int(step): statistics.fmean(points[step] for points in found) for step in sorted(shared)}

    def best(self, agent: str) -> int | None:
        """Index into the agent's versions of the one with the highest mean accuracy, the later of equals; None: never evaluated."""
        first = self.config.agents[agent].joins
        known = {
            s - first: a for s, a in self.mean_accuracy(agent).items() if 0 <= s - first < len(self.versions[agent])
        }
        return max(known, key=lambda index: (known[index], index)) if known else None

    # -- cost and time ---------------------------------------------------------------------------------------------

    def cost(self, agent: str | None = None) -> Cost:
        """What the campaign's rollouts cost: everybody's, or one agent's."""
        chosen = [h for h in self.happened if agent in (None, h.entry.agent)]
        generated = [h.manifest.metrics for h in chosen if h.entry.stage == "generate"]
        return Cost(
            int(sum(m["generate/responses"] for m in generated)),
            int(sum(m["generate/tokens"] for m in generated)),
            sum(h.manifest.provenance.seconds for h in chosen),
        )

    def spent_until(self, metric: str) -> dict[int, float]:
        """Responses or tokens that everybody together had written after so many iterations."""
        each: dict[int, float] = {}
        for agent in self.agents:
            for step, value in self.series("generate", agent, metric):
                each[int(step)] = each.get(int(step), 0.0) + value
        total, found = 0.0, {0: 0.0}
        for step in sorted(each):
            total += each[step]
            found[step] = total
        return found

    def seconds_by_stage(self) -> dict[str, dict[str, float]]:
        """Stage → agent → seconds, the dearest stage first."""
        found: dict[str, dict[str, float]] = {}
        for h in self.happened:
            agents = found.setdefault(h.entry.stage, {})
            agents[h.entry.agent] = agents.get(h.entry.agent, 0.0) + h.manifest.provenance.seconds
        return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))

    def seconds_per_iteration(self) -> float | None:
        """Median wall time between the ends of the last iterations; a night's pause between two does not count."""
        ends: dict[int, float] = {}
        for h in self.happened:
            if h.entry.stage == "update":
                ends[h.step] = max(ends.get(h.step, 0.0), h.manifest.provenance.finished)
        steps = sorted(ends)[-RECENT - 1 :]
        gaps = [ends[b] - ends[a] for a, b in pairwise(steps) if ends[b] > ends[a]]
        return statistics.median(gaps) if gaps else None

    def seconds_left(self) -> float | None:
        each = self.seconds_per_iteration()
        return None if each is None else each * (self.config.iterations - self.done)

    def _iterations_done(self) -> int:
        """Iterations that every agent that takes part has finished, with the settings of now."""
        for iteration in range(self.config.iterations):
            for agent in self.config.present(iteration):
                if len(self.versions[agent]) - 1 <= iteration - self.config.agents[agent].joins:
                    return iteration
        return self.config.iterations


def read_history(store: Store, folder: Path) -> History:
    """Of a campaign's folder; raises ConfigError where there is none, or one of another version."""
    return History(read_campaign(folder), store, read_entries(folder))


def state_of(history: History, folder: Path) -> str:
    if is_running(folder):
        return "running"
    return "complete" if history.complete else "failed" if failure(folder) else "stopped"


def smooth(points: Points, width: int = 5) -> Points:
    """Mean over the last ``width`` points, as capability is one over the last iterations."""
    values = [value for _, value in points]
    return [(x, statistics.fmean(values[max(0, i - width + 1) : i + 1])) for i, (x, _) in enumerate(points)]


def clock(seconds: float | None) -> str:
    """0:07, 12:34, 3:12:34."""
    if seconds is None:
        return ""
    whole = int(seconds + 0.5)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def short(number: float) -> str:
    """950, 6.1k, 12.3M: three digits are enough to compare costs."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def ago(moment: float) -> str:
    """When, as briefly as it is still clear."""
    then, now = time.localtime(moment), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%Y-%m-%d", then)


def last(points: Points) -> float | None:
    return points[-1][1] if points else None


def by_step(points: Mapping[int, float]) -> Points:
    return [(float(step), value) for step, value in sorted(points.items())]


def _manifest(store: Store, entry: Entry) -> Manifest | None:
    try:
        return store.manifest(entry.stage, entry.key)
    except ArtifactError:
        return None  # cleaned away
