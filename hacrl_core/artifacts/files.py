"""Files of the store: written through to the disk and hashed, several at a time."""

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

from hacrl_core.artifacts.direct import write_direct

# Hashing and syncing release Python's lock, so threads do them at the same time.
_THREADS = 8
# A file that is still being written is sent to the disk in steps of this size.
_SYNC_BYTES = 256 << 20
# One write call for all, as libraries have it, puts large pages into the page cache, and on a machine with fragmented
# memory the kernel first has to move others out of the way. Pieces of 128 KiB took 1.4 ms for 3.5 MB where one call
# took 42 (Linux 6.18, ext4).
_WRITE_BYTES = 128 << 10
# Below this, handing files to threads takes longer than hashing them.
_SMALL_BYTES = 1 << 20


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads for all files of this process: starting new ones costs more than hashing and syncing a small artifact."""
    return ThreadPoolExecutor(_THREADS, "files")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a fork copies no threads


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of each file; large files are hashed at the same time."""
    if len(paths) < 2 or sum(path.stat().st_size for path in paths) < _SMALL_BYTES:
        return [file_sha256(path) for path in paths]
    return list(_threads().map(file_sha256, paths))


def hash_and_sync(paths: Sequence[Path]) -> list[tuple[int, str]]:
    """Write files through to the disk; return the size and sha256 of each.

    All files are synced at the same time. One that ``hashed_file`` or ``write_hashed`` wrote is not read again.
    """
    synced = [_threads().submit(sync, path) for path in paths[1:]]
    found = [path.stat() for path in paths]
    digests = [_digest_of_written(one) for one in found]
    hashed = iter(hash_files([path for path, known in zip(paths, digests, strict=True) if not known]))
    for path in paths[:1]:
        sync(path)
    for done in synced:
        done.result()
    return [(one.st_size, known or next(hashed)) for one, known in zip(found, digests, strict=True)]


# -- hashed while written ----------------------------------------------------------------------------------------------

# (device, inode) → (size, time of the last change, sha256) of files that were hashed while this process wrote them.
_written: dict[tuple[int, int], tuple[int, int, str]] = {}


class HashedFile:
    """A file open for writing: each piece is hashed, and earlier ones go to the disk, while it is written."""

    def __init__(self, file: IO[bytes], threads: ThreadPoolExecutor) -> None:
        self._file = file
        self._threads = threads
        self._digest = hashlib.sha256()
        self._unsynced = 0
        self._syncing: Future[None] | None = None

    def write(self, piece: Any) -> None:
        """Append a piece, any bytes-like object."""
        hashed = self._threads.submit(self._digest.update, piece)
        content = memoryview(piece).cast("B")
        for start in range(0, len(content), _WRITE_BYTES):
            self._file.write(content[start : start + _WRITE_BYTES])
        self._unsynced += len(content)
        if self._unsynced >= _SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            self._unsynced = 0
            self._syncing = self._threads.submit(os.fdatasync, self._file.fileno())
        hashed.result()

    def _finish(self) -> None:
        self._file.flush()
        if self._syncing is not None:
            self._syncing.result()
        made = os.fstat(self._file.fileno())
        _written[made.st_dev, made.st_ino] = (made.st_size, made.st_mtime_ns, self._digest.hexdigest())


@contextmanager
def hashed_file(path: Path) -> Iterator[HashedFile]:
    """Open a new file whose digest is known when it is closed: publishing it does not read it again."""
    with ThreadPoolExecutor(2, "hash") as threads, path.open("wb") as handle:
        file = HashedFile(handle, threads)
        yield file
        file._finish()


def write_hashed(path: Path, content: memoryview) -> None:
    """Write a new file at once, past the page cache; publishing it does not read it again.

    It is hashed while the disk takes it.
    """
    if len(content) < _SMALL_BYTES:
        made, digest = write_direct(path, content), hashlib.sha256(content)
    else:
        writing = _threads().submit(write_direct, path, content)
        digest, made = hashlib.sha256(content), writing.result()
    _written[made.st_dev, made.st_ino] = (made.st_size, made.st_mtime_ns, digest.hexdigest())


def _digest_of_written(found: os.stat_result) -> str:
    """Return the sha256 from when a file was written; empty where that is not known or the file has changed since."""
    size, changed, digest = _written.pop((found.st_dev, found.st_ino), (-1, -1, ""))
    return digest if (size, changed) == (found.st_size, found.st_mtime_ns) else ""


# -- synced ------------------------------------------------------------------------------------------------------------


def write_synced(path: Path, text: str) -> None:
    """Write a text and wait until it is on the disk."""
    with path.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def replace_synced(path: Path, text: str) -> None:
    """Replace a file atomically by a text; the text and the file's name are on the disk afterwards.

    Processes and threads may do it at the same time: each has a draft of its own, and the last one stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.draft")
    try:
        write_synced(draft, text)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Write a file, or a folder's list of names, through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
