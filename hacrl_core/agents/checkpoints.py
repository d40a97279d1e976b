"""Weights, tokenizer and optimizer on disk: safetensors and JSON, never pickle, the same bytes for the same numbers."""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hacrl_core.agents import small_files
from hacrl_core.agents.agent import AGENT_FILE, Agent, runs_own_code
from hacrl_core.artifacts.files import HashedFile, hashed_file
from hacrl_core.contracts.manifest import TRAINING
from hacrl_core.errors import EngineError

# In a folder of its own: vLLM and others take every *.safetensors beside config.json for weights.
_TENSORS = f"{TRAINING}/optimizer.safetensors"
_COUNTS = f"{TRAINING}/optimizer.json"
_FORMAT = "hacrl-adamw/1"  # one file
_SPLIT_FORMAT = "hacrl-adamw/2"  # several, each with the moments of some parameters
WEIGHTS = "model.safetensors"
_MANIFEST = "manifest.json"
# What stands beside the weights: architecture, tokenizer, template, generation settings.
_SURROUNDING = re.compile(
    r"(?:generation_)?config\.json|(?:tokenizer|special_tokens|vocab|merges).*|.*\.jinja", re.DOTALL
)
MOMENTS = ("exp_avg", "exp_avg_sq")
# Tensors are hashed and written in pieces of this size; handing a piece to a thread costs as much as hashing 100 KB.
_PIECE = 4 << 20
# A plain file gets them in the pieces in which a hashed one writes, see `hacrl_core.artifacts.files`.
_PLAIN_PIECE = 128 << 10


