"""Runs a campaign: from the store alone where everything is there, else as a Prefect flow, or in threads where Prefect
is away.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from flows.campaign import run_campaign
from flows.exchange.session import Exchange, Outbox, PartyExecutor, open_exchange
from flows.home import Home
from flows.record.history import History, history_of_run
from flows.record.log import FAILED, Logbook
from flows.record.record import ORIGINS, Record, read_entries
from flows.run.counts import Counter, Counts
from flows.run.divergence import Watch
from flows.run.events import Listener, Listeners
from flows.run.executors import Executor
from flows.run.notices import Notifier
from flows.run.opening import OpenExecutor, open_executor, start_early
from flows.run.profile import Tracer
from flows.run.runner import CacheMiss, Replay, StageRunner, ThreadRunner, first_error
from flows.run.session import ALL_AGENTS, run_in_session
from flows.run.signals import raise_on_signals
from flows.scheduling.api import forget_events, prefect_api
from flows.stage_calls import StageCalls
from flows.store.bucket import uploading
from flows.store.running import collector
from flows.tracking.feed import Tracker
from flows.tracking.projection import Projection, quiet_environment, tracking_uri
from flows.tracking.system import SystemSampler
from flows.views.live import Display
from hacrl_core.artifacts import Store, open_store
from hacrl_core.artifacts.disk import disk_full, is_disk_full
from hacrl_core.artifacts.opening import use_bucket
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.errors import ConfigError, HacrlError, StageError
from stages.runner import remove_leftovers

# So many iterations say whether a campaign can learn at all; the first findings are told, hacrl diagnose has the rest.
DIAGNOSED_AFTER = 3
WARNED_OF = 2


@dataclass(frozen=True)
class Summary:
    """What a finished campaign leaves behind, for whoever shows it."""

    home: Home
    history: History
    ran: int
    cached: int
    seconds: float
    picture: Path | None
    tracking_uri: str | None


@dataclass(frozen=True)
class OpenCampaign:
    """A campaign's open files: its store, record, log and display. The record's lock keeps a second run of it out."""

    config: CampaignConfig
    home: Home
    store: Store
    calls: StageCalls
    record: Record
    display: Display
    log: Logbook
    notifier: Notifier
    exchange: Exchange | None = None  # where the campaign has several parties and this process is one of them
    # The terminal and the log count from here.
    begun: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Return how long the campaign has been open."""
        return time.monotonic() - self.begun


def launch(config: CampaignConfig, home: Home, console: Console) -> Summary:
    """Run or resume a campaign and return when it is complete. Raises HacrlError with one line for the user."""
    quiet_environment()
    try:
        with open_campaign(config, home, console) as campaign:
            if replay(campaign):
                count = len(campaign.record.entries())
                campaign.log.write("run", f"{config.name}: all {count} stages were in the store, nothing had to run")
                return conclude(campaign, Counts(0, count, campaign.seconds()))
            _refuse_faults(campaign)
            _show_disk_estimate(campaign)
            console.print("starting Prefect …", style="dim")
            return conclude(campaign, execute(campaign))
    except KeyboardInterrupt as stop:
        stop.add_note(what_is_saved(config, home))
        raise


@contextmanager
def open_campaign(config: CampaignConfig, home: Home, console: Console) -> Iterator[OpenCampaign]:
    """Open a campaign's files for a run, and remove what killed processes left in the store."""
    calls = StageCalls(config)
    use_bucket(home.store, config.store)
    with Record(home.campaign(config.name), config) as record, closing(Logbook(record.folder)) as log:
        display = Display(console, config, log.write_warning)
        store = open_store(home.store, on_problem=display.warn)
        remove_leftovers(store)
        with uploading(store, display.warn, home), Notifier(config, home, display.warn) as notifier:
            exchange = open_exchange(config, record.folder, store, display.warn)
            yield OpenCampaign(config, home, store, calls, record, display, log, notifier, exchange)


def replay(campaign: OpenCampaign) -> bool:
    """Walk the campaign through the store; False at the first stage that has to run."""
    campaign.record.begin_pass()
    replaying = Replay(campaign.store, campaign.record, Watch())
    try:
        if campaign.exchange is None:
            run_campaign(campaign.config, campaign.calls, replaying)
        else:
            known = campaign.exchange.party_run(campaign.store, campaign.record, local=True)
            run_campaign(campaign.config, campaign.calls, known.over(replaying), known)
    except CacheMiss:
        return False
    return True


