"""Feeds MLflow while a campaign runs, from its own thread, so that training never waits for MLflow.

A server that is away, dies or hangs costs one warning. What could not be sent is kept and retried. What is still
missing at the end is sent by the next run or by ``hacrl track sync``: every call may be repeated without harm.
"""

import functools
import gc
import queue
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from flows.home import Home
from flows.record.history import History, read_history
from flows.record.record import Entry, campaign_folders, is_running, read_campaign
from flows.record.trace import MLFLOW
from flows.tracking.projection import Projection, quiet_environment, tracking_uri
from hacrl_core.artifacts import open_store
from hacrl_core.config.addresses import without_userinfo
from hacrl_core.errors import ConfigError, HacrlError
from hacrl_core.spans import span

# A server that takes longer for an empty page is considered away.
PROBE_SECONDS = 3.0
# A stopped campaign waits no longer than this.
STOP_SECONDS = 5.0
# Sending takes at most one part in so many of the campaign's time: short iterations are sent together.
SEND_SHARE = 100
MAX_PAUSE_SECONDS = 60.0
FIRST_RETRY_SECONDS = 15.0
MAX_RETRY_SECONDS = 300.0

# Servers that this process has warned about: one warning each, however many trackers it opens.
_warned: set[str] = set()


class ServerAway(HacrlError):
    """A server does not answer."""


def probe(url: str, seconds: float | None = None) -> None:
    """Raise ServerAway unless an HTTP server answers. Any answer will do, even an error page."""
    seconds = PROBE_SECONDS if seconds is None else seconds
    if not url.startswith(("http://", "https://")):
        return
    try:
        # urllib takes user and password for a part of the host's name.
        with urllib.request.urlopen(without_userinfo(url), timeout=seconds):
            pass
    except urllib.error.HTTPError:
        pass
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "reason", problem)
        silent = isinstance(reason, TimeoutError)
        raise ServerAway(
            f"{without_userinfo(url)}: {f'no answer within {seconds:g} s' if silent else reason}"
        ) from None


class Tracker:
    """Sends a campaign's entries to its projection from a thread, and keeps what could not be sent."""

    def __init__(
        self, open_projection: Callable[[], Projection], warn: Callable[[str], None], patience: float, uri: str = ""
    ) -> None:
        """``patience``: how long the end of a campaign waits for a server that does answer."""
        self._open = open_projection
        self._warn = warn
        self._patience = patience
        self._uri = uri
        self._queue: queue.Queue[Callable[[Projection], object] | list[Entry] | None] = queue.Queue()
        self._pending: deque[Callable[[Projection], object]] = deque()
        # Entries that wait to be sent together.
        self._entries: list[Entry] = []
        self._status = "KILLED"
        self._pause = FIRST_RETRY_SECONDS
        self.projection: Projection | None = None
        # Why MLflow is not up to date just now.
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._serve, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, entries: list[Entry]) -> None:
        """Send the metrics of these entries."""
        if entries:
            self._queue.put(entries)

    def mark_complete(self, entries: list[Entry], history: Callable[[], History]) -> None:
        """Note on the campaign's run that MLflow has all of these entries; ``history`` reads theirs."""
        self._queue.put(lambda projection: projection.mark_complete(entries, history()))

    def replay(self, entries: list[Entry]) -> None:
        """Send everything again, unless MLflow has it."""
        self._queue.put(lambda projection: projection.replay(entries))

    def close(self, status: str) -> None:
        """Send what is pending, then end the runs; do not wait for a server that is away."""
        self._status = status
        self._queue.put(None)
        self._thread.join(self._patience if status == "FINISHED" else min(self._patience, STOP_SECONDS))
        if self._thread.is_alive() and status == "FINISHED":
            self._fail("slow to answer")

    def _serve(self) -> None:
        # The runs appear in MLflow as soon as the campaign runs; what that cost holds nothing back.
        failed = self._try(time.monotonic())
        retry_at = time.monotonic() if self.problem is None else failed
        ending = False
        while not ending:
            waits = self._pending or self._entries
            try:
                work = self._queue.get(timeout=max(0.0, retry_at - time.monotonic()) if waits else None)
                ending = work is None
                if isinstance(work, list):
                    self._entries += work
                elif work is not None:
                    self._gather()
                    self._pending.append(work)
            except queue.Empty:
                pass
            if ending or time.monotonic() >= retry_at:
                retry_at = self._try(retry_at)
        if self.projection is not None and self.problem is None:
            self._pending.append(lambda projection: projection.finish(self._status))
            self._try(retry_at)

    def _gather(self) -> None:
        """Make one batch of the entries that wait."""
        entries, self._entries = self._entries, []
        if entries:
            self._pending.append(lambda projection: projection.log(entries))

    def _try(self, retry_at: float) -> float:
        """Send what is pending; return when to send again."""
        self._gather()
        begun = time.thread_time()
        try:
            if self.projection is None:
                with span("open", MLFLOW):
                    probe(self._uri)
                    self.projection = self._open()
                leave_to_itself("opened")
            while self._pending:
                self._pending[0](self.projection)
                self._pending.popleft()
                leave_to_itself("sent")
        except Exception as problem:
            self.projection = None
            self._fail(first_line(problem))
            pause = self._pause
            self._pause = min(2 * self._pause, MAX_RETRY_SECONDS)
            return time.monotonic() + pause
        if self.problem is not None:
            self._warn("MLflow answers again; what it missed is filled in")
            _warned.discard(self._uri)
        self.problem = None
        self._pause = FIRST_RETRY_SECONDS
        return time.monotonic() + min(MAX_PAUSE_SECONDS, SEND_SHARE * (time.thread_time() - begun))

    def _fail(self, problem: str) -> None:
        self.problem = problem
        if self._uri not in _warned:
            _warned.add(self._uri)
            self._warn(
                f"MLflow: {problem}; training goes on and nothing is lost: the end of the run, the same command again, "
                "or hacrl track sync fills MLflow in"
            )


