"""The cells of a sweep as jobs: in which order they run, how a process runs one, and how a finished one is recognised.

First versions are jobs of their own, since several cells need the same one and a warm start is long: cells side by side
would wait for one another. Those of the next seed come a little before the last cells of this one, so that no process
waits for them.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flows.home import Home
from flows.record.record import Entry, Record
from flows.run.events import Listener, Listeners
from flows.run.executors import Executor, InProcessExecutor
from flows.run.opening import open_executor
from flows.run.placement import placements_of
from flows.run.runner import InlineRunner, StageRunner, ThreadRunner
from flows.run.session import open_session, run_in_session
from flows.stage_calls import StageCalls
from flows.store.running import collector
from hacrl_core.artifacts import Store, open_store
from hacrl_core.artifacts.manifests import MANIFEST
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.sweep import Cell
from hacrl_core.contracts.manifest import digest_of
from hacrl_core.errors import ConfigError
from stages.spec import Context, Outcome, StageCall, find_stage

STAGES = ("adopt", "warmstart", "sample", "generate", "verify", "credit", "score", "update", "evaluate")
MARK, FAILED = "finished.json", "failed.json"


@dataclass(frozen=True)
class Job:
    """What one process does in one go: a whole cell, or the first version of one agent."""

    config: CampaignConfig
    folder: Path  # of the campaign's record
    origin: str | None = None  # the agent whose first version this is

    @property
    def label(self) -> str:
        return self.config.name if self.origin is None else f"{self.config.name} first version of {self.origin}"

    @property
    def title(self) -> str:
        """The name that people read."""
        return self.label

    @property
    def agent(self) -> str:
        """Whose log a worker process writes to when something unforeseen happens."""
        return "sweep"

    def perform(self, store: Store, context: Context) -> "Tally":
        """Run in a worker process. The store is new for each job: its memory of artifacts must not grow for hours."""
        begun = time.perf_counter()
        tally = run_job(self, open_store(store.root, on_problem=context.warn), context)
        return replace(tally, seconds=time.perf_counter() - begun)


@dataclass(frozen=True)
class Tally:
    """What a job, or all of them, really did."""

    ran: int = 0
    cached: int = 0
    rollouts_sampled: int = 0
    tokens_sampled: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


def order_jobs(cells: Sequence[Cell], campaigns: Path, concurrency: int) -> list[Job]:
    by_seed: dict[int, list[Job]] = {}
    origins: dict[int, list[Job]] = {}
    known: set[str] = set()
    for cell in cells:
        folder = campaigns / cell.label
        by_seed.setdefault(cell.seed, []).append(Job(cell.config, folder))
        for agent, settings in cell.config.agents.items():
            key = digest_of([cell.seed, agent, settings.model_dump(mode="json", include={"warmstart", "checkpoint"})])
            if key not in known:
                known.add(key)
                origins.setdefault(cell.seed, []).append(Job(cell.config, folder, agent))
    ordered: list[Job] = []
    for seed, jobs in by_seed.items():
        place = max(0, len(ordered) - concurrency)
        ordered[place:place] = origins.get(seed, [])
        ordered += jobs
    return ordered


def mark_finished(job: Job, entries: Sequence[Entry], sources: Mapping[str, Any]) -> None:
    """Write down exactly what the finished cell consists of; its record also remembers earlier settings."""
    mark = {**fingerprint(job.config, sources), "entries": [asdict(entry) for entry in entries]}
    _write(job.folder / MARK, mark)
    (job.folder / FAILED).unlink(missing_ok=True)


def mark_failed(job: Job, why: str) -> None:
    """A cell that ended in an error says so in every report: leaving it out would favour the cells that survive."""
    job.folder.mkdir(parents=True, exist_ok=True)
    _write(job.folder / FAILED, {"why": why.partition("\n")[0]})


def why_failed(folder: Path) -> str | None:
    """None: it did not fail, it was not run, or it was finished since."""
    try:
        return str(json.loads((folder / FAILED).read_text())["why"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(content))
    os.replace(draft, path)


def finished_entries(job: Job, store_root: Path) -> list[Entry] | None:
    """Return what the cell consists of, or None unless it is finished as it is configured now and all is there."""
    try:
        mark = json.loads((job.folder / MARK).read_text())
        entries = [Entry(**raw) for raw in mark.pop("entries")]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if mark != fingerprint(job.config, _sources_now(job.config)):
        return None
    objects = store_root / "objects"
    return entries if all((objects / e.stage / e.key / MANIFEST).exists() for e in entries) else None


def fingerprint(config: CampaignConfig, sources: Mapping[str, Any]) -> dict[str, object]:
    """Return what decides whether a finished cell is still the cell: settings, data and stage versions."""
    settings = config.model_dump(mode="json", exclude={"name", "runtime", "store", "tracking"})
    return {
        "settings": digest_of(settings),
        "sources": digest_of(dict(sources)),
        "versions": {name: find_stage(name).version for name in STAGES},
    }


_known_sources: dict[str, dict[str, Any]] = {}  # of this process: reading data again for every cell would take minutes


def _sources_now(config: CampaignConfig) -> dict[str, Any]:
    asked = digest_of(
        [
            config.model_dump(mode="json", include={"problems", "evaluate", "verify"}),
            {name: agent.model_dump(mode="json", include={"checkpoint"}) for name, agent in config.agents.items()},
        ]
    )
    if asked not in _known_sources:
        _known_sources[asked] = StageCalls(config).sources()
    return _known_sources[asked]


# -- running a job ---------------------------------------------------------------------------------------------------

# How long a cell waits for a process of a killed sweep to notice that it is orphaned and to release the cell's record.
ORPHAN_SECONDS = 30.0


class _JobListener(Listener):
    """Adds up what the stages of a job did, passes warnings on, and removes old versions as the keep policy says."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.tally = Tally()

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        new = Tally(ran=int(not outcome.cached), cached=int(outcome.cached), seconds=outcome.seconds)
        if call.stage == "generate" and not outcome.cached:
            responses, tokens = (int(outcome.metrics[f"generate/{name}"]) for name in ("responses", "tokens"))
            new = replace(new, rollouts_sampled=responses, tokens_sampled=tokens)
        self.tally += new

    def warn(self, message: str) -> None:
        self._context.warn(message)


