"""Stages as Prefect tasks. Tasks pass references, never data. Calls whose artifacts exist share one task in the state Cached: looking up costs a
millisecond, a task run twenty."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import httpx
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import CrashedRun, MissingResult, UnfinishedRun
from prefect.futures import PrefectFuture
from prefect.states import Completed

from flows.record.record import Record
from flows.run.divergence import Watch
from flows.run.executors import Worker, WorkerDied
from flows.run.replay import Done, Observers, joined
from flows.run.runner import StageRunner
from flows.scheduling.pages import CachedStages, PrefectView, label_of
from flows.stage_calls import Planned
from hacrl_core.artifacts import Store
from stages.runner import Outcome

# What Prefect says when it lost a run, not when a stage failed: its server forgot, refused or was too slow.
LOST = (UnfinishedRun, CrashedRun, MissingResult, httpx.HTTPError)


@dataclass
class Running:
    future: PrefectFuture[Outcome]
    planned: Planned
    perform: Callable[[], Outcome]
    _again: Outcome | None = None
    _lock: Lock = field(default_factory=Lock)

    def outcome(self) -> Outcome:
        """The store is the truth: where Prefect lost the run, the stage is looked up or run without it."""
        try:
            return self.future.result()
        except LOST:
            with self._lock:  # several stages may wait for this one
                self._again = self._again or self.perform()
                return self._again

    def done(self) -> bool:
        return self.future.state.is_final()

    def failed(self) -> bool:
        return self.future.state.is_failed() or self.future.state.is_crashed()


class PrefectRunner(StageRunner):
    """Submits stages as tasks of the flow it is used in, and keeps Prefect's pages up to date."""

    def __init__(
        self,
        store: Store,
        record: Record,
        workers: dict[str, Worker],
        retries: int,
        observers: Observers,
        watch: Watch | None = None,
    ) -> None:
        self._view = PrefectView(store, record, observers.events.warn)
        self._from_store = CachedStages(_submit_cached)
        super().__init__(store, record, workers, retries, joined(observers, self._view.observers()), watch)

    def submit(self, planned: Planned) -> Any:
        handle = super().submit(planned)
        if isinstance(handle, Done):
            self._from_store.add(planned)
        return handle

    def finish(self) -> None:
        super().finish()
        self._from_store.flush()
        self._view.close()

    def _schedule(self, planned: Planned) -> Running:
        self._from_store.flush()
        label = label_of(planned)
        waits = [handle.future for handle in planned.inputs.values() if isinstance(handle, Running)]
        run_one = stage_task.with_options(
            name=planned.stage,
            task_run_name=f"{self.record.config.name}: {label}",
            retries=self._retries,
            retry_delay_seconds=[0.5 * 2**attempt for attempt in range(self._retries)] or None,
            retry_condition_fn=_worker_died,
        )
        perform = partial(self.perform, planned)
        return Running(run_one.submit(perform, wait_for=waits), planned, perform)


@task(persist_result=False, cache_policy=NO_CACHE)
def stage_task(perform: Callable[[], Outcome]) -> Any:
    """Found in the store after all, once its inputs were known: the task looks as what it was."""
    outcome = perform()
    return Completed(name="Cached", message="found in the store", data=outcome) if outcome.cached else outcome


@task(name="from the store", persist_result=False, cache_policy=NO_CACHE)
def cached_task(stages: list[str]) -> Any:
    return Completed(name="Cached", message="found in the store")


def _submit_cached(name: str, stages: list[str]) -> None:
    cached_task.with_options(task_run_name=name).submit(stages)


def _worker_died(task: Any, run: Any, state: Any) -> bool:
    """Retry what a new process may mend; an error in the data or the config stays an error."""
    try:
        state.result()
    except WorkerDied:
        return True
    except Exception:
        return False
    return False
