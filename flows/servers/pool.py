"""The work pool in Prefect that scheduled campaigns go through, and what a dead worker left in it."""

import contextlib
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType, WorkerStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError
from prefect.states import Crashed
from prefect.workers.process import ProcessWorker

# With a command of its own a campaign is one process below the worker. Prefect's default puts a process in between that loads
# code from storage; ours is installed.
COMMAND = "python -m prefect.engine"


def ensure_pool(name: str) -> None:
    template = job_template()
    with get_client(sync_client=True) as client, contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))


def job_template() -> dict[str, Any]:
    template: dict[str, Any] = ProcessWorker.get_default_base_job_template()
    template["variables"]["properties"]["command"]["default"] = COMMAND
    return template


def end_lost_runs(pool: str, worker: str) -> int:
    """Before a worker takes up work: runs that its predecessor left are no longer running, and would say so for ever.

    Where another worker serves the same pool, runs may be its own: nothing is touched.
    """
    states = FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING])
    with get_client(sync_client=True) as client:
        others = client.read_workers_for_work_pool(pool, limit=200, offset=0)
        if any(other.name != worker and other.status == WorkerStatus.ONLINE for other in others):
            return 0
        lost = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=states)),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
            sort=FlowRunSort.START_TIME_ASC,  # the API refuses what the client leaves out
            limit=200,
        )
        for run in lost:
            message = "the worker ended while this ran; the next run goes on where it was"
            try:
                client.set_flow_run_state(run.id, Crashed(message=message), force=True)
            except (
                PrefectHTTPStatusError
            ) as problem:  # a run that cannot be ended must not keep the worker from its work
                print(f"run {run.name} cannot be marked as crashed: {str(problem).splitlines()[0]}", flush=True)
    return len(lost)
