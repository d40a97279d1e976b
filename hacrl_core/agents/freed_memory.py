"""What the C library does with freed memory: keep it for the next tensor, or return it to the system at once.

It keeps blocks below 32 MB. A pass that frees and allocates blocks of many sizes around others that stay then holds
gigabytes of gaps. Returning them costs time, because the system clears every page that it hands out again.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST = 32 << 20  # the largest threshold that it accepts; larger blocks are always returned
_SMALL = 2 << 20
_LARGE_MODEL = 16 << 20  # parameters; smaller models have no blocks that matter


def is_large(model: "torch.nn.Module") -> bool:
    """Whether a model's tensors are so large that the gaps between them count."""
    return sum(parameter.numel() for parameter in model.parameters()) > _LARGE_MODEL


def give_back_large_blocks() -> None:
    """Return freed blocks above 2 MiB at once, for the rest of this process's life."""
    _mallopt(_MMAP_THRESHOLD, _SMALL)


@contextlib.contextmanager
def large_blocks_given_back(*, wanted: bool) -> Iterator[None]:
    """Return freed blocks above 2 MiB at once within this context, if ``wanted``."""
    if not wanted:
        yield
        return
    _mallopt(_MMAP_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        _mallopt(_MMAP_THRESHOLD, _MOST)


def keep_freed_blocks(size: int) -> None:
    """Keep up to ``size`` bytes of freed memory."""
    _mallopt(_MMAP_THRESHOLD, _MOST)
    _mallopt(_TRIM_THRESHOLD, size)


def _mallopt(parameter: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").mallopt(parameter, value)
