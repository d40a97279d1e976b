"""Small float32 safetensors files as one piece of memory: written and read at once, past the page cache.

What a process has written it mostly reads itself, in the next iteration, and once: it keeps the memory until then.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hacrl_core.artifacts.direct import PAGE, read_direct
from hacrl_core.artifacts.files import write_hashed

# A larger file is worth its place in the page cache: its next reader would wait for the disk.
MOST_BYTES = 32 << 20
_HEAD_BYTES = 16 * PAGE  # the names and shapes of several hundred tensors
_KEPT_BYTES = 64 << 20
# (device, inode, size, time of the last change) → what this process wrote into a file, the oldest first.
_kept: dict[tuple[int, int, int, int], Tensor] = {}


def write_small(path: Path, head: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Write float32 tensors behind the head of their file."""
    memory = _memory(len(head) + sum(tensor.nbytes for tensor in tensors.values()))
    memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if tensors:
        parts = [tensor.detach().reshape(-1).cpu() for tensor in tensors.values()]
        torch.cat(parts, out=memory[len(head) :].view(torch.float32))
    write_hashed(path, memory.numpy().data)
    _kept[_state(path)] = memory
    while sum(map(len, _kept.values())) > _KEPT_BYTES:
        del _kept[next(iter(_kept))]


def read_small(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a small float32 file, which share one piece of memory; None for any other file."""
    state = _state(path)
    size = state[2]
    if size > MOST_BYTES:
        return None
    memory = _kept.pop(state, None)  # the reader may change it, so it is given away once
    if memory is None:
        memory = _memory(-(-size // PAGE) * PAGE)
        memory = memory[: read_direct(path, memory.numpy().data)]
    begin, entries = _head(memory)
    # Others than this project write heads of any length; numbers that begin anywhere cannot be read where they lie.
    if entries is None or begin % 4 or not _fill(entries, len(memory) - begin):
        return None
    bounds = {name: entry["data_offsets"] for name, entry in entries.items()}
    numbers = {name: memory[begin + start : begin + end].view(torch.float32) for name, (start, end) in bounds.items()}
    return {name: part.view(entries[name]["shape"]) for name, part in numbers.items()}


def names_in(path: Path) -> set[str]:
    """Return the names of a file's tensors; none where they are too many to be read at a glance."""
    memory = _memory(_HEAD_BYTES)
    return set(_head(memory[: read_direct(path, memory.numpy().data)])[1] or ())


def _state(path: Path) -> tuple[int, int, int, int]:
    """Return what tells a file, and any change of it, from all others."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _memory(size: int) -> Tensor:
    """Bytes that start at a page, from the C library, which keeps what is freed for the next ones."""
    held = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -held.data_ptr() % PAGE
    return held[start : start + size]


def _head(memory: Tensor) -> tuple[int, dict[str, Any] | None]:
    """Return where a file's numbers begin, and what its head says of each tensor; None where it is no head."""
    content = memory.numpy().data
    begin = 8 + int.from_bytes(content[:8], "little")
    try:
        entries = json.loads(bytes(content[8:begin])) if begin <= len(content) else None
    except ValueError:
        entries = None
    if not isinstance(entries, dict):
        return begin, None
    return begin, {name: entry for name, entry in entries.items() if name != "__metadata__"}


def _fill(entries: dict[str, Any], size: int) -> bool:
    """Whether the entries of a head are those of float32 numbers that fill so many bytes, one behind the other."""
    end = 0
    try:
        for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
            (start, stop), shape = entry["data_offsets"], entry["shape"]
            counts = all(type(number) is int and number >= 0 for number in (start, stop, *shape))
            if not counts or entry["dtype"] != "F32" or start != end or stop - start != 4 * math.prod(shape):
                return False
            end = stop
    except (KeyError, TypeError, ValueError):
        return False
    return end == size
