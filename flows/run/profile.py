"""``hacrl run --profile``: a trace of what every process did, in Chrome's trace format (Perfetto, speedscope).

The file is a JSON array with one event per line, written while the campaign runs: memory stays flat, and what a killed
run leaves can still be opened in Perfetto. Every process is a group of tracks. Work that overlaps in time is put on
several tracks, so that spans of one track always nest. What threads of the campaign's process do for MLflow and Prefect
has groups of its own, with a track for each thread: it goes on beside the stages.
"""

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from flows.record.trace import BESIDE, FOLDER, WAITING
from flows.run.events import Listener
from hacrl_core.spans import RECORDER, Span
from stages.spec import Outcome, StageCall

DRIVER = "campaign"
# Shorter waiting is not shown.
LEAST_WAIT = 0.001
# The first track of torch's operations.
OPERATIONS = 100


@dataclass
class _Tracks:
    """The tracks of one process: when each is free again."""

    number: int
    free_at: list[float] = field(default_factory=list)
    # Thread → spans whose outermost one has not ended.
    inner: dict[int, list[Span]] = field(default_factory=dict)
    # Thread → number of its own track: of operations, or of work beside the stages.
    threads: dict[int, int] = field(default_factory=dict)

    def track(self, began: float, ended: float) -> int:
        """Return the first track that is free from ``began``, and take it."""
        for index, free in enumerate(self.free_at):
            if free <= began:
                self.free_at[index] = ended
                return index
        self.free_at.append(ended)
        return len(self.free_at) - 1


class Tracer(Listener):
    """Writes the trace of one run of a campaign."""

    def __init__(self, folder: Path) -> None:
        place = folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        self.path = place / f"trace-{time.strftime('%Y%m%d-%H%M%S')}.json"
        self._file: IO[str] | None = self.path.open("w")
        self._file.write("[\n")
        self._first = True
        self._begun = time.time()
        self._processes: dict[str, _Tracks] = {}
        self._waiting: dict[str, float] = {}
        self._lock = threading.Lock()
        RECORDER.on = True

    def stage_started(self, call: StageCall, why: list[str]) -> None:
        """From now on the call waits for its process."""
        self._waiting[call.title] = time.time()

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """Write what this process did, and the stage itself where its process reported nothing (a cluster's node)."""
        self.spans(DRIVER, RECORDER.take())
        now, since = time.time(), self._waiting.pop(call.title, None)
        if since is not None:
            self.spans(call.agent or DRIVER, [Span(call.title, "stage", since, now, 0, 0)])

    def stage_failed(self, call: StageCall, problem: BaseException) -> None:
        """It no longer waits."""
        self._waiting.pop(call.title, None)

    def spans(self, process: str, spans: list[Span]) -> None:
        """Write what a process did."""
        with self._lock:
            for span in spans:
                self._take(process, span)

    def close(self) -> None:
        """Write the rest and end the file."""
        RECORDER.on = False
        self.spans(DRIVER, RECORDER.take())
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def _take(self, process: str, span: Span) -> None:
        if span.kind in BESIDE:
            # A name that no agent has.
            tracks = self._tracks(f"{span.kind} (beside the stages)")
            self._complete(tracks, self._thread(tracks, span.thread), span)
            return
        tracks = self._tracks(process)
        if span.kind == "op":
            # Operations nest inside each other as they come, on a track for each thread below the stages.
            self._complete(tracks, OPERATIONS + tracks.threads.setdefault(span.thread, len(tracks.threads)), span)
            return
        if span.depth:
            tracks.inner.setdefault(span.thread, []).append(span)
            return
        if span.kind == "stage":
            self._show_wait(process, span)
        track = tracks.track(span.began, span.ended)
        for one in (span, *tracks.inner.pop(span.thread, [])):
            self._complete(tracks, track, one)

    def _show_wait(self, process: str, span: Span) -> None:
        since = self._waiting.pop(span.name, span.began)
        if span.began - since > LEAST_WAIT:
            waits, tracks = Span(span.name, f"waits for {process}", since, span.began, 0, 0), self._tracks(WAITING)
            self._complete(tracks, tracks.track(since, span.began), waits)

    def _tracks(self, process: str) -> _Tracks:
        found = self._processes.get(process)
        if found is None:
            found = self._processes[process] = _Tracks(len(self._processes) + 1)
            self._name("process_name", found, 0, process)
        return found

    def _thread(self, tracks: _Tracks, thread: int) -> int:
        """Return the track of a thread of this process, which has the thread's name."""
        if thread not in tracks.threads:
            tracks.threads[thread] = len(tracks.threads)
            name = next((one.name for one in threading.enumerate() if one.ident == thread), "thread")
            self._name("thread_name", tracks, tracks.threads[thread], name)
        return tracks.threads[thread]

    def _name(self, what: str, tracks: _Tracks, track: int, name: str) -> None:
        self._write({"ph": "M", "name": what, "pid": tracks.number, "tid": track, "args": {"name": name}})

    def _complete(self, tracks: _Tracks, track: int, span: Span) -> None:
        # Both ends are rounded to the same nanoseconds: what ends where the next one begins does not overlap it.
        began, ended = (round(1e6 * (moment - self._begun), 3) for moment in (span.began, span.ended))
        self._write(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "ts": began,
                "dur": max(0.0, round(ended - began, 3)),
                "pid": tracks.number,
                "tid": track,
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(("" if self._first else ",\n") + json.dumps(event))
            self._first = False
