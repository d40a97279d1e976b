"""What a running campaign collects after each iteration: the versions that its keep policy does not keep.

A run meets its versions one after the other, so nothing has to be read to know which follows which, and a version that
was collected is not looked at again. Reading the whole history, as ``hacrl store gc`` does, takes longer the longer the
campaign is; here it is done once, after the last iteration.
"""

import time
from collections.abc import Callable, Iterable

from flows.home import Home
from flows.record.history import History, best_of, mean_of_all
from flows.record.record import ORIGINS, Entry, Record
from flows.store.pins import Pin, read_pins
from flows.store.survey import evaluation_pending, read_versions, recorded_campaigns, survey_campaign
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.removal import collect
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.operation import KeepConfig
from hacrl_core.errors import ArtifactError

# Collecting takes at most one part in so many of a campaign's time.
COLLECT_SHARE = 50


def collector(home: Home, store: Store, record: Record, warn: Callable[[str], None]) -> Callable[[int], None]:
    """Return a function to call after each iteration; it collects the versions that the policy does not keep.

    A campaign never fails because an old version could not be collected. It warns once. Iterations are left out where
    collecting would take more than a small part of the time; the last one never is.
    """
    config = record.config
    versions = RunningVersions(config, store)
    warned = False
    next_at = 0.0
    heard = 0

    def collect_now(iteration: int) -> None:
        nonlocal heard
        if config.keep is None:
            return
        if iteration + 1 >= config.iterations:
            collect_all(home, store, config, entries_until(record.entries(), iteration))
            return
        fresh = record.entries(after=heard)
        heard += len(fresh)
        versions.add(fresh)
        going = versions.not_kept(iteration, config.keep, read_pins(home.campaign(config.name)))
        collect_unless_needed(home, store, config, going)
        versions.forget_collected(going)

    def after(iteration: int) -> None:
        nonlocal warned, next_at
        if time.monotonic() < next_at and iteration + 1 < config.iterations:
            return
        begun = time.thread_time()
        try:
            collect_now(iteration)
        except Exception as problem:
            if not warned:
                warn(f"old versions could not be collected, the campaign goes on: {problem}")
            warned = True
        next_at = time.monotonic() + COLLECT_SHARE * (time.thread_time() - begun)

    return after


class RunningVersions:
    """The versions of a running campaign that have their files, by the entries of its run."""

    def __init__(self, config: CampaignConfig, store: Store) -> None:
        self._config = config
        self._store = store
        # Agent → iterations behind the version → its entry.
        self._versions: dict[str, dict[int, Entry]] = {agent: {} for agent in config.agents}
        # Agent, benchmark and iterations done → accuracy; None where it has none.
        self._accuracy: dict[tuple[str, str, int], float | None] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Take in new entries of the run."""
        for entry in entries:
            if entry.agent not in self._versions:
                continue
            iteration = entry.iteration or 0
            if entry.stage in ORIGINS:
                self._versions[entry.agent][0] = entry
            elif entry.stage == "update":
                self._versions[entry.agent][iteration + 1 - self._config.agents[entry.agent].joins] = entry
            elif entry.stage == "evaluate":
                self._accuracy[entry.agent, entry.variant, iteration] = self._measured(entry)

    def _measured(self, entry: Entry) -> float | None:
        try:
            return self._store.manifest(entry.stage, entry.key).metrics.get(f"evaluate/{entry.variant}/accuracy")
        except ArtifactError:
            return None

    def not_kept(self, iteration: int, policy: KeepConfig, pins: Iterable[Pin]) -> list[Entry]:
        """Return the versions that keep no files after an iteration.

        An agent that is ahead has versions of later iterations; others may still read its present one.
        """
        pinned = {pin.key for pin in pins}
        found = []
        for agent, versions in self._versions.items():
            reached = iteration + 1 - self._config.agents[agent].joins
            numbers = [number for number in sorted(versions) if number <= reached]
            best = best_of(self._means(agent, reached))
            found += [
                versions[number]
                for number in numbers
                if versions[number].key not in pinned
                and not policy.keeps(number, numbers[-1], best)
                and not evaluation_pending(self._config, agent, number, self._accuracy.keys())
            ]
        return found

    def _means(self, agent: str, reached: int) -> dict[int, float]:
        """Return the mean accuracy over the benchmarks by the number of the version."""
        joins = self._config.agents[agent].joins
        known: dict[str, dict[int, float]] = {benchmark.name: {} for benchmark in self._config.evaluate.benchmarks}
        for (who, name, iteration), value in self._accuracy.items():
            if who == agent and name in known and value is not None and 0 <= iteration - joins <= reached:
                known[name][iteration - joins] = value
        return mean_of_all(list(known.values()))

    def forget_collected(self, entries: Iterable[Entry]) -> None:
        """Look no more at those of these versions that were collected; one that was in use is tried again."""
        for entry in entries:
            if self._store.is_collected(entry.stage, entry.key):
                versions = self._versions[entry.agent]
                for number in [number for number, known in versions.items() if known.key == entry.key]:
                    del versions[number]


def entries_until(entries: list[Entry], iteration: int) -> list[Entry]:
    """Return the entries of versions and their evaluations, without the versions of later iterations."""
    told = (*ORIGINS, "evaluate")
    return [e for e in entries if e.stage in told or (e.stage == "update" and (e.iteration or 0) <= iteration)]


def collect_all(home: Home, store: Store, config: CampaignConfig, entries: list[Entry]) -> int:
    """Collect all of this campaign's versions that its policy does not keep; return the bytes freed."""
    pins = read_pins(home.campaign(config.name))
    versions = read_versions(History(config, store, entries), config.keep, pins)
    going = {v.key for v in versions if not v.kept}
    return collect_unless_needed(home, store, config, [entry for entry in entries if entry.key in going])


def collect_unless_needed(home: Home, store: Store, config: CampaignConfig, versions: Iterable[Entry]) -> int:
    """Collect those of these versions that have files and that no other campaign needs; return the bytes freed."""
    going = [entry for entry in versions if not store.is_collected(entry.stage, entry.key)]
    if not going:
        return 0
    own = home.campaign(config.name)
    others: set[str] = set()
    for folder in recorded_campaigns(home):
        if folder != own:
            others |= survey_campaign(home, store, folder).needed
    return sum(collect(store, e.stage, e.key, "keep policy") for e in going if e.key not in others)
