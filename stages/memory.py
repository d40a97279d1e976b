"""How much memory a stage took: the highest resident size of its process, and the highest of its GPUs."""

import contextlib
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peak:
    """Highest memory use, in bytes."""

    host_bytes: int
    device_bytes: int


def begin() -> None:
    """Forget earlier peaks.

    Where the system does not allow that (it is not Linux), a stage reports the process's highest peak so far.
    """
    with contextlib.suppress(OSError):
        _RESET.write_text("5")
    for device in _gpus():
        _cuda().reset_peak_memory_stats(device)


def end() -> Peak:
    """Return the peaks since `begin`."""
    device = max((_cuda().max_memory_allocated(device) for device in _gpus()), default=0)
    return Peak(_highest_resident(), device)


def _highest_resident() -> int:
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _gpus() -> range:
    """Return the GPUs in use; asking must neither import torch nor initialise CUDA."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # another thread may be importing torch just now
    is_awake = getattr(cuda, "is_initialized", None)
    return range(cuda.device_count() if cuda is not None and is_awake is not None and is_awake() else 0)


def _cuda() -> Any:
    return sys.modules["torch"].cuda
