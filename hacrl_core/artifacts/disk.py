"""A full disk: knowing one when it shows, in whatever exception a library makes of it, and saying so."""

import errno
from pathlib import Path

_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries in C++ and Rust hand over the system's words, not its number.
_WORDS = ("no space left on device", "disk quota exceeded", "file too large", "database or disk is full", "os error 28")


def is_disk_full(problem: BaseException) -> bool:
    """Whether this, or what caused it, is a disk, a quota or a limit that is full."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _CODES:
            return True
        if not isinstance(seen, MemoryError) and any(words in str(seen).lower() for words in _WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def disk_full(place: Path) -> str:
    return (
        f"the disk of {place} is full; free some space (hacrl store gc shows what may go) and run the same command again: "
        "everything finished so far is saved"
    )
