"""Stages as Prefect tasks. Tasks pass references, never data; a call whose artifact exists needs none: looking up costs a millisecond, a
task run twenty."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture

from flows.calls import Planned
from flows.running import StageRunner
from flows.workers import WorkerDied
from stages.runner import Outcome
from stages.spec import StageCall


@dataclass(frozen=True)
class Running:
    future: PrefectFuture[Outcome]
    planned: Planned

    def outcome(self) -> Outcome:
        return self.future.result()

    def done(self) -> bool:
        return self.future.state.is_final()

    def failed(self) -> bool:
        return self.future.state.is_failed()


class PrefectRunner(StageRunner):
    """Submits stages as tasks of the flow it is used in."""

    def _schedule(self, planned: Planned) -> Running:
        label = StageCall(planned.stage, {}, {}, None, planned.agent, planned.iteration, planned.variant).label
        waits = [handle.future for handle in planned.inputs.values() if isinstance(handle, Running)]
        run_one = stage_task.with_options(
            name=planned.stage,
            task_run_name=label,
            retries=self._retries,
            retry_delay_seconds=[0.5 * 2**attempt for attempt in range(self._retries)] or None,
            retry_condition_fn=_worker_died,
        )
        return Running(run_one.submit(partial(self.perform, planned), wait_for=waits), planned)


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
