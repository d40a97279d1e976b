"""Worker processes that were forked before the command had threads, and wait for their work.

A forked child of a process with threads may wait for ever for a lock that one of them held. So a forked command begins
with a few children, while it is still one thread; ``multiprocessing``'s ``spawn`` takes one of these instead of a new
interpreter. Its parent is the command, as always.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

_waiting: list[tuple[int, socket.socket]] = []


def prepare(count: int) -> None:
    for _ in range(count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for _, other in _waiting:
                other.close()
            ours.close()
            _wait_for_work(theirs)
        theirs.close()
        _waiting.append((pid, ours))
    spawn = multiprocessing.get_context("spawn")
    prepared = SimpleNamespace(Pipe=spawn.Pipe, Process=Prepared)
    known = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: prepared if method == "spawn" else known(method)


def _wait_for_work(connection: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    data, handles, _, _ = socket.recv_fds(connection, 1 << 16, 8)
    if not data:
        os._exit(0)
    target, args = pickle.loads(data)
    code = 0
    try:
        target(*[Connection(handles.pop(0)) if isinstance(arg, _Pipe) else arg for arg in args])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Pipe:
    """Stands for a connection whose handle travels beside the message."""


class Prepared:
    """What ``flows/run/executors.py`` asks of a process."""

    def __init__(self, target, args, name="", daemon=False) -> None:
        self._work, self.exitcode = (target, args), None
        self.pid = 0

    def start(self) -> None:
        self.pid, connection = _waiting.pop(0)
        target, args = self._work
        pipes = [arg.fileno() for arg in args if isinstance(arg, Connection)]
        plain = [_Pipe() if isinstance(arg, Connection) else arg for arg in args]
        socket.send_fds(connection, [pickle.dumps((target, plain))], pipes)

    def is_alive(self) -> bool:
        if self.exitcode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.exitcode = os.waitstatus_to_exitcode(status) if pid else None
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        deadline = time.monotonic() + (3600 if timeout is None else timeout)
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.is_alive():
            os.kill(self.pid, number)
