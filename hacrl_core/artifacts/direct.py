"""Files past the system's page cache: the disk takes them from, or puts them into, the caller's own memory.

A small checkpoint is written once an iteration and read once. In the page cache each version takes pages that the
system has to provide, which costs many times what copying the bytes does. Memory that starts at a page serves; where
memory, file system or platform do not allow it, files are written and read as usual.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

PAGE = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)  # unknown to macOS


def write_direct(path: Path, content: memoryview) -> os.stat_result:
    """Write a new file and return what the system says of it; it is not synced."""
    whole = len(content) // PAGE * PAGE  # the disk takes whole blocks; the rest is refused and goes as usual
    handle = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        _pass(handle, len(content), lambda start: os.pwrite(handle, content[start:whole] or content[start:], start))
        return os.fstat(handle)
    finally:
        os.close(handle)


def read_direct(path: Path, into: memoryview) -> int:
    """Read the start of a file, as much as there is room for; return how many bytes it has. Room is in whole pages."""
    handle = _open(path, os.O_RDONLY)
    try:
        size = min(os.fstat(handle).st_size, len(into))
        _pass(handle, size, lambda start: os.preadv(handle, [into[start:]], start))
        return size
    finally:
        os.close(handle)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)  # the file system does not know it


def _pass(handle: int, size: int, move: Callable[[int], int]) -> None:
    """Move bytes until all have passed; what the system refuses for its place or length goes as usual."""
    done, is_direct = 0, bool(_DIRECT)
    while done < size:
        try:
            moved = move(done)
        except OSError as problem:
            if problem.errno != errno.EINVAL or not is_direct:
                raise
            is_direct = False
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~_DIRECT)
            continue
        if not moved:
            raise OSError(errno.EIO, "a file ended before its size")
        done += moved
