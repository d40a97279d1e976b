"""The campaign as a Prefect flow: one flow per campaign, a task per stage that has to run.

Tasks pass references, never data. Calls whose artifacts exist share one task in the state Cached: a lookup costs a
millisecond, a task run twenty.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import httpx
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import CrashedRun, MissingResult, UnfinishedRun
from prefect.futures import PrefectFuture
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.home import Home
from flows.record.record import Record
from flows.run.divergence import Watch
from flows.run.events import Listener, Listeners
from flows.run.executors import Executor
from flows.run.runner import THREADS, Done, StageRunner
from flows.scheduling.pages import CachedStages, PrefectView
from flows.scheduling.slots import held_slots
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.errors import ProcessDiedError
from stages.spec import Handle, Outcome, StageCall

# What Prefect raises when it lost a run, as opposed to a stage that failed: its server forgot, refused or was too slow.
LOST = (UnfinishedRun, CrashedRun, MissingResult, httpx.HTTPError)
T = TypeVar("T")


def run_as_flow(
    config: CampaignConfig, home: Home, work: Callable[[], T], say: Callable[[str], None], *, shared: bool
) -> T:
    """Do the work inside a flow run that Prefect shows under the campaign's name, with the campaign's slots held.

    ``shared``: whether other campaigns use the same Prefect server.
    """

    @flow(
        name="campaign",
        flow_run_name=f"{config.name} to iteration {config.iterations}",
        # Prefect's types disagree: the runner's kind of future is not the decorator's.
        task_runner=ThreadPoolTaskRunner(max_workers=THREADS),  # type: ignore[arg-type]
        persist_result=False,
    )
    def campaign_flow(config: dict[str, Any], home: str) -> T:
        """Run or resume a campaign."""
        with held_slots(CampaignConfig.model_validate(config), say, shared=shared):
            return work()

    return campaign_flow(config.model_dump(mode="json"), str(home.root))


@dataclass
class InTask:
    """A call under way as a Prefect task.

    The store is the truth: where Prefect loses the run, the call runs without it.
    """

    call: StageCall
    future: PrefectFuture[Outcome]
    perform: Callable[[], Outcome]
    _without_prefect: Outcome | None = None
    _lock: Lock = field(default_factory=Lock)

    def outcome(self) -> Outcome:
        """Wait for the task; raises what the stage raised."""
        try:
            return self.future.result()
        except LOST:
            with self._lock:  # several stages may wait for this one
                self._without_prefect = self._without_prefect or self.perform()
                return self._without_prefect

    def done(self) -> bool:
        """Whether the task run has ended."""
        return self.future.state.is_final()

    def failed(self) -> bool:
        """Whether the task run has ended in an error."""
        return self.future.state.is_failed() or self.future.state.is_crashed()


class PrefectRunner(StageRunner):
    """Submits stages as tasks of the flow it is used in, and keeps Prefect's pages up to date."""

    def __init__(
        self,
        store: Store,
        executor: Executor,
        listener: Listener,
        record: Record,
        watch: Watch | None = None,
        retries: int = 0,
    ) -> None:
        self._view = PrefectView(store, record, listener.warn)
        self._cached = CachedStages(_submit_cached)
        self._campaign = record.config.name
        super().__init__(store, executor, Listeners(listener, self._view), record, watch, retries)

    def submit(self, call: StageCall) -> Handle:
        """Return a handle at once; calls found in the store are gathered into one task."""
        handle = super().submit(call)
        if isinstance(handle, Done):
            self._cached.add(call)
        return handle

    def finish(self) -> None:
        """Wait for the last stages and for the pages."""
        super().finish()
        self._cached.flush()
        self._view.close()

    def _schedule(self, call: StageCall) -> InTask:
        self._cached.flush()
        waits = [item.future for item in call.inputs.values() if isinstance(item, InTask)]
        run_one = stage_task.with_options(
            name=call.stage,
            task_run_name=f"{self._campaign}: {call.label}",
            retries=self.retries,
            retry_delay_seconds=[0.5 * 2**attempt for attempt in range(self.retries)] or 0,
            retry_condition_fn=_if_worker_died(self.listener.warn),
        )
        perform = partial(self.perform, call)
        future: PrefectFuture[Outcome] = run_one.submit(perform, wait_for=waits)  # type: ignore[call-overload]
        return InTask(call, future, perform)


@task(persist_result=False, cache_policy=NO_CACHE)
def stage_task(perform: Callable[[], Outcome]) -> Any:
    """Run one stage. One that was in the store after all, once its inputs were known, is shown as cached."""
    outcome = perform()
    return Completed(name="Cached", message="found in the store", data=outcome) if outcome.cached else outcome


@task(name="from the store", persist_result=False, cache_policy=NO_CACHE)
def cached_task(stages: list[str]) -> Any:
    """Show stages that were found in the store."""
    return Completed(name="Cached", message="found in the store")


def _submit_cached(name: str, stages: list[str]) -> None:
    cached_task.with_options(task_run_name=name).submit(stages)


def _if_worker_died(warn: Callable[[str], None]) -> Callable[[Any, Any, Any], bool]:
    """Return Prefect's question whether to retry: what a new process may finish, and nothing else.

    Prefect asks while tries are left, and only a plain function (a method would never be called).
    """

    def worker_died(task: Any, run: Any, state: Any) -> bool:
        try:
            state.result()
        except ProcessDiedError as problem:
            warn(f"{problem}; trying again")
            return True
        except Exception:
            return False
        return False

    return worker_died
