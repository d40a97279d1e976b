"""Executes the stages that a campaign still needs: as a Prefect flow where Prefect answers, in plain threads where it does not."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from flows.campaign import run_campaign
from flows.home import Home
from flows.record.log import FAILED
from flows.record.record import read_entries
from flows.run.divergence import Watch
from flows.run.executors import Worker, stop_workers
from flows.run.launch import Session, open_session, tracking
from flows.run.placement import Placement, turns_of
from flows.run.replay import Observers, joined
from flows.run.runner import PlainRunner, StageRunner, first_error
from flows.run.signals import heed_signals
from flows.scheduling.api import forget_events, prefect_api
from flows.store.collect import collector
from flows.tracking.feed import Tracker
from hacrl_core.artifacts.disk import disk_full, is_disk_full
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.errors import HacrlError, StageError


def execute(config: CampaignConfig, home: Home, console: Console) -> tuple[int, int]:
    """Run or resume; returns how many stages ran and how many were there already."""

    def warn(message: str) -> None:
        console.print(f"[yellow]![/yellow] {message}", highlight=False, soft_wrap=True)

    begun = time.time()
    with prefect_api(home, warn) as server:
        if server is None:
            return run_session(config, home, PlainRunner)
        from flows.run.flow import campaign_flow  # Prefect takes seconds to import; a cached campaign does without

        try:
            return campaign_flow(config.model_dump(mode="json"), str(home.root))
        except HacrlError:
            raise
        except Exception:
            if server.answers():
                raise
        finally:
            if not server.answers():
                forget_events()
        if not server.died:
            warn("Prefect's server is gone; the campaign goes on without it, and nothing is lost")
        _, found = run_session(config, home, PlainRunner)  # goes on where the flow was, often at its end
    ran = sum(not entry.cached and entry.at >= begun for entry in read_entries(home.campaign(config.name)))
    return ran, found - ran


def run_session(config: CampaignConfig, home: Home, runner: type[StageRunner]) -> tuple[int, int]:
    try:
        with (
            heed_signals(),
            open_session(config, home, Console()) as session,
            _logged(session),
            tracking(session) as tracker,
            session.display,
        ):
            return _run(session, tracker, runner)
    except Exception as problem:
        if is_disk_full(problem) and not isinstance(problem, HacrlError):
            raise StageError(f"campaign {config.name}: {disk_full(home.root)}") from problem
        raise


def _run(session: Session, tracker: Tracker | None, kind: type[StageRunner]) -> tuple[int, int]:
    config = session.config
    shown = joined(session.display.observers(), session.log.observers())
    observers = joined(shown, _after_iterations(session, tracker, shown.events.warn))
    turns = turns_of(config)
    workers = {
        name: Worker(
            name,
            session.home.store,
            threads=config.runtime.threads_per_agent,
            output=observers.events.output,
            place=Placement(agent.device, agent.gpus, agent.attention),
            turn=turns.get(name),
        )
        for name, agent in config.agents.items()
    }
    watch = Watch(config.divergence, observers.events.warn)
    runner = kind(session.store, session.record, workers, config.runtime.retries, observers, watch)
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
        stop_workers(workers.values(), now=not complete)
    if tracker is not None:
        tracker.log(session.record.entries_since_last_call())
        tracker.mark_complete(session.record.entries())
    return session.display.counts()


def _after_iterations(session: Session, tracker: Tracker | None, warn: Callable[[str], None]) -> Observers:
    """After each iteration, what finished since the last one goes to MLflow in one batch per run, and old versions go as the policy says."""
    collect = collector(session.home, session.store, session.record, warn)

    def iteration_done(iteration: int) -> None:
        if tracker is not None:
            tracker.log(session.record.entries_since_last_call())
        collect(iteration)

    return Observers(iteration=iteration_done)


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
        session.log.write("end", f"{FAILED} after {time.monotonic() - begun:.1f} s")
        raise
    except BaseException:
        session.log.write("end", f"stopped from outside after {time.monotonic() - begun:.1f} s")
        raise
    ran, cached = session.display.counts()
    session.log.write("end", f"complete: {ran} stages ran, {cached} from the store, {time.monotonic() - begun:.1f} s")
