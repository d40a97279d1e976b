"""Ctrl-C and SIGTERM: the first asks for a clean end, the second ends at once.

A signal becomes an exception in the main thread, so that everything that is open is closed on the way out: workers and
their children, the Prefect server, the runs in MLflow. What the campaign has finished is in the store already; there is
nothing to save.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop(KeyboardInterrupt):
    """A signal asked this command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code that a shell gives a command ended by this signal."""
        return 128 + self.number


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise ``Stop`` in the main thread when SIGINT or SIGTERM arrives inside.

    A handler that was installed before is called first: Prefect has one around flows and must see the signal. A signal
    that is ignored stays ignored: a background job of a shell does not end with Ctrl-C.
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
                before[int(number)] = signal.signal(number, stop)
    except ValueError:  # not the main thread: whoever runs us there has the signals
        pass
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def end_at_once(number: int) -> None:
    """Exit without clean-up, except for the screen.

    Children watch their parent and end with it; the next run removes their folders.
    """
    for child in multiprocessing.active_children():
        child.kill()
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a live display may have hidden it
    os.write(2, f"{cursor}\nstopped at once; run the same command again to go on\n".encode())
    os._exit(128 + number)


def die_with_parent(parent: int) -> None:
    """End this process soon after its parent is gone.

    A thread of our own polls for it. Linux can send a signal, but when the parent's *thread* ends, and workers are
    started by threads that come and go.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