def execute(campaign: OpenCampaign) -> Counts:
    """Run what is missing: as a Prefect flow where Prefect answers, in plain threads where it does not."""
    begun = time.time()
    shown = Listeners(campaign.display, campaign.log)
    # The config of a party names the agents of others, too, which run elsewhere.
    agents = campaign.config.agents if campaign.exchange is None else {}
    with (
        start_early(campaign.config, campaign.store, shown, agents) as open_early,
        prefect_api(campaign.home, campaign.display.warn) as server,
    ):
        if server is None:
            return run_stages(campaign, ThreadRunner, open_early)
        # Prefect takes seconds to import; a campaign that is complete does without it.
        from flows.run.prefect_runner import PrefectRunner, run_as_flow

        done: list[Counts] = []
        try:
            run_as_flow(
                campaign.config,
                campaign.home,
                lambda: done.append(run_stages(campaign, PrefectRunner, open_early)),
                campaign.display.say,
                shared=not server.temporary,
            )
            return done[0]
        except HacrlError:
            raise
        except Exception:
            if server.answers():
                raise
        finally:
            if not server.answers():
                forget_events()
        if not server.died:
            then = "is complete" if done else "goes on without it"
            campaign.display.warn(f"Prefect's server is gone; the campaign {then}, and nothing is lost")
        return done[0] if done else run_rest(campaign, begun, open_early)


def run_rest(campaign: OpenCampaign, begun: float, open_executor: OpenExecutor = open_executor) -> Counts:
    """Go on in threads after Prefect's server went away; the counts are those of both passes since ``begun``."""
    rest = run_stages(campaign, ThreadRunner, open_executor)
    ran = sum(not entry.cached and entry.at >= begun for entry in read_entries(campaign.record.folder))
    return Counts(ran, rest.ran + rest.cached - ran, rest.seconds)


def run_stages(campaign: OpenCampaign, kind: type[StageRunner], open_executor: OpenExecutor = open_executor) -> Counts:
    """Run the campaign's missing stages; by default each agent's in a process of its own."""
    counter = Counter()
    campaign.record.begin_pass()
    campaign.display.begin_pass()
    try:
        with (
            raise_on_signals(),
            _logged(campaign, counter),
            # Around what sends to MLflow: the last of it is a part of the trace.
            _profiled(campaign) as tracer,
            tracking(campaign) as tracker,
            _system_metrics(campaign),
            campaign.display,
        ):
            shown = Listeners(campaign.display, campaign.log)
            listener = Listeners(
                shown, counter, campaign.notifier, _AfterIteration(campaign, tracker, shown.warn), tracer
            )

            exchange, party = campaign.exchange, ALL_AGENTS
            if exchange is not None:
                listener = Listeners(listener, Outbox(exchange, campaign.store))
                party = exchange.party(campaign.store, campaign.record)

            def make_executor() -> Executor:
                made = open_executor(campaign.config, campaign.store, listener)
                return made if exchange is None else PartyExecutor(made, exchange)

            run_in_session(
                campaign.config, campaign.calls, campaign.store, campaign.record, make_executor, listener, kind, party
            )
            if tracker is not None:
                tracker.log(campaign.record.entries_since_last_call())
                tracker.mark_complete(
                    campaign.record.entries(), lambda: history_of_run(campaign.record, campaign.store)
                )
    except Exception as problem:
        if is_disk_full(problem) and not isinstance(problem, HacrlError):
            raise StageError(f"campaign {campaign.config.name}: {disk_full(campaign.home.root)}") from problem
        raise
    return counter.counts()


def conclude(campaign: OpenCampaign, counts: Counts) -> Summary:
    """Draw the learning curves and return the summary.

    Where no stage had to run, MLflow gets what it may have missed; a run that ran stages has told it already.
    """
    from flows.report.charts import current_learning_curves

    history = history_of_run(campaign.record, campaign.store)
    picture = current_learning_curves(history, campaign.record.folder)
    if counts.ran == 0:
        with tracking(campaign, history) as tracker:
            if tracker is not None:
                tracker.replay(campaign.record.entries())
    if counts.ran and campaign.config.notify is not None:
        campaign.notifier.complete(history)
    uri = tracking_uri(campaign.config, campaign.home) if campaign.config.tracking.enabled else None
    return Summary(campaign.home, history, counts.ran, counts.cached, counts.seconds, picture, uri)


