"""Locks that die with their holder: flock, released by the kernel however the process ends."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST_WAIT, _LONGEST_WAIT = 0.005, 0.5


@contextmanager
def exclusive(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold ``path`` alone. While another process holds it, wait and tell ``on_wait`` once who that is.

    The file is left in place: unlinking a lock file lets two holders lock two different files of one name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(handle, on_wait)
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "since": time.time()}).encode(), 0)
        yield
    finally:
        os.close(handle)  # closing releases the lock


def try_exclusive(path: Path) -> int | None:
    """The open handle of a lock taken without waiting, or None where somebody else holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps({"pid": os.getpid(), "since": time.time()}).encode(), 0)
    return handle


def holder(path: Path) -> str:
    """Who wrote themselves into the lock file last, for people."""
    try:
        return f"process {json.loads(path.read_text())['pid']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def _acquire(handle: int, on_wait: Callable[[str], None] | None) -> None:
    wait, told = _FIRST_WAIT, False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if on_wait and not told:
                on_wait(_read_holder(handle))
                told = True
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)


def _read_holder(handle: int) -> str:
    try:
        return f"process {json.loads(os.pread(handle, 200, 0))['pid']}"
    except (ValueError, KeyError):
        return "another process"