class _Collect(Listener):
    """Removes old versions after each iteration, as the keep policy says."""

    def __init__(self, store: Store, record: Record, context: Context) -> None:
        self._collect = collector(Home(store.root.parent), store, record, context.warn)

    def iteration_finished(self, iteration: int) -> None:
        self._collect(iteration)


def run_job(job: Job, store: Store, context: Context) -> Tally:
    """Run a whole cell, which leaves the same record as ``hacrl run``, or make one agent's first version."""
    config, listener = job.config, _JobListener(context)
    calls = StageCalls(config)
    if job.origin is not None:
        executor: Executor = InProcessExecutor(store, context, placements_of(config))
        with open_session(InlineRunner(store, executor, listener), executor) as runner:
            runner.submit(calls.origin(job.origin))
        # The cells that start from it ask again and count it as shared; one asking too many is taken back here.
        return replace(listener.tally, cached=-listener.tally.ran)
    with _open_record(job) as record:
        # GPUs are assigned by process: agents with GPUs of their own run in workers of their own, as in ``hacrl run``.
        apart = config.runtime.executor == "ray" or any(agent.gpus for agent in config.agents.values())
        kind: type[StageRunner] = ThreadRunner if apart else InlineRunner

        def make_executor() -> Executor:
            return open_executor(config, store) if apart else InProcessExecutor(store, context, placements_of(config))

        heard = Listeners(listener, _Collect(store, record, context))
        run_in_session(config, calls, store, record, make_executor, heard, kind)
        mark_finished(job, record.entries(), calls.sources())
    return listener.tally


def _open_record(job: Job) -> Record:
    deadline = time.monotonic() + ORPHAN_SECONDS
    while True:
        try:
            return Record(job.folder, job.config)
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