@contextmanager
def tracking(campaign: OpenCampaign, so_far: History | None = None) -> Iterator[Tracker | None]:
    """Feed MLflow from a thread of its own while the campaign runs; its runs end as the campaign ends.

    ``so_far`` is the campaign's history, if it is known.
    """
    settings = campaign.config.tracking
    if not settings.enabled:
        yield None
        return
    uri = tracking_uri(campaign.config, campaign.home)
    tracker = Tracker(
        lambda: Projection(campaign.config, campaign.store, uri, campaign.home, so_far=so_far),
        campaign.display.warn,
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


def _system_metrics(campaign: OpenCampaign) -> AbstractContextManager[object]:
    """Record what the machine does while the campaign runs, where MLflow is to show it."""
    settings = campaign.config.tracking
    if not (settings.enabled and settings.system_metrics):
        return nullcontext()
    return SystemSampler(campaign.record.folder)


def what_is_saved(config: CampaignConfig, home: Home) -> str:
    """Say how far a campaign came, for the person who stopped it."""
    entries = read_entries(home.campaign(config.name))
    updated = {(entry.agent, entry.iteration) for entry in entries if entry.stage == "update"}
    done = 0
    while done < config.iterations and all(
        (agent, done) in updated for agent in filter(config.has_weights_of, config.present(done))
    ):
        done += 1
    return (
        f"campaign {config.name} has {done} of {config.iterations} iterations and {len(entries)} finished stages "
        "saved, "
        "and what stages under way had finished in shards"
    )


class _AfterIteration(Listener):
    """After each iteration, sends what has finished to MLflow and removes old versions by the keep policy.

    After the third one it looks for what keeps the campaign from learning.
    """

    def __init__(self, campaign: OpenCampaign, tracker: Tracker | None, warn: Callable[[str], None]) -> None:
        self._campaign, self._record, self._warn = campaign, campaign.record, warn
        self._tracker = tracker
        self._collect = collector(campaign.home, campaign.store, campaign.record, warn)

    def iteration_finished(self, iteration: int) -> None:
        if self._tracker is not None:
            self._tracker.log(self._record.entries_since_last_call())
        self._collect(iteration)
        if iteration + 1 == DIAGNOSED_AFTER:
            self._diagnose()

    def _diagnose(self) -> None:
        """Warn of what the rules of hacrl diagnose find; whatever goes wrong with them ends no campaign."""
        from flows.diagnose.diagnose import diagnose, in_one_line

        campaign = self._campaign
        try:
            found = diagnose(History(campaign.config, campaign.store, self._record.entries()))
        except Exception as problem:
            campaign.log.write("warning", f"hacrl diagnose failed: {type(problem).__name__}: {problem}")
            return
        for finding in found[:WARNED_OF]:
            self._warn(in_one_line(finding))


@contextmanager
def _logged(campaign: OpenCampaign, counter: Counter) -> Iterator[None]:
    """Write the run's first and last line into the campaign's log."""
    config = campaign.config
    agents = ", ".join(config.agents)
    campaign.log.write(
        "run", f"{config.name}: to iteration {config.iterations}, agents {agents}, process {os.getpid()}"
    )
    try:
        yield
    except Exception as problem:
        campaign.log.write("error", str(first_error(problem) or f"{type(problem).__name__}: {problem}"))
        campaign.log.write("end", f"{FAILED} after {campaign.seconds():.1f} s")
        raise
    except BaseException:
        campaign.log.write("end", f"stopped from outside after {campaign.seconds():.1f} s")
        raise
    counter.seconds = campaign.seconds()
    counts = counter.counts()
    campaign.log.write(
        "end", f"complete: {counts.ran} stages ran, {counts.cached} from the store, {counts.seconds:.1f} s"
    )


@contextmanager
def _profiled(campaign: OpenCampaign) -> Iterator[Listener]:
    """Write a trace of the run where the config asks for one, and say where it is."""
    if not campaign.config.runtime.profile:
        yield Listener()
        return
    tracer = Tracer(campaign.record.folder)
    try:
        yield tracer
    finally:
        tracer.close()
        campaign.display.say(
            f"profile: {tracer.path} (open it in ui.perfetto.dev or speedscope.app; hacrl report sums it up)"
        )


def _refuse_faults(campaign: OpenCampaign) -> None:
    """Raise ConfigError for what would end the campaign later, before a server or a worker starts."""
    from flows.doctor.faults import campaign_faults, home_faults

    adopted = {entry.agent for entry in campaign.record.entries() if entry.stage in ORIGINS}
    faults = [*home_faults(campaign.home), *campaign_faults(campaign.config, adopted)]
    if faults:
        more = f" (and {len(faults) - 1} more; hacrl doctor --config lists them)" if len(faults) > 1 else ""
        raise ConfigError(f"{faults[0]}{more}")


def _show_disk_estimate(campaign: OpenCampaign) -> None:
    from flows.store.space import disk_estimate

    need, warning = disk_estimate(
        campaign.config, campaign.home, campaign.store, campaign.record.entries(), campaign.calls
    )
    campaign.display.console.print(need, style="dim", highlight=False, soft_wrap=True)
    if warning is not None:
        campaign.display.warn(warning)
