"""How many parameters a checkpoint has that no stage has read yet: by the headers of its files, without its weights."""

import json
import math
import struct
from pathlib import Path
from typing import BinaryIO

from hacrl_core.artifacts.sources import locate
from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.errors import ConfigError
from hacrl_core.learning.shape import KNOWN

# GGUF's types of metadata values and their sizes; 8 is a text, 9 a list.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _LIST = 8, 9


def checkpoint_parameters(checkpoint: CheckpointConfig) -> int | None:
    """Return the parameters of a folder, a package's file, a hub id in the cache or a known model; None: not to know.

    A hub id that is neither known nor downloaded would have to be asked for over the network.
    """
    try:
        place = locate(checkpoint)
        folder = place if isinstance(place, Path) else _cached(place, checkpoint.revision)
        if folder is None:
            return KNOWN[checkpoint.path].parameters if checkpoint.path in KNOWN else None
        if checkpoint.gguf_file:
            return gguf_parameters(folder / checkpoint.gguf_file)
        return sum(_safetensors_parameters(path) for path in sorted(folder.glob("*.safetensors"))) or None
    except (ConfigError, OSError, ValueError, KeyError, struct.error):
        return None


def _cached(repository: str, revision: str | None) -> Path | None:
    """Return the folder of a hub id in the cache, where its config has been downloaded."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _safetensors_parameters(path: Path) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def gguf_parameters(path: Path) -> int:
    """Return the parameters by the table of tensors of a GGUF file, however they are quantised."""
    with path.open("rb") as file:
        magic, version, tensors, entries = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF" or version < 2:
            raise ValueError(f"{path}: no GGUF file of version 2 or newer")
        for _ in range(entries):
            _text(file)
            _skip(file, _number(file, "<I"))
        return sum(_elements(file) for _ in range(tensors))


def _elements(file: BinaryIO) -> int:
    """Read one row of the table of tensors: name, shape, type and offset."""
    _text(file)
    shape = struct.unpack(f"<{(axes := _number(file, '<I'))}Q", file.read(8 * axes))
    file.seek(12, 1)
    return math.prod(shape)


def _skip(file: BinaryIO, kind: int) -> None:
    """Read over a value of the metadata."""
    if kind == _TEXT:
        _text(file)
    elif kind == _LIST:
        inner, count = _number(file, "<I"), _number(file, "<Q")
        if inner in _SIZES:
            file.seek(_SIZES[inner] * count, 1)
        else:
            for _ in range(count):
                _skip(file, inner)
    else:
        file.seek(_SIZES[kind], 1)


def _text(file: BinaryIO) -> None:
    file.seek(_number(file, "<Q"), 1)


def _number(file: BinaryIO, form: str) -> int:
    return int(struct.unpack(form, file.read(struct.calcsize(form)))[0])