def save_model(agent: Agent, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Write weights (``state`` in place of the model's own), configs and tokenizer, as ``load_agent`` reads them.

    From the second update on only the numbers change. The other files are then copied, which is faster than writing
    them again and gives the same bytes.
    """
    if state is None and has_optimizer(agent.checkpoint) and _holds_plain_parameters(agent):
        for path in agent.checkpoint.iterdir():
            if path.is_file() and path.name not in (WEIGHTS, _MANIFEST):
                shutil.copyfile(path, folder / path.name)
        write_tensors(dict(agent.model.named_parameters()), folder / WEIGHTS, {"format": "pt"})
        return
    agent.model.save_pretrained(folder, state_dict=state)
    agent.tokenizer.save_pretrained(folder)
    if runs_own_code(agent.checkpoint):
        shutil.copyfile(agent.checkpoint / AGENT_FILE, folder / AGENT_FILE)


def _holds_plain_parameters(agent: Agent) -> bool:
    """Whether the weights are one file with exactly the model's parameters, under the same names."""
    file = agent.checkpoint / WEIGHTS
    if not file.is_file():
        return False
    names = small_files.names_in(file)
    if not names:
        with safe_open(file, framework="pt") as held:
            names = set(held.keys())
    return names == {name for name, _ in agent.model.named_parameters()}


def save_optimizer(
    folder: Path, optimizer: torch.optim.AdamW, names: Sequence[str], updates: int, *, files: int = 1
) -> None:
    """Write AdamW's moments and the number of updates they have seen, split by parameter into so many files."""
    tensors = {}
    sizes = {}
    for name, parameter in zip(names, optimizer.param_groups[0]["params"], strict=True):
        state = optimizer.state.get(parameter, {})
        sizes[name] = parameter.numel()
        for moment in MOMENTS:
            tensors[f"{moment}/{name}"] = state[moment] if state else torch.zeros_like(parameter)
    (folder / TRAINING).mkdir(exist_ok=True)
    for path, chosen in optimizer_layout(folder, sizes, files).items():
        write_tensors({entry: tensors[entry] for entry in chosen}, path)
    write_counts(folder, updates, files)


def optimizer_layout(folder: Path, sizes: Mapping[str, int], files: int) -> dict[Path, list[str]]:
    """Return which file holds which tensors; a function of the parameters and the number of files, of nothing else."""
    return {
        path: [f"{moment}/{name}" for moment in MOMENTS for name in chosen]
        for path, chosen in zip(_optimizer_paths(folder, files), split_by_size(sizes, files), strict=True)
    }


def write_counts(folder: Path, updates: int, files: int) -> None:
    """Write what belongs to the moments: their format, the updates that they have seen, the number of their files."""
    counts: dict[str, object] = {"format": _FORMAT, "updates": updates}
    if files > 1:
        counts = {"format": _SPLIT_FORMAT, "updates": updates, "files": files}
    (folder / _COUNTS).write_text(json.dumps(counts, sort_keys=True) + "\n")


def _optimizer_paths(folder: Path, files: int) -> list[Path]:
    if files == 1:
        return [folder / _TENSORS]
    return [folder / TRAINING / f"optimizer-{number:02d}-of-{files:02d}.safetensors" for number in range(1, files + 1)]


def split_by_size(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Split names into parts of about the same size: the largest first, each into the smallest part so far."""
    held = [0] * parts
    chosen: list[list[str]] = [[] for _ in range(parts)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = held.index(min(held))
        held[smallest] += sizes[name]
        chosen[smallest].append(name)
    return [sorted(names) for names in chosen]


def has_optimizer(folder: Path) -> bool:
    """Whether the checkpoint holds an optimizer's state, so that training goes on from it instead of starting at it."""
    return (folder / _COUNTS).exists()


def optimizer_files(folder: Path) -> tuple[int, list[Path]]:
    """Return the number of updates that saved moments have seen, and the files that hold them."""
    try:
        counts = json.loads((folder / _COUNTS).read_text())
        if counts.get("format") not in (_FORMAT, _SPLIT_FORMAT):
            raise EngineError(
                f"optimizer state {folder}: format {counts.get('format')!r} is neither {_FORMAT!r} nor "
                f"{_SPLIT_FORMAT!r}; start without it"
            )
        return int(counts["updates"]), _optimizer_paths(folder, int(counts.get("files", 1)))
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> EngineError:
    return EngineError(f"optimizer state {folder}: cannot be read ({error}); start without it or restore the folder")


def load_optimizer(folder: Path, optimizer: torch.optim.AdamW, names: Sequence[str]) -> int:
    """Restore AdamW's moments; return the number of updates they have seen."""
    updates, files = optimizer_files(folder)
    tensors: dict[str, Tensor] = {}
    try:
        for file in files:
            small = small_files.read_small(file)
            tensors |= load_file(file) if small is None else small
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(folder, error) from error
    parameters = optimizer.param_groups[0]["params"]
    if set(tensors) != {f"{moment}/{name}" for moment in MOMENTS for name in names}:
        raise EngineError(
            f"optimizer state {folder}: belongs to other parameters (changed model or LoRA settings); start without it"
        )
    for name, parameter in zip(names, parameters, strict=True):
        moments = {moment: tensors[f"{moment}/{name}"].to(parameter.device) for moment in MOMENTS}
        if any(moment.shape != parameter.shape for moment in moments.values()):
            raise EngineError(f"optimizer state {folder}: {name} has another shape than in the model; start without it")
        optimizer.state[parameter] = {"step": torch.tensor(float(updates), device=parameter.device), **moments}
    return updates


def reload_agent(agent: Agent, checkpoint: Path) -> Agent | None:
    """Load a checkpoint's weights into the agent's model; if more than the weights differs, return None instead.

    In RL only the numbers change, and building a tiny model takes longer than reading its weights.
    """
    if not (checkpoint / WEIGHTS).is_file() or _surroundings(agent.checkpoint) != _surroundings(checkpoint):
        return None
    own = dict(agent.model.named_parameters())  # a tied head appears once, under its first name
    small = small_files.read_small(checkpoint / WEIGHTS)
    if small is not None:
        if {name: t.shape for name, t in small.items()} != {name: t.shape for name, t in own.items()}:
            return None
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), [small[name] for name in own])
        return replace(agent, checkpoint=checkpoint)
    with safe_open(checkpoint / WEIGHTS, framework="pt") as file:
        if set(file.keys()) != set(own):
            return None
        if any(file.get_slice(name).get_shape() != list(parameter.shape) for name, parameter in own.items()):
            return None
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(file.get_tensor(name))
    return replace(agent, checkpoint=checkpoint)


def _surroundings(checkpoint: Path) -> dict[str, bytes]:
    """Read the files beside the weights that make an agent what it is; none of a version that was removed meanwhile."""
    try:
        with os.scandir(checkpoint) as entries:
            names = [entry.name for entry in entries if _SURROUNDING.fullmatch(entry.name) and entry.is_file()]
    except FileNotFoundError:
        return {}
    return {name: (checkpoint / name).read_bytes() for name in names}


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the bytes of ``safetensors.torch.save_file``, in small pieces, hashed meanwhile.

    Many float32 tensors are streamed, so that no second copy of a model is in memory; others are left to the library.
    """
    if any(tensor.dtype != torch.float32 for tensor in tensors.values()):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
        return
    names = sorted(tensors)
    head = tensors_head({name: tuple(tensors[name].shape) for name in names}, metadata)
    if sum(tensor.nbytes for tensor in tensors.values()) <= small_files.MOST_BYTES:
        small_files.write_small(path, head, {name: tensors[name] for name in names})
        return
    with hashed_file(path) as file:
        file.write(head)
        small: list[Tensor] = []
        for name in names:
            if sum(tensor.nbytes for tensor in small) + tensors[name].nbytes > _PIECE:
                _write_joined(file, small)
                small = []
            small.append(tensors[name])
        _write_joined(file, small)


def _write_joined(file: HashedFile, tensors: Sequence[Tensor]) -> None:
    """Write tensors one after the other; several are copied into one first."""
    if len(tensors) == 1:
        write_numbers(file, tensors[0])
    elif tensors:
        write_numbers(file, torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))


def write_numbers(file: BinaryIO | HashedFile, tensor: Tensor) -> None:
    """Write a float32 tensor's bytes at the file's place, in pieces."""
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    piece = _PIECE if isinstance(file, HashedFile) else _PLAIN_PIECE
    for start in range(0, len(content), piece):
        file.write(content[start : start + piece].data)


def tensors_head(shapes: Mapping[str, Sequence[int]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the head of a float32 safetensors file: its length, then JSON (name → dtype, shape, place), padded.

    The tensors follow in the order given, without gaps.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
