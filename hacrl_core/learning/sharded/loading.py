"""Each rank reads its own rows of a checkpoint's tensors."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hacrl_core.agents.freed_memory import give_back_large_blocks, is_large
from hacrl_core.errors import EngineError
from hacrl_core.learning.sharded.ranks import Rank

INDEX = "model.safetensors.index.json"


def rows_of(size: int, rank: Rank) -> slice:
    """Return the rows of a tensor with ``size`` rows that are a rank's; FSDP2 cuts as ``torch.chunk`` does."""
    each = -(-size // rank.count)
    first = min(rank.index * each, size)
    return slice(first, min(first + each, size))


def local(parameter: Tensor) -> Tensor:
    """Return this rank's rows of a parameter or of its gradient, sharing their memory."""
    if not isinstance(parameter, DTensor):
        raise EngineError("a parameter is not sharded: it was read while the model was gathered")
    return parameter.to_local().detach()


class TensorFiles:
    """The tensors of several safetensors files, by name; only the rows that are asked for are read."""

    def __init__(self, files: list[Path]) -> None:
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        for file in files:
            try:
                handle = self._open.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as problem:
                raise EngineError(f"{file}: cannot be read ({problem}); restore the file") from problem
            self._files |= dict.fromkeys(handle.keys(), handle)

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *problem: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def rows(self, name: str, rows: slice) -> Tensor:
        """Read some rows of a tensor."""
        found: Tensor = self._files[name].get_slice(name)[rows]
        return found

    def whole(self, name: str) -> Tensor:
        """Read a tensor."""
        found: Tensor = self._files[name].get_tensor(name)
        return found


def weight_files(checkpoint: Path) -> list[Path]:
    """Return the safetensors files that hold a checkpoint's weights."""
    index = checkpoint / INDEX
    if index.is_file():
        return [checkpoint / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(checkpoint.glob("*.safetensors"))


@torch.no_grad()
def read_slices(model: PreTrainedModel, checkpoint: Path, rank: Rank) -> None:
    """Fill a sharded model's slices from a checkpoint; adapters are left out."""
    if rank.device.type == "cpu" and is_large(model):
        # What FSDP2 gathers layer by layer: a rank of 135M parameters held 0.8 GB of freed memory at its peak.
        give_back_large_blocks()
    with TensorFiles(weight_files(checkpoint)) as files:
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                continue
            plain = name.replace(".base_layer.", ".")
            if plain not in files or files.shape(plain) != tuple(parameter.shape):
                found = f"shape {files.shape(plain)}" if plain in files else "nothing"
                raise EngineError(
                    f"agent {checkpoint}: its files hold {found} where the model has {plain} {tuple(parameter.shape)}; "
                    "a checkpoint that transformers converts while loading needs update.ranks: 1"
                )
            local(parameter).copy_(files.rows(plain, rows_of(parameter.shape[0], rank)))
        for name, buffer in model.named_buffers():
            if name in files:
                buffer.copy_(files.whole(name))