@functools.cache
def leave_to_itself(moment: str) -> None:
    """Spare what is imported by now from the garbage collector, once for each moment of a process.

    Prefect's and MLflow's modules are hundreds of thousands of objects that live to the end. Looking through them again
    and again took a tenth of the CPU time of feeding MLflow. What MLflow and the stages import later is there when the
    first iterations have been sent.
    """
    gc.freeze()


def first_line(problem: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters."""
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]


# -- hacrl track sync --------------------------------------------------------------------------------------------------


def sync_campaigns(console: Console, home: Home, name: str | None) -> int:
    """Send MLflow what it missed of one campaign, or of all.

    Return the exit code: 1 if a server did not answer or a campaign could not be read.
    """
    quiet_environment()
    failed = False
    folders = [home.campaign(name)] if name is not None else campaign_folders(home)
    if not folders:
        console.print(f"no campaigns in {home.root}; nothing to send", highlight=False, soft_wrap=True)
    for folder in folders:
        try:
            console.print(_sync(home, folder.name), highlight=False, soft_wrap=True)
        except (ServerAway, ConfigError) as problem:
            if name is not None and isinstance(problem, ConfigError):
                raise
            failed = True
            console.print(Text(f"! {folder.name}: {problem}", style="yellow"), soft_wrap=True)
    return 1 if failed else 0


def _sync(home: Home, name: str) -> str:
    folder = home.campaign(name)
    config = read_campaign(folder)
    store = open_store(home.store)
    if not config.tracking.enabled:
        return f"{name}: tracking is off in its config; nothing to do"
    history = read_history(store, folder)
    uri = tracking_uri(config, home)
    shown = without_userinfo(uri)
    probe(uri)
    try:
        projection = Projection(config, store, uri, home)
        sent = projection.replay([finished.entry for finished in history.finished])
        if not is_running(folder):
            projection.finish("FINISHED" if history.complete else "KILLED")
    except Exception as problem:
        raise ServerAway(f"MLflow at {shown}: {first_line(problem)}; try again when it answers") from problem
    return f"{name}: {'brought up to date' if sent else 'was up to date'}, {history.done} iterations at {shown}"
