"""Ctrl-C and SIGTERM: the first asks for a clean end, the second ends at once.

A signal becomes an exception in the main thread, so that everything that is open is closed on the way out: workers and their children, the
Prefect server, the runs in MLflow. What the campaign has finished is in the store already; there is nothing to save.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop(KeyboardInterrupt):
    """Somebody wants this command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


@contextmanager
def heed_signals() -> Iterator[None]:
    """Inside, a signal raises ``Stop``, or whatever an outer handler raises for it (Prefect has one around flows, and needs to know).

    A signal that is ignored stays ignored: a shell's background job does not end with Ctrl-C.
    """
    before: dict[int, Any] = {}
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            end_at_once(number)
        stopping = True
        outer = before[number]
        if callable(outer) and outer is not signal.default_int_handler:
            outer(number, frame)
        raise Stop(number)

    try:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    except ValueError:  # not the main thread: whoever runs us there has the signals
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_once(number: int) -> None:
    """No clean-up but for the screen. Children watch their parent and go when it goes; the next run sweeps up their folders."""
    for child in multiprocessing.active_children():
        child.kill()
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a live display may have hidden it
    os.write(2, f"{cursor}\nstopped at once; run the same command again to go on\n".encode())
    os._exit(128 + number)
