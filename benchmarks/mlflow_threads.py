"""Runs ``hacrl`` and writes what its process does beside orchestration, in CPU seconds, as orchestration.py reads it.

    python benchmarks/mlflow_threads.py seconds.txt run configs/demo.yaml

MLflow is fed by a thread of the campaign's process, and a second thread samples the machine for it. Both are known by
their names. A thread that one of them starts counts as well. The file has three numbers: all seconds of these threads,
those in which iterations were sent (``Projection.log``), and those of stages that run in this process (``sample``,
``credit``). The threads that sync their files are common to all and count with the driver. What MLflow's threads do
beside sending is paid once: imports, the runs, and at the end models, tables and pictures. The file is renewed every
half second and at the end.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flows.record.record import Entry
from stages.spec import Outcome

NAMES = ("mlflow", "system metrics")
SECONDS = 0.5

_alive: dict[int, int] = {}  # thread → its CPU clock
_ended: list[float] = []
_sent: list[float] = []  # seconds of each sending of iterations
_staged: list[float] = []  # seconds of each stage in this process
_lock = threading.Lock()


def watch_threads() -> None:
    """Note the CPU clock of every MLflow thread from here on."""
    start = threading.Thread.start

    def start_watched(thread: threading.Thread) -> None:
        if thread.name.lower().startswith(NAMES) or threading.get_ident() in _alive:
            thread.run = _watched(thread.run)  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_watched  # type: ignore[method-assign]


def _watched(run: Callable[[], None]) -> Callable[[], None]:
    def watched() -> None:
        me = threading.get_ident()
        with _lock:
            _alive[me] = time.pthread_getcpuclockid(me)
        try:
            run()
        finally:
            with _lock:
                del _alive[me]
                _ended.append(time.thread_time())

    return watched


def watch_sending() -> None:
    """Note the CPU seconds of every sending of iterations from here on."""
    from flows.tracking.projection import Projection

    log = Projection.log

    def watched(projection: Projection, entries: Iterable[Entry]) -> None:
        begun = time.thread_time()
        try:
            log(projection, entries)
        finally:
            _sent.append(time.thread_time() - begun)

    Projection.log = watched  # type: ignore[method-assign]


def watch_stages() -> None:
    """Note the CPU seconds of every stage that runs in this process from here on."""
    from flows.run import executors

    run_here = executors.run_here

    def watched(*given: Any) -> Outcome:
        begun = time.thread_time()
        try:
            return run_here(*given)
        finally:
            _staged.append(time.thread_time() - begun)

    executors.run_here = watched


def seconds() -> float:
    """Return the CPU seconds of all MLflow threads so far."""
    with _lock:
        return sum(_ended) + sum(time.clock_gettime(clock) for clock in _alive.values())


def main() -> None:
    """Run the command with the clock beside it."""
    file = Path(sys.argv[1])
    watch_threads()
    watch_sending()
    watch_stages()

    def write() -> None:
        part = file.with_suffix(".part")
        part.write_text(f"{seconds():.4f} {sum(_sent):.4f} {sum(_staged):.4f}")
        part.replace(file)

    def tick() -> None:
        while True:
            write()
            time.sleep(SECONDS)

    threading.Thread(target=tick, daemon=True).start()
    atexit.register(write)
    from flows.cli import app

    sys.argv = ["hacrl", *sys.argv[2:]]
    app()


if __name__ == "__main__":
    main()
