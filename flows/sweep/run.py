"""Runs a sweep: plan, then cells side by side in long-lived processes, then the report.

Whatever is finished is not run again.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flows.home import Home
from flows.record.record import read_entries
from flows.run.events import Listener
from flows.run.placement import Placement
from flows.run.worker import Stopped, Worker
from flows.scheduling.api import prefect_api
from flows.store.bucket import uploading
from flows.sweep.cells import Job, Tally, finished_entries, mark_failed, order_jobs
from flows.sweep.plan import Plan, make_plan
from flows.sweep.report import SweepReport, make_report
from flows.sweep.written import write_report
from flows.tracking.sweep import SweepTracker
from flows.views.text import clock
from hacrl_core.artifacts import open_store
from hacrl_core.artifacts.locks import holder, try_exclusive
from hacrl_core.artifacts.opening import use_bucket
from hacrl_core.config.sweep import Cell, Sweep
from hacrl_core.errors import ConfigError, HacrlError, ProcessDiedError


@dataclass(frozen=True)
class Work:
    """The jobs of a sweep. A scheduler calls ``perform`` for each job, and ``abort`` when it is told to stop."""

    name: str
    jobs: Sequence[Job]
    concurrency: int
    perform: Callable[[Job], Tally]
    abort: Callable[[], None]


Execute = Callable[[Work, Home], None]
# So often a sweep says how far its jobs are.
REPORT_SECONDS = 30.0


@dataclass
class Outcome:
    """The result of running a sweep."""

    plan: Plan
    tally: Tally = field(default_factory=Tally)
    failures: dict[str, HacrlError] = field(default_factory=dict)  # label of the cell → why
    report: SweepReport | None = None


def sweep_folder(sweep: Sweep, home: Home) -> Path:
    return home.root / "sweeps" / sweep.config.name


def plan_sweep(sweep: Sweep, home: Home) -> tuple[Plan, list[Cell]]:
    """Return the plan, and the cells that are not finished."""
    use_bucket(home.store, sweep.cells[0].config.store)
    open_ = [c for c in sweep.cells if finished_entries(_job(c, home), home.store) is None]
    return make_plan(open_store(home.store), open_, finished=len(sweep.cells) - len(open_)), open_


def run_sweep(
    sweep: Sweep, home: Home, console: Console, execute: Execute | None = None, pool: "Pool | None" = None
) -> Outcome:
    """Run or resume a sweep. A cell that fails does not stop the others; the outcome names it."""
    with _alone(sweep, home), SweepTracker(sweep, home, lambda message: warn(console, message)) as tracker:
        plan, todo = plan_sweep(sweep, home)
        show_plan(console, sweep, plan)
        outcome = Outcome(plan)
        store = open_store(home.store, lambda message: warn(console, message))
        store.remove_stale_staging()
        for cell in sweep.cells:
            if cell not in todo:
                tracker.replay(cell)
        if todo:
            pool = pool or Pool(sweep.config.concurrency, home.store)
            with uploading(store, lambda message: warn(console, message), home):
                _run(sweep, home, console, todo, outcome, tracker, execute or execute_with_prefect, pool)
        outcome.report = make_report(sweep, home.root)
        files = write_report(outcome.report, sweep_folder(sweep, home))
        tracker.summarise(outcome.report.metrics(), files, outcome.report.finished_at)
    return outcome


def _run(
    sweep: Sweep,
    home: Home,
    console: Console,
    todo: Sequence[Cell],
    outcome: Outcome,
    tracker: SweepTracker,
    execute: Execute,
    pool: "Pool",
) -> None:
    jobs = order_jobs(todo, home.campaigns, sweep.config.concurrency)
    performer = _Performer(console, todo, outcome, tracker, pool)
    work = Work(sweep.config.name, jobs, sweep.config.concurrency, performer.perform, lambda: pool.stop(now=True))
    complete = False
    if execute is execute_with_prefect:
        console.print("starting Prefect …")
    try:
        with performer:
            execute(work, home)
        complete = True
    finally:
        pool.stop(now=not complete)
    for cell in todo:
        if cell.label not in outcome.failures and finished_entries(_job(cell, home), home.store) is None:
            outcome.failures[cell.label] = HacrlError("ended without a result; the same command again runs it")


class _Performer:
    """Has the pool run jobs, adds up what they did, and shows each finished cell. Used from several threads."""

    def __init__(
        self, console: Console, todo: Sequence[Cell], outcome: Outcome, tracker: SweepTracker, pool: "Pool"
    ) -> None:
        self._console = console
        self._cells = {cell.label: cell for cell in todo}
        self._outcome = outcome
        self._tracker = tracker
        self._pool = pool
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._done = 0
        self._running: dict[str, Job] = {}
        self._ended = threading.Event()

    def __enter__(self) -> "_Performer":
        """Say from time to time how far the jobs under way are."""
        threading.Thread(target=self._report, name="sweep progress", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _report(self) -> None:
        while not self._ended.wait(REPORT_SECONDS):
            with self._lock:
                jobs = list(self._running.values())
            if jobs:
                self._say("under way: " + "; ".join(f"{job.title}{how_far(job)}" for job in jobs))

    def _say(self, message: str) -> None:
        self._console.print(Text(message, style="dim"), soft_wrap=True)

    def perform(self, job: Job) -> Tally:
        """Run one job; an error is kept in the outcome and raised."""
        self._say(f"{job.title} starts")
        with self._lock:
            self._running[job.label] = job
        try:
            tally = self._pool.run(job, _Warnings(self._console), retries=job.config.runtime.retries)
        except Stopped:
            raise
        except HacrlError as problem:
            with self._lock:
                self._outcome.failures[job.label] = problem
            if job.origin is None:
                mark_failed(job, str(problem))
            warn(self._console, f"{job.label}: {problem}")
            raise
        finally:
            with self._lock:
                self._running.pop(job.label, None)
        with self._lock:
            self._outcome.tally += tally
            # A job that failed may have been tried again without Prefect.
            self._outcome.failures.pop(job.label, None)
            self._done += job.origin is None
        if job.origin is None:
            self._show(job, tally)
        return tally

    def _show(self, job: Job, tally: Tally) -> None:
        self._tracker.replay(self._cells[job.label])
        total = len(self._cells)
        left = (time.monotonic() - self._begun) / max(self._done, 1) * (total - self._done)
        self._console.print(
            f"cell {self._done}/{total}  {job.label}  {tally.ran} stages ran, {tally.cached} shared  "
            f"{tally.seconds:.0f} s  about {clock(left)} left",
            highlight=False,
            soft_wrap=True,
        )


def how_far(job: Job) -> str:
    """Say how many iterations of a cell are done, by its record; nothing for a first version."""
    if job.origin is not None:
        return ""
    done = [entry.iteration for entry in read_entries(job.folder) if entry.stage == "update"]
    return f", iteration {max((i for i in done if i is not None), default=-1) + 1}/{job.config.iterations}"


class _Warnings(Listener):
    """Prints what the jobs warn of."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def warn(self, message: str) -> None:
        warn(self._console, message)


