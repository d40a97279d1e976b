"""A campaign's log: plain lines in ``campaigns/<name>/log.txt``, one for each thing that happened. ``hacrl logs`` shows it.

    2026-11-16 04:31:07 start    generate ada #3
    2026-11-16 04:31:09 done     generate ada #3: 1.84 s

The kind is one of KINDS, or ``|name`` for a line that the worker process of that agent printed. Written line by line, so a killed run leaves
everything up to its last moment.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from flows.run.executors import Events
from flows.run.replay import Observers
from stages.runner import Outcome
from stages.spec import StageCall

KINDS = ("run", "start", "done", "cached", "waiting", "warning", "error", "end")
NAME = "log.txt"
FAILED = "failed"  # how the last line of a run that failed begins
_POLL_SECONDS = 0.25
_TAIL_BYTES = 1 << 16
_WIDTH = 8  # of the kind


@dataclass(frozen=True)
class Line:
    at: str  # local time
    kind: str
    text: str


class Logbook:
    """Open for writing. Every method may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = (folder / NAME).open("a", encoding="utf-8", errors="replace")
        self._cached = 0
        self._lock = threading.Lock()

    def write(self, kind: str, text: str) -> None:
        with self._lock:
            if kind != "cached" and self._cached:
                self._put("cached", f"{self._cached} {'stages' if self._cached > 1 else 'stage'} from the store")
                self._cached = 0
            self._put(kind, text)

    def warn(self, message: str) -> None:
        self.write("warning", message)

    def observers(self) -> Observers:
        """Warnings come through the display, which tells each of them once."""
        events = Events(waiting=self._waiting, output=lambda worker, line: self.write(f"|{worker}", line))
        return Observers(started=self._started, finished=self._finished, iteration=lambda number: None, events=events)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _started(self, call: StageCall, why: list[str]) -> None:
        reason = f" (again: {'; '.join(why)})" if why else ""
        self.write("start", call.label + reason)

    def _finished(self, call: StageCall, outcome: Outcome) -> None:
        if outcome.cached:  # told in one line when something else happens: a resumed campaign has thousands of them
            with self._lock:
                self._cached += 1
            return
        headline = {"verify": "verify/reward_mean", "evaluate": f"evaluate/{call.variant}/accuracy"}.get(call.stage, "")
        value = outcome.metrics.get(headline)
        told = "" if value is None else f", {headline.rpartition('/')[2].replace('_', ' ')} {value:.3f}"
        self.write("done", f"{call.label}: {outcome.seconds:.2f} s{told}")

    def _waiting(self, call: StageCall, holder: str) -> None:
        self.write("waiting", f"{call.label}: {holder} is computing the same artifact")

    def _put(self, kind: str, text: str) -> None:
        if self._file is None:
            return
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        for part in text.splitlines() or [""]:
            self._file.write(f"{at} {kind:<{_WIDTH}} {part}\n")
        self._file.flush()


def parse(raw: str) -> Line | None:
    """A line of the file; None where a crash tore it."""
    day, _, rest = raw.rstrip("\n").partition(" ")
    at, _, rest = rest.partition(" ")
    kind = rest.partition(" ")[0]
    if len(day) != 10 or len(at) != 8 or not (kind in KINDS or kind.startswith("|")):
        return None
    return Line(f"{day} {at}", kind, rest[max(_WIDTH, len(kind)) + 1 :])


def read_log(folder: Path) -> list[Line]:
    path = folder / NAME
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return [line for raw in file if (line := parse(raw)) is not None]


def failure(folder: Path) -> str | None:
    """What the last run failed of, as of the end of its log; None where it ended otherwise, or did not end."""
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
    """Lines after the first ``skip`` as they come; None whenever there is nothing new, so that the caller can stop."""
    path, seen, rest = folder / NAME, 0, ""
    while not path.exists():
        yield None
        time.sleep(_POLL_SECONDS)
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            rest += file.readline()
            if not rest.endswith("\n"):  # nothing, or a line whose end is still to come
                yield None
                time.sleep(_POLL_SECONDS)
                continue
            line, rest = parse(rest), ""
            if line is None:
                continue
            seen += 1
            if seen > skip:
                yield line
