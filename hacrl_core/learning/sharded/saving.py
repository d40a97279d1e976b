"""Versions of several ranks on disk: the same bytes whoever wrote them.

A rank's slice of a tensor is one run of bytes in its file. So every rank writes its own rows into their place, all at
the same time, and no weight travels. Where the ranks do not share a disk, rank 0 gathers one tensor after the other.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hacrl_core.agents import checkpoints
from hacrl_core.contracts.manifest import TRAINING
from hacrl_core.learning import lora
from hacrl_core.learning.sharded import adapters
from hacrl_core.learning.sharded.loading import INDEX, local, rows_of
from hacrl_core.learning.sharded.policy import ShardedAgent, slices
from hacrl_core.learning.sharded.ranks import Rank

# Weights of more bytes are split, so that they can be hashed, copied and read in parallel.
_FILE_BYTES = 4 << 30
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Sliced:
    """One rank's rows of a tensor, and the shape of the whole."""

    rows: Tensor
    shape: tuple[int, ...]


def save_version(
    agent: ShardedAgent, folder: Path, moments: Mapping[str, Tensor], updates: int, state_files: int
) -> None:
    """Write weights, moments, adapters and everything around them; every rank must call this."""
    rank = agent.rank
    whole = {name: tuple(parameter.shape) for name, parameter in slices(agent.model)}
    weights = {
        name.replace(".base_layer.", "."): Sliced(local(parameter), whole[name])
        for name, parameter in slices(agent.model)
        if ".lora_" not in name
    }
    if agent.numerics.lora is not None:
        gathered = adapters.whole_adapters(agent.model)
        for name, rows in adapters.merged(agent.model, gathered, rank).items():
            weights[name] = Sliced(rows, weights[name].shape)
        if rank.index == 0:
            lora.write_adapter(gathered, agent.model.peft_config["default"], folder)
    state = {entry: Sliced(rows, whole[entry.partition("/")[2]]) for entry, rows in moments.items()}
    if rank.index == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_surroundings(agent.checkpoint, folder)
        (folder / TRAINING).mkdir(exist_ok=True)
    shared = _is_shared(folder, rank)
    for path, names in _weight_layout(folder, weights, rank).items():
        write_rows({name: weights[name] for name in names}, path, rank, shared=shared, metadata={"format": "pt"})
    sizes = {entry.partition("/")[2]: math.prod(item.shape) for entry, item in state.items()}
    for path, names in checkpoints.optimizer_layout(folder, sizes, state_files).items():
        write_rows({name: state[name] for name in names}, path, rank, shared=shared)
    if rank.index == 0:
        checkpoints.write_counts(folder, updates, state_files)
    rank.barrier()


def write_rows(
    tensors: Mapping[str, Sliced], path: Path, rank: Rank, *, shared: bool, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a float32 safetensors file together; its bytes are those of ``checkpoints.write_tensors``."""
    names = sorted(tensors)
    head = checkpoints.tensors_head({name: tensors[name].shape for name in names}, metadata)
    if rank.index == 0:
        with path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + sum(4 * math.prod(tensors[name].shape) for name in names))
    rank.barrier()
    place = len(head)
    if not shared:
        for name in names:
            whole = _gathered(tensors[name], rank)
            if rank.index == 0:
                _write_at(path, place, [(0, whole)])
            place += 4 * math.prod(tensors[name].shape)
        return
    own = []
    for name in names:
        rows, shape = tensors[name].rows, tensors[name].shape
        own.append((place + 4 * rows_of(shape[0], rank).start * math.prod(shape[1:]), rows))
        place += 4 * math.prod(shape)
    _write_at(path, 0, own)


def _write_at(path: Path, base: int, pieces: Sequence[tuple[int, Tensor]]) -> None:
    with path.open("r+b") as file:
        for place, tensor in pieces:
            if tensor.numel():
                file.seek(base + place)
                checkpoints.write_numbers(file, tensor)


def _gathered(item: Sliced, rank: Rank) -> Tensor:
    """Return the whole tensor, on every rank: collectives know no single receiver for uneven slices."""
    rows = item.rows.contiguous().to(rank.device)
    stride = torch.empty(item.shape, device="meta").stride()
    sharded = DTensor.from_local(
        rows, rank.mesh, [Shard(0)], run_check=False, shape=torch.Size(item.shape), stride=stride
    )
    return sharded.full_tensor()


def _is_shared(folder: Path, rank: Rank) -> bool:
    """Whether every rank sees the folder that rank 0 has made."""
    rank.barrier()
    return all(rank.gather((folder / TRAINING).is_dir()))


def _weight_layout(folder: Path, weights: Mapping[str, Sliced], rank: Rank) -> dict[Path, list[str]]:
    """Return which file holds which weights: one file, or several and an index, by their size alone."""
    sizes = {name: math.prod(item.shape) for name, item in weights.items()}
    files = max(1, -(-4 * sum(sizes.values()) // _FILE_BYTES))
    if files == 1:
        return {folder / checkpoints.WEIGHTS: sorted(weights)}
    parts = checkpoints.split_by_size(sizes, files)
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    if rank.index == 0:
        index = {
            "metadata": {"total_size": 4 * sum(sizes.values())},
            "weight_map": {name: file for file, part in zip(names, parts, strict=True) for name in part},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return {folder / file: part for file, part in zip(names, parts, strict=True)}


def _copy_surroundings(checkpoint: Path, folder: Path) -> None:
    """Copy config, tokenizer and what else lies beside the weights: an update changes only numbers."""
    for path in checkpoint.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, _MANIFEST):
            shutil.copyfile(path, folder / path.name)
