"""A sweep as one Prefect flow: a task for each cell and for each agent's first version. Imported only when something has to run."""

from collections.abc import Callable, Sequence

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ThreadPoolTaskRunner

from flows.sweeping.jobs import Job, Tally
from hacrl_core.errors import HacrlError


def run_flow(name: str, jobs: Sequence[Job], perform: Callable[[Job], Tally], concurrency: int) -> None:
    """Tasks start in the order of the jobs, ``concurrency`` at a time. One that fails is shown as failed; the others go on."""

    @task(persist_result=False, cache_policy=NO_CACHE)
    def cell(number: int) -> Tally:
        return perform(jobs[number])

    @flow(
        name="sweep",
        flow_run_name=f"{name} ({len(jobs)} jobs)",
        task_runner=ThreadPoolTaskRunner(max_workers=concurrency),
        persist_result=False,
    )
    def sweep(jobs_in_all: int) -> None:
        futures = [cell.with_options(task_run_name=job.label).submit(n) for n, job in enumerate(jobs)]
        for future in futures:
            future.wait()
        failed = sum(future.state.is_failed() for future in futures)
        if failed:
            raise _SomeFailed(f"{failed} of {jobs_in_all} jobs failed")

    try:
        sweep(len(jobs))
    except _SomeFailed:
        return  # perform has kept which ones, and why


class _SomeFailed(HacrlError):
    pass
