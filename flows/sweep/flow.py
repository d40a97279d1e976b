"""A sweep as one Prefect flow: a task for each cell and for each agent's first version. Imported only when something has to run."""

from typing import TYPE_CHECKING

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ThreadPoolTaskRunner

from flows.sweep.cells import Tally
from hacrl_core.errors import HacrlError

if TYPE_CHECKING:
    from flows.sweep.run import Work


def run_flow(work: "Work") -> None:
    """Tasks start in the order of the jobs, ``concurrency`` at a time. One that fails is shown as failed; the others go on."""

    @task(persist_result=False, cache_policy=NO_CACHE)
    def cell(number: int) -> Tally:
        return work.perform(work.jobs[number])

    @flow(
        name="sweep",
        flow_run_name=f"{work.name} ({len(work.jobs)} jobs)",
        task_runner=ThreadPoolTaskRunner(max_workers=work.concurrency),
        persist_result=False,
    )
    def sweep(jobs: int) -> None:
        futures = [cell.with_options(task_run_name=job.label).submit(n) for n, job in enumerate(work.jobs)]
        try:
            for future in futures:
                future.wait()
        except Exception:
            raise
        except BaseException:
            work.abort()  # Ctrl-C or SIGTERM: Prefect would wait for the cells under way, and for all that are still to come
            raise
        failed = sum(future.state.is_failed() for future in futures)
        if failed:
            raise _SomeFailed(f"{failed} of {jobs} jobs failed")

    try:
        sweep(len(work.jobs))
    except _SomeFailed:
        return  # perform has kept which ones, and why


class _SomeFailed(HacrlError):
    pass
