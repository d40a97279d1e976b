"""The campaign as a Prefect flow: one flow per campaign, a task per stage that has to run."""

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

from flows.campaign import run_campaign
from flows.home import Home
from flows.launch import Session, open_session, tracking
from flows.replay import Observers
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
    with open_session(campaign, Home(Path(home)), Console()) as session, tracking(session) as tracker, session.display:
        return _execute(session, tracker)


def _execute(session: Session, tracker: Tracker | None) -> tuple[int, int]:
    config = session.config
    workers = {
        name: Worker(name, session.home.store, threads=config.runtime.threads_per_agent, device=agent.device)
        for name, agent in config.agents.items()
    }
    observers = session.display.observers()
    runner = PrefectRunner(
        session.store, session.record, workers, config.runtime.retries, _tracked(observers, session, tracker)
    )
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


def _tracked(observers: Observers, session: Session, tracker: Tracker | None) -> Observers:
    """After each iteration, what finished since the last one goes to MLflow in one batch per run."""

    def iteration_done(iteration: int) -> None:
        observers.iteration(iteration)
        if tracker is not None:
            tracker.log(session.record.entries_since_last_call())

    return Observers(observers.started, observers.finished, iteration_done, observers.events)
