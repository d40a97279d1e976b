"""Locks that die with their holder: flock, released by the kernel however the process ends.

A lock file goes with its lock, so that the folder of locks does not grow with the store. That is safe because whoever gets a lock checks
that the name still leads to the file it locked: a waiter that wakes up with a removed file in its hand begins again.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FIRST_WAIT, _LONGEST_WAIT = 0.005, 0.5


@contextmanager
def exclusive(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold ``path`` alone. While another process holds it, wait and tell ``on_wait`` who that is, again when it is another."""
    wait, told = _FIRST_WAIT, ""
    while (handle := try_exclusive(path)) is None:
        if on_wait and (who := holder(path)) != told:
            on_wait(who)
            told = who
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
    try:
        yield
    finally:
        release(path, handle)


def try_exclusive(path: Path, patience: float = 0.0) -> int | None:
    """The open handle of a lock, or None where somebody else holds it for longer than ``patience`` seconds. Closing it releases the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience
    while (handle := _take(path)) is None and time.monotonic() < deadline:
        time.sleep(_FIRST_WAIT)
    return handle


def is_held(path: Path) -> bool:
    """Whether somebody holds this lock; asks for a moment's share of it and writes nothing, so whoever takes it alone should be patient."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _take(path: Path) -> int | None:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, handle):
                with suppress(OSError):  # a full disk: the text is only for people
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps({"pid": os.getpid(), "since": time.time()}).encode(), 0)
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last holder removed it between our open and our flock


def release(path: Path, handle: int) -> None:
    """Remove the lock's file while it is still ours, then let go."""
    with suppress(OSError):
        os.unlink(path)
    os.close(handle)


def remove_stale_locks(folder: Path) -> int:
    """Remove the files of locks whose holders died; returns how many."""
    removed = 0
    for path in folder.glob("*.lock"):
        handle = try_exclusive(path)
        if handle is not None:
            release(path, handle)
            removed += 1
    return removed


def holder(path: Path) -> str:
    """Who wrote themselves into the lock file last, for people."""
    try:
        return f"process {json.loads(path.read_text())['pid']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def _is_at(path: Path, handle: int) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    ours = os.fstat(handle)
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)
