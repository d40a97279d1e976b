"""Feeds a projection from a thread of its own, so that training never waits for MLflow.

A server that is away, dies or hangs costs one warning. What could not be sent is kept and tried again now and then; what is still missing at
the end, the next run or ``hacrl track sync`` brings: every call may be repeated without harm.
"""

import queue
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from hacrl_core.errors import HacrlError

if TYPE_CHECKING:
    from flows.record.record import Entry
    from flows.tracking.projection import Projection

PROBE_SECONDS = 3.0  # a server that takes longer for an empty page is not there
STOP_SECONDS = 5.0  # what a stopped campaign waits at most
FIRST_RETRY, LONGEST_RETRY = 15.0, 300.0

_warned: set[str] = (
    set()
)  # servers that this process has complained about: one warning each, however many trackers it opens


class ServerAway(HacrlError):
    """A server does not answer."""


def probe(url: str, seconds: float | None = None) -> None:
    """Any answer of an HTTP server will do, an error page too; silence raises."""
    seconds = PROBE_SECONDS if seconds is None else seconds
    if not url.startswith(("http://", "https://")):
        return
    try:
        with urllib.request.urlopen(url, timeout=seconds):
            pass
    except urllib.error.HTTPError:
        pass
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "reason", problem)
        silent = isinstance(reason, TimeoutError)
        raise ServerAway(f"{url}: {f'no answer within {seconds:g} s' if silent else reason}") from None


class Tracker:
    def __init__(
        self, open_projection: Callable[[], "Projection"], warn: Callable[[str], None], patience: float, uri: str = ""
    ) -> None:
        """``patience``: how long the end of a campaign waits for a server that does answer."""
        self._open, self._warn, self._patience, self._uri = open_projection, warn, patience, uri
        self._queue: queue.Queue[Callable[[Projection], None] | None] = queue.Queue()
        self._pending: deque[Callable[[Projection], None]] = deque()
        self._status = "KILLED"
        self._pause = FIRST_RETRY
        self.projection: Projection | None = None
        self.problem: str | None = None  # what keeps MLflow from being up to date just now
        self._thread = threading.Thread(target=self._serve, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, entries: "list[Entry]") -> None:
        if entries:
            self._queue.put(lambda projection: projection.log(entries))

    def mark_complete(self, entries: "list[Entry]") -> None:
        self._queue.put(lambda projection: projection.mark_complete(entries))

    def replay(self, entries: "list[Entry]") -> None:
        self._queue.put(lambda projection: projection.replay(entries))

    def close(self, status: str) -> None:
        """Let what is on its way arrive, then end the runs; a server that is away is not waited for."""
        self._status = status
        self._queue.put(None)
        self._thread.join(self._patience if status == "FINISHED" else min(self._patience, STOP_SECONDS))
        if self._thread.is_alive() and status == "FINISHED":
            self._fail("slow to answer")

    def _serve(self) -> None:
        retry_at = self._try(time.monotonic())  # the runs appear in MLflow as soon as the campaign runs
        ending = False
        while not ending:
            wait = max(0.0, retry_at - time.monotonic()) if self._pending else None
            try:
                work = self._queue.get(timeout=wait)
                ending = work is None
                if work is not None:
                    self._pending.append(work)
            except queue.Empty:
                pass
            if ending or time.monotonic() >= retry_at:
                retry_at = self._try(retry_at)
        if self.projection is not None and self.problem is None:
            self._pending.append(lambda projection: projection.finish(self._status))
            self._try(retry_at)

    def _try(self, retry_at: float) -> float:
        """Send what is pending; returns when to try again."""
        try:
            if self.projection is None:
                probe(self._uri)
                self.projection = self._open()
            while self._pending:
                self._pending[0](self.projection)
                self._pending.popleft()
        except Exception as problem:
            self.projection = None
            self._fail(_first_line(problem))
            self._pause, pause = min(2 * self._pause, LONGEST_RETRY), self._pause
            return time.monotonic() + pause
        if self.problem is not None:
            self._warn("MLflow answers again; what it missed is filled in")
            _warned.discard(self._uri)
        self.problem, self._pause = None, FIRST_RETRY
        return retry_at

    def _fail(self, problem: str) -> None:
        self.problem = problem
        if self._uri not in _warned:
            _warned.add(self._uri)
            self._warn(
                f"MLflow: {problem}; training goes on and nothing is lost: the end of the run, the same command again, or "
                "hacrl track sync fills MLflow in"
            )


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]
