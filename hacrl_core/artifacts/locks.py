"""Locks that end with their holder: flock, released by the kernel however the process ends.

Releasing a lock removes its file, so that the folder of locks does not grow with the store. This is safe because
whoever gets a lock checks that the name still leads to the locked file: a waiter that locked a removed file starts
again.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FIRST_WAIT = 0.005
_LONGEST_WAIT = 0.5


@contextmanager
def exclusive(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold ``path`` exclusively. Wait while another process holds it, and tell ``on_wait`` which one, once for each."""
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
    """Return the open handle of a lock, or None if another process holds it for longer than ``patience`` seconds.

    Closing the handle releases the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience
    while (handle := _take(path)) is None and time.monotonic() < deadline:
        time.sleep(_FIRST_WAIT)
    return handle


def shared(path: Path) -> int | None:
    """Return the open handle of a shared lock on a file that exists, or None if it does not.

    Waits while another process holds the file exclusively. A file that was replaced meanwhile is locked anew.
    """
    while True:
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            if _is_at(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def is_held(path: Path) -> bool:
    """Return whether a process holds this lock.

    The check takes a shared lock for a moment: processes that want the lock exclusively should retry.
    """
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
                # A full disk is no problem: the text is only for people.
                with suppress(OSError):
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps({"pid": os.getpid(), "since": time.time()}).encode(), 0)
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        # The last holder removed the file between our open and our flock.
        os.close(handle)


def release(path: Path, handle: int) -> None:
    """Remove the lock's file while the lock is still held, then release it."""
    with suppress(OSError):
        os.unlink(path)
    os.close(handle)


def remove_stale_locks(folder: Path) -> int:
    """Remove the files of locks whose holders died; return how many."""
    removed = 0
    for path in folder.glob("*.lock"):
        handle = try_exclusive(path)
        if handle is not None:
            release(path, handle)
            removed += 1
    return removed


def holder(path: Path) -> str:
    """Return who holds the lock, as text for people."""
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
