"""A full disk: recognise it in whatever exception a library raises, and report it."""

import errno
from pathlib import Path

_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries in C++ and Rust pass on the system's message, not its error number.
_WORDS = ("no space left on device", "disk quota exceeded", "file too large", "database or disk is full", "os error 28")


def is_disk_full(problem: BaseException) -> bool:
    """Return whether this error, or one that caused it, is a full disk, quota or file size limit."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _CODES:
            return True
        if not isinstance(seen, MemoryError) and any(words in str(seen).lower() for words in _WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def disk_full(place: Path) -> str:
    """Return the message for a full disk."""
    return (
        f"the disk of {place} is full; free some space (hacrl store gc shows what may go) and run the same command "
        "again: everything finished so far is saved"
    )
