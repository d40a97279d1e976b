"""Stages as Prefect tasks: each hands its call to the worker process of its agent.

Tasks pass references, never data. A call whose artifact exists is answered on the spot, without a task: looking up costs a
millisecond, a task run twenty.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture

from flows.calls import Planned
from flows.records import Record
from flows.replay import Done, Observers, bind
from flows.workers import Stopped, Worker, WorkerDied
from hacrl_core.artifacts import Store
from hacrl_core.errors import HacrlError
from stages.runner import Outcome, lookup, run_stage
from stages.spec import Context, StageCall

LIGHT = ("sample", "credit")  # stages without torch: they run in this process


@dataclass(frozen=True)
class Running:
    future: PrefectFuture[Outcome]

    def outcome(self) -> Outcome:
        return self.future.result()


class PrefectRunner:
    """Submits stages as Prefect tasks inside a flow; one worker process per agent does the work."""

    def __init__(
        self, store: Store, record: Record, workers: dict[str, Worker], retries: int, observers: Observers
    ) -> None:
        self.store, self.record, self.observers = store, record, observers
        self._workers, self._retries = workers, retries
        self._context = Context(warn=observers.events.warn)
        self._futures: list[PrefectFuture[Outcome]] = []

    def submit(self, planned: Planned) -> Done | Running:
        if all(isinstance(handle, Done) for handle in planned.inputs.values()):
            call = bind(planned)
            if found := lookup(self.store, call):
                self._note(call, found)
                return Done(found)
        label = StageCall(planned.stage, {}, {}, None, planned.agent, planned.iteration, planned.variant).label
        waits = [handle.future for handle in planned.inputs.values() if isinstance(handle, Running)]
        run_one = stage_task.with_options(
            name=planned.stage,
            task_run_name=label,
            retries=self._retries,
            retry_delay_seconds=[0.5 * 2**attempt for attempt in range(self._retries)] or None,
            retry_condition_fn=_worker_died,
        )
        future = run_one.submit(partial(self._perform, planned), wait_for=waits)
        self._futures.append(future)
        return Running(future)

    def iteration_done(self, iteration: int) -> None:
        self._futures = [future for future in self._futures if not self._settled(future)]
        self.observers.iteration(iteration)

    def finish(self) -> None:
        """Wait for what nobody else waits for: the last evaluations."""
        for future in self._futures:
            future.result()
        self._futures.clear()

    def first_failure(self) -> HacrlError | None:
        """What went wrong first: a stage below a failed one never starts, and only says that it did not."""
        for future in self._futures:
            if future.state.is_failed():
                try:
                    future.result()
                except Exception as problem:
                    known = first_error(problem)
                    if known is not None and not isinstance(known, Stopped):
                        return known
        return None

    def _perform(self, planned: Planned) -> Outcome:
        """Inside a task: resolve the inputs, run the stage where it belongs, tell everybody."""
        call = bind(planned)
        if found := lookup(self.store, call):
            self._note(call, found)
            return found
        self.observers.started(call, self.record.why(self.store, call))
        outcome = self._run(call)
        self._note(call, outcome)
        return outcome

    def _run(self, call: StageCall) -> Outcome:
        if call.stage in LIGHT:
            return run_stage(
                self.store, call, self._context, lambda holder: self.observers.events.waiting(call, holder)
            )
        return self._workers[call.agent].run(call, self.observers.events)

    def _note(self, call: StageCall, outcome: Outcome) -> None:
        self.record.add(call, outcome)
        self.observers.finished(call, outcome)

    def _settled(self, future: PrefectFuture[Outcome]) -> bool:
        if not future.state.is_final():
            return False
        future.result()  # raises what the stage raised
        return True


@task(persist_result=False, cache_policy=NO_CACHE)
def stage_task(perform: Callable[[], Outcome]) -> Outcome:
    return perform()


def _worker_died(task: Any, run: Any, state: Any) -> bool:
    """Retry what a new process may mend; an error in the data or the config stays an error."""
    try:
        state.result()
    except WorkerDied:
        return True
    except Exception:
        return False
    return False


def first_error(problem: BaseException) -> HacrlError | None:
    """The project's own error inside whatever Prefect wrapped around it."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, HacrlError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
