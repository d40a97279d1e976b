"""A campaign's log: plain lines in ``campaigns/<name>/log.txt``, one per event. ``hacrl logs`` shows it.

    2026-11-16 04:31:07 start    generate ada #3
    2026-11-16 04:31:09 done     generate ada #3: 1.84 s

The kind is one of KINDS, or ``|name`` for a line that the worker process of that agent printed. Every line is flushed,
so a killed run leaves everything up to its last moment.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from flows.run.events import Listener
from hacrl_core.printable import printable
from stages.spec import Outcome, StageCall

KINDS = ("run", "start", "done", "cached", "waiting", "warning", "error", "end")
NAME = "log.txt"
# How the last line of a failed run begins.
FAILED = "failed"
_POLL_SECONDS = 0.25
_TAIL_BYTES = 1 << 16
# Of the column with the kind.
_WIDTH = 8


@dataclass(frozen=True)
class Line:
    """One line of the log; ``at`` is local time."""

    at: str
    kind: str
    text: str


class Logbook(Listener):
    """A campaign's log, open for writing. Every method may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = (folder / NAME).open("a", encoding="utf-8", errors="replace")
        self._cached = 0
        self._lock = threading.Lock()

    def write(self, kind: str, text: str) -> None:
        """Write one event, one line for each line of its text."""
        with self._lock:
            if kind != "cached" and self._cached:
                self._put("cached", f"{self._cached} {'stages' if self._cached > 1 else 'stage'} from the store")
                self._cached = 0
            self._put(kind, text)

    def write_warning(self, message: str) -> None:
        """Write a warning. The display passes each one on once; as a listener the log hears none."""
        self.write("warning", message)

    def output(self, worker: str, line: str) -> None:
        """Write a line that a worker process printed."""
        self.write(f"|{worker}", line)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def stage_started(self, call: StageCall, why: list[str]) -> None:
        """Write that a stage starts, and what changed since it ran last."""
        reason = f" (again: {'; '.join(why)})" if why else ""
        self.write("start", call.title + reason)

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """Write that a stage ran, with its seconds and its headline metric; count a cached one."""
        if outcome.cached:
            # Written as one line before the next event of another kind: a resumed campaign has thousands of them.
            with self._lock:
                self._cached += 1
            return
        headline = {"verify": "verify/reward_mean", "evaluate": f"evaluate/{call.variant}/accuracy"}.get(call.stage, "")
        value = outcome.metrics.get(headline)
        told = "" if value is None else f", {headline.rpartition('/')[2].replace('_', ' ')} {value:.3f}"
        self.write("done", f"{call.title}: {outcome.seconds:.2f} s{told}")

    def waiting(self, call: StageCall, holder: str) -> None:
        """Write that another process computes the same artifact."""
        self.write("waiting", f"{call.title}: {holder} is computing the same artifact")

    def _put(self, kind: str, text: str) -> None:
        if self._file is None:
            return
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        for part in text.splitlines() or [""]:
            self._file.write(f"{at} {kind:<{_WIDTH}} {printable(part)}\n")
        self._file.flush()


def parse(raw: str) -> Line | None:
    """Parse a line of the file; return None for a line that a crash tore."""
    day, _, rest = raw.rstrip("\n").partition(" ")
    at, _, rest = rest.partition(" ")
    kind = rest.partition(" ")[0]
    if len(day) != 10 or len(at) != 8 or not (kind in KINDS or kind.startswith("|")):
        return None
    return Line(f"{day} {at}", kind, rest[max(_WIDTH, len(kind)) + 1 :])


def read_log(folder: Path) -> list[Line]:
    """Return all lines of the log; none where there is no log."""
    path = folder / NAME
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return [line for raw in file if (line := parse(raw)) is not None]


def failure(folder: Path) -> str | None:
    """Return the error that ended the last run; None if it ended otherwise or has not ended."""
    path = folder / NAME
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = [
            line for raw in file.read().decode("utf-8", "replace").splitlines() if (line := parse(raw)) is not None
        ]
    if not lines or lines[-1].kind != "end" or not lines[-1].text.startswith(FAILED):
        return None
    return next((line.text for line in reversed(lines) if line.kind == "error"), lines[-1].text)


def follow(folder: Path, skip: int) -> Iterator[Line | None]:
    """Yield the lines after the first ``skip``, and None whenever there is nothing new, so that the caller can stop."""
    path = folder / NAME
    seen, rest = 0, ""
    while not path.exists():
        yield None
        time.sleep(_POLL_SECONDS)
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            rest += file.readline()
            # Nothing new, or a line that is not complete yet.
            if not rest.endswith("\n"):
                yield None
                time.sleep(_POLL_SECONDS)
                continue
            line, rest = parse(rest), ""
            if line is None:
                continue
            seen += 1
            if seen > skip:
                yield line
