"""The campaign as a Prefect flow: one flow per campaign, a task per stage that has to run."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

from flows.campaign import run_campaign
from flows.home import Home
from flows.launch import Session, open_session, tracking
from flows.replay import Observers, joined
from flows.slots import held_slots
from flows.tasks import PrefectRunner, first_error
from flows.tracking import Tracker
from flows.workers import Worker
from hacrl_core.config.campaign import CampaignConfig


def _run_name() -> str:
    from prefect.runtime import flow_run

    config = flow_run.parameters["config"]
    return f"{config['name']} ({config['iterations']} iterations)"


# Tasks wait for their inputs in their threads, and are submitted inputs first: with enough threads none can starve another.
@flow(name="campaign", flow_run_name=_run_name, task_runner=ThreadPoolTaskRunner(max_workers=256), persist_result=False)
def campaign_flow(config: dict[str, Any], home: str) -> tuple[int, int]:
    """Run or resume a campaign; returns how many stages ran and how many were there already."""
    campaign = CampaignConfig.model_validate(config)
    console = Console()
    with (
        held_slots(campaign, lambda message: console.print(message, markup=False)),
        open_session(campaign, Home(Path(home)), console) as session,
        _logged(session),
        tracking(session) as tracker,
        session.display,
    ):
        return _execute(session, tracker)


def _execute(session: Session, tracker: Tracker | None) -> tuple[int, int]:
    config = session.config
    observers = joined(session.display.observers(), session.log.observers(), _tracking(session, tracker))
    workers = {
        name: Worker(
            name,
            session.home.store,
            threads=config.runtime.threads_per_agent,
            device=agent.device,
            output=observers.events.output,
        )
        for name, agent in config.agents.items()
    }
    runner = PrefectRunner(session.store, session.record, workers, config.runtime.retries, observers)
    complete = False
    try:
        run_campaign(config, session.calls, runner)
        runner.finish()
        complete = True
    except Exception as problem:
        known = runner.first_failure() or first_error(problem)
        if known is not None and known is not problem:
            raise known from problem
        raise
    finally:
        for worker in workers.values():
            worker.stop(now=not complete)
    if tracker is not None:
        tracker.log(session.record.entries_since_last_call())
        tracker.mark_complete(session.record.entries())
    return session.display.counts()


def _tracking(session: Session, tracker: Tracker | None) -> Observers:
    """After each iteration, what finished since the last one goes to MLflow in one batch per run."""
    if tracker is None:
        return Observers()
    return Observers(iteration=lambda number: tracker.log(session.record.entries_since_last_call()))


@contextmanager
def _logged(session: Session) -> Iterator[None]:
    """The run's first and last line in the campaign's log."""
    config, begun = session.config, time.monotonic()
    agents = ", ".join(config.agents)
    session.log.write("run", f"{config.name}: to iteration {config.iterations}, agents {agents}, process {os.getpid()}")
    try:
        yield
    except Exception as problem:
        session.log.write("error", str(first_error(problem) or f"{type(problem).__name__}: {problem}"))
        session.log.write("end", f"failed after {time.monotonic() - begun:.1f} s")
        raise
    except BaseException:
        session.log.write("end", f"stopped from outside after {time.monotonic() - begun:.1f} s")
        raise
    ran, cached = session.display.counts()
    session.log.write("end", f"complete: {ran} stages ran, {cached} from the store, {time.monotonic() - begun:.1f} s")