class Pool:
    """Long-lived worker processes; each takes one job at a time and keeps engines and tokenizers warm in between."""

    def __init__(self, size: int, store_root: Path) -> None:
        self._workers = [Worker(f"sweep-{n}", store_root, Placement()) for n in range(size)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def run(self, job: Job, listener: Listener, retries: int) -> Tally:
        worker = self._idle.get()
        try:
            for attempt in range(retries + 1):
                try:
                    tally: Tally = worker.run(job, listener)
                    return tally
                except (
                    ProcessDiedError
                ) as problem:  # killed, or out of memory: a new process takes the job up where it was
                    if attempt == retries:
                        raise
                    listener.warn(f"{problem}; trying again")
            raise AssertionError("unreachable")
        finally:
            self._idle.put(worker)

    def stop(self, *, now: bool) -> None:
        for worker in self._workers:
            worker.stop(now=now)


def execute_with_prefect(work: Work, home: Home) -> None:
    """Run the sweep as one Prefect flow, a task for each job, as many at a time as the sweep says."""
    with prefect_api(home) as server:
        if server is None:
            execute_with_threads(work, home)
            return
        try:
            _run_as_flow(work)
            return
        except HacrlError:
            raise
        except Exception:
            if server.answers():
                raise
    execute_with_threads(work, home)  # Prefect's server is gone; finished cells are found in the store


def _run_as_flow(work: Work) -> None:
    """Run the jobs as tasks of one flow, in their order, ``concurrency`` at a time.

    A job that fails is shown as failed, and the others go on.
    """
    # Prefect takes seconds to import; a sweep that is complete does without it.
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.task_runners import ThreadPoolTaskRunner

    @task(persist_result=False, cache_policy=NO_CACHE)
    def cell(number: int) -> Tally:
        return work.perform(work.jobs[number])

    @flow(
        name="sweep",
        flow_run_name=f"{work.name} ({len(work.jobs)} jobs)",
        # Prefect's types disagree: the runner's kind of future is not the decorator's.
        task_runner=ThreadPoolTaskRunner(max_workers=work.concurrency),  # type: ignore[arg-type]
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
            # Ctrl-C or SIGTERM: Prefect would wait for the cells under way, and for all that are still to come.
            work.abort()
            raise
        failed = sum(future.state.is_failed() for future in futures)
        if failed:
            raise _SomeFailed(f"{failed} of {jobs} jobs failed")

    with suppress(_SomeFailed):  # ``perform`` has kept which ones, and why
        sweep(len(work.jobs))


class _SomeFailed(HacrlError):
    """Marks the flow run as failed in Prefect."""


def execute_with_threads(work: Work, home: Home) -> None:
    """Run the jobs in threads, where there is no Prefect server."""
    with ThreadPoolExecutor(work.concurrency) as threads:
        try:
            for future in [threads.submit(work.perform, job) for job in work.jobs]:
                try:
                    future.result()
                except HacrlError:
                    continue  # noted by perform; the others go on
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            work.abort()
            raise


def show_plan(console: Console, sweep: Sweep, plan: Plan) -> None:
    variants, seeds = len(sweep.variants), len(sweep.config.seeds)
    lines = [
        f"sweep {sweep.config.name}: {variants} variants × {seeds} seeds = {plan.cells} cells, {plan.finished} "
        "finished",
        f"  stages    {plan.calls:>10,} in unfinished cells: {plan.to_run:,} to run, {plan.shared:,} shared between "
        "cells, "
        f"{plan.stored:,} in the store",
        f"  rollouts  {plan.rollouts:>10,} in unfinished cells: {plan.rollouts_to_run:,} to sample, "
        f"{plan.rollouts_shared:,} shared, "
        f"{plan.rollouts_stored:,} in the store",
    ]
    if plan.rollouts_again:
        lines.append(f"  of those to sample, {plan.rollouts_again:,} at the most: only for prompts without signal")
    if plan.to_run:
        kinds = ", ".join(f"{count:,} {stage}" for stage, count in sorted(plan.to_run_by_stage.items()))
        lines.append(f"  to run: {kinds}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def show_outcome(console: Console, outcome: Outcome) -> None:
    plan, tally = outcome.plan, outcome.tally
    console.print(
        f"{tally.ran:,} stages ran ({plan.to_run:,} planned), {tally.cached:,} were shared or in the store; "
        f"{tally.rollouts_sampled:,} rollouts of {tally.tokens_sampled:,} tokens sampled ({plan.rollouts_to_run:,} "
        f"rollouts planned{' at the most' if plan.rollouts_again else ''}); "
        f"{clock(tally.seconds)} of work",
        highlight=False,
        soft_wrap=True,
    )
    for label, problem in outcome.failures.items():
        warn(console, f"failed: {label}: {problem}")


def warn(console: Console, message: str) -> None:
    console.print(Text.assemble(("! ", "yellow"), message), soft_wrap=True)


def _job(cell: Cell, home: Home) -> Job:
    return Job(cell.config, home.campaign(cell.label))


@contextmanager
def _alone(sweep: Sweep, home: Home) -> Iterator[None]:
    path = sweep_folder(sweep, home) / "running.lock"
    handle = try_exclusive(path, patience=1.0)  # others only look, for a moment
    if handle is None:
        raise ConfigError(
            f"sweep {sweep.config.name}: already running ({holder(path)}); wait for it, or rename this one"
        )
    try:
        yield
    finally:
        os.close(handle)
