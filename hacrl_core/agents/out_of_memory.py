"""Out of memory as one line with a remedy instead of an allocator's traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hacrl_core.errors import EngineError

LOADING = "run fewer agents at once, put it on another device, or take a smaller model or dtype"


@contextmanager
def out_of_memory_explained(checkpoint: Path, doing: str, remedy: str) -> Iterator[None]:
    """Turn an allocator's error into an `EngineError` that says what was being done and what helps."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise EngineError(f"agent {checkpoint}: out of memory {doing}; {remedy}") from error


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error is an allocator's: CUDA has an exception of its own, the CPU only a message."""
    text = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text or "out of memory" in text
    )
