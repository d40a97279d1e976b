"""Ctrl-C and SIGTERM: the first asks for a clean end, the second ends at once.

A signal becomes an exception in the main thread, so that everything that is open is closed on the way out: workers and
their children, the Prefect server, the runs in MLflow. What the campaign has finished is in the store already; there is
nothing to save.
"""

import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Sent to the main thread so that it stops waiting; ignored wherever nobody has a handler for it.
NUDGE = signal.SIGURG
# A nudge may arrive just before the main thread begins to wait, so there are several (seconds between them).
NUDGES = (0.0, 0.05, 0.2, 1.0)
# Seconds until a signal is sent again whose exception was ignored: by then the main thread is somewhere else.
RESEND_AFTER = 0.02


class Stop(KeyboardInterrupt):
    """A signal asked this command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code that a shell gives a command ended by this signal."""
        return 128 + self.number


@dataclass
class _Request:
    """The request to end that this process has received, as the exception that carries it through the main thread."""

    number: int = 0
    raised: BaseException | None = None
    forget: list[Callable[[], None]] = field(default_factory=list)


_request = _Request()


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
        first = callable(outer) and outer is not signal.default_int_handler
        carry(Stop(number), number, forget, (lambda: outer(number, frame)) if first else None)

    def forget() -> None:
        nonlocal stopping
        stopping = False

    try:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[int(number)] = signal.signal(number, stop)
    except ValueError:  # not the main thread: whoever runs us there has the signals
        pass
    try:
        with wake_main_thread():
            yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def carry(
    error: BaseException, number: int, forget: Callable[[], None], first: Callable[[], object] | None = None
) -> NoReturn:
    """Raise ``error`` for signal ``number``, or what ``first`` raises, and see to it that it is not lost.

    A handler may run where Python or a library cannot let an exception pass: in a finalizer, or in compiled code that
    reports it as "ignored" and goes on (pydantic does while it serializes). The signal is then sent again a moment
    later, after ``forget`` has undone what keeps the handler from taking it a second time.
    """
    _request.number, _request.raised = number, error
    _request.forget.append(forget)
    try:
        if first is not None:
            first()
    except BaseException as other:
        _request.raised = other
        raise
    raise error


def _send_again_if_lost(unraisable: Any, outer: Callable[[Any], object]) -> None:
    """Do the work of ``sys.unraisablehook``: an exception of ours was ignored, so its signal is sent once more."""
    if _request.raised is None or unraisable.exc_value is not _request.raised:
        outer(unraisable)
        return
    while _request.forget:
        _request.forget.pop()()
    _request.raised = None
    main = threading.main_thread().ident
    again = threading.Timer(RESEND_AFTER, signal.pthread_kill, (main, _request.number))
    again.daemon = True
    again.start()


@contextmanager
def wake_main_thread() -> Iterator[None]:
    """Have SIGINT and SIGTERM heard at once inside, whichever thread the kernel gives them to.

    Python runs handlers in the main thread only. A signal that another thread receives does not wake the main thread:
    where that waits for a stage, the handler would run when the stage ends. Python writes the signal's number into a
    socket, whoever received it; a thread reads it there and sends the main thread a signal that does nothing else.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(NUDGE) is _nothing:  # somebody around us has done it
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    hook = sys.unraisablehook
    sys.unraisablehook = partial(_send_again_if_lost, outer=hook)
    handler = signal.signal(NUDGE, _nothing)
    outer = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    main = threading.get_ident()

    def watch() -> None:
        with ours:
            while numbers := ours.recv(64):
                for pause in NUDGES if set(numbers) & set(SIGNALS) else ():
                    time.sleep(pause)
                    signal.pthread_kill(main, NUDGE)

    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.set_wakeup_fd(outer)
        theirs.close()
        signal.signal(NUDGE, handler)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Interrupt whatever the main thread waits for."""


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


def end_quickly() -> None:
    """Let this process end without looking through all that torch, Prefect and MLflow have loaded: that takes long."""
    gc.freeze()
    if "triton" in sys.modules:
        # What is frozen is never freed. Triton's library would print forty lines about that after the last of ours.
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
