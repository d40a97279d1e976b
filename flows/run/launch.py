"""Runs a campaign: from the store alone where everything is there, else as a Prefect flow."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from flows.campaign import run_campaign
from flows.home import Home
from flows.record.history import History
from flows.record.log import Logbook
from flows.record.record import Entry, Record, read_entries
from flows.run.replay import CacheMiss, Replay
from flows.stage_calls import Calls
from flows.tracking.feed import Tracker
from flows.tracking.projection import Projection, quiet_environment, tracking_uri
from flows.views.live import Display
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.problems import load_problems
from stages.runner import remove_leftovers


@dataclass(frozen=True)
class Summary:
    """What a finished campaign leaves behind, for whoever shows it."""

    config: CampaignConfig
    home: Home
    entries: list[Entry]
    ran: int
    cached: int
    seconds: float
    picture: Path | None
    tracking_uri: str | None


@dataclass(frozen=True)
class Session:
    """A campaign's open files: its store, its record, its wiring. The record's lock keeps a second run of it out."""

    config: CampaignConfig
    home: Home
    store: Store
    calls: Calls
    record: Record
    display: Display
    log: Logbook


# What this process has checked already, by store. A launch opens up to three sessions; digests are checked in the first.
_verified: dict[Path, set[str]] = {}


def launch(config: CampaignConfig, home: Home, console: Console) -> Summary:
    """Run or resume; returns when the campaign is complete. Raises HacrlError with one line for the user."""
    try:
        return _launch(config, home, console)
    except KeyboardInterrupt as stop:
        stop.add_note(what_is_saved(config, home))
        raise


def _launch(config: CampaignConfig, home: Home, console: Console) -> Summary:
    quiet_environment()
    begun = time.monotonic()
    with open_session(config, home, console) as session:
        complete = replay(session)
        if complete:
            summary = _summary(session, begun)
            session.log.write(
                "run", f"{config.name}: all {summary.cached} stages were in the store, nothing had to run"
            )
            return summary
        _tell_need(session, console)
    from flows.run.session import execute

    console.print("starting Prefect …", style="dim")
    ran, cached = execute(config, home, console)
    return conclude(config, home, console, ran, cached, begun)


def _tell_need(session: Session, console: Console) -> None:
    from flows.store.space import tell_need

    need, warning = tell_need(session.config, session.home, session.store, session.record.entries(), session.calls)
    console.print(need, style="dim", highlight=False, soft_wrap=True)
    if warning is not None:
        session.display.warn(warning)


def conclude(config: CampaignConfig, home: Home, console: Console, ran: int, cached: int, begun: float) -> Summary:
    """After the flow: the whole campaign once more from the store, for the picture and for what MLflow may have missed."""
    with open_session(config, home, console) as session:
        replay(session)
        summary = _summary(session, begun)
    return replace(summary, ran=ran, cached=cached, seconds=time.monotonic() - begun)


@contextmanager
def open_session(config: CampaignConfig, home: Home, console: Console) -> Iterator[Session]:
    calls = Calls(config, load_problems(config.problems).content_digest)
    with Record(home.campaign(config.name), config) as record, closing(Logbook(record.folder)) as log:
        display = Display(console, config, log.warn)
        store = Store(home.store, on_problem=display.warn, verified=_verified.setdefault(home.store, set()))
        remove_leftovers(store)
        yield Session(config, home, store, calls, record, display, log)


def replay(session: Session) -> bool:
    """Walk the campaign through the store; False at the first stage that has to run."""
    try:
        run_campaign(session.config, session.calls, Replay(session.store, session.record))
    except CacheMiss:
        return False
    return True


@contextmanager
def tracking(session: Session) -> Iterator[Tracker | None]:
    """MLflow in a thread of its own while the campaign runs; its runs end as the campaign ends."""
    settings = session.config.tracking
    if not settings.enabled:
        yield None
        return
    uri = tracking_uri(session.config, session.home)
    tracker = Tracker(
        lambda: Projection(session.config, session.store, uri, session.home),
        session.display.warn,
        settings.patience_seconds,
        uri,
    )
    status = "KILLED"
    try:
        yield tracker
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        tracker.close(status)


def what_is_saved(config: CampaignConfig, home: Home) -> str:
    """For whoever stopped a campaign: how far it came."""
    entries = read_entries(home.campaign(config.name))
    updated = {(entry.agent, entry.iteration) for entry in entries if entry.stage == "update"}
    done = 0
    while done < config.iterations and all((agent, done) in updated for agent in config.present(done)):
        done += 1
    return (
        f"campaign {config.name} has {done} of {config.iterations} iterations and {len(entries)} finished stages saved, "
        "and what stages under way had finished in shards"
    )


def draw(session: Session) -> Path | None:
    """The learning curves; those of last time where nothing has happened since."""
    from flows.report.charts import LEARNING_CURVES, draw_learning_curves

    drawn, record = session.record.folder / LEARNING_CURVES, session.record.folder / "stages.jsonl"
    if drawn.exists() and drawn.stat().st_mtime >= record.stat().st_mtime:
        return drawn
    history = History(session.config, session.store, session.record.entries())
    return draw_learning_curves(history, session.record.folder)


def _summary(session: Session, begun: float) -> Summary:
    picture = draw(session)
    with tracking(session) as tracker:
        if tracker is not None:
            tracker.replay(session.record.entries())
    uri = tracking_uri(session.config, session.home) if session.config.tracking.enabled else None
    entries = session.record.entries()
    return Summary(session.config, session.home, entries, 0, len(entries), time.monotonic() - begun, picture, uri)
