"""Weights, tokenizer and optimizer on disk: safetensors and JSON, never pickle, the same bytes for the same numbers."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hacrl_core.agents.agent import AGENT_FILE, Agent, runs_own_code
from hacrl_core.artifacts.files import hashed_file
from hacrl_core.errors import EngineError

# In a folder of its own: vLLM and others take every *.safetensors beside config.json for weights.
TRAINING = "training"
_TENSORS = f"{TRAINING}/optimizer.safetensors"
_COUNTS = f"{TRAINING}/optimizer.json"
_FORMAT = "hacrl-adamw/1"
WEIGHTS = "model.safetensors"
_MANIFEST = "manifest.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")
# One write call per tensor, as the library has it, puts large pages into the page cache, and on a machine with
# fragmented memory the kernel first has to move others out of the way. Pieces of 128 KiB took 1.4 ms for 3.5 MB where
# one call took 42 (Linux 6.18, ext4).
_PIECE = 128 * 1024


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
    with safe_open(file, framework="pt") as held:
        return set(held.keys()) == {name for name, _ in agent.model.named_parameters()}


def save_optimizer(folder: Path, optimizer: torch.optim.AdamW, names: Sequence[str], updates: int) -> None:
    """Write AdamW's moments and the number of updates they have seen."""
    tensors = {}
    for name, parameter in zip(names, optimizer.param_groups[0]["params"], strict=True):
        state = optimizer.state.get(parameter, {})
        for moment in _MOMENTS:
            tensors[f"{moment}/{name}"] = state[moment] if state else torch.zeros_like(parameter)
    (folder / TRAINING).mkdir(exist_ok=True)
    write_tensors(tensors, folder / _TENSORS)
    (folder / _COUNTS).write_text(json.dumps({"format": _FORMAT, "updates": updates}, sort_keys=True) + "\n")


def has_optimizer(folder: Path) -> bool:
    """Whether the checkpoint holds an optimizer's state, so that training goes on from it instead of starting at it."""
    return (folder / _TENSORS).exists()


def load_optimizer(folder: Path, optimizer: torch.optim.AdamW, names: Sequence[str]) -> int:
    """Restore AdamW's moments; return the number of updates they have seen."""
    try:
        counts = json.loads((folder / _COUNTS).read_text())
        tensors = load_file(folder / _TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(
            f"optimizer state {folder}: cannot be read ({error}); start without it or restore the folder"
        ) from error
    if counts.get("format") != _FORMAT:
        raise EngineError(
            f"optimizer state {folder}: format {counts.get('format')!r} is not {_FORMAT!r}; start without it"
        )
    updates = int(counts["updates"])
    parameters = optimizer.param_groups[0]["params"]
    if set(tensors) != {f"{moment}/{name}" for moment in _MOMENTS for name in names}:
        raise EngineError(
            f"optimizer state {folder}: belongs to other parameters (changed model or LoRA settings); start without it"
        )
    for name, parameter in zip(names, parameters, strict=True):
        moments = {moment: tensors[f"{moment}/{name}"].to(parameter.device) for moment in _MOMENTS}
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
    """Read all files beside the weights: architecture, tokenizer, template, generation settings."""
    kinds = ("config.json", "generation_config.json", "tokenizer*", "special_tokens*", "*.jinja", "vocab*", "merges*")
    return {path.name: path.read_bytes() for kind in kinds for path in checkpoint.glob(kind) if path.is_file()}


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the bytes of ``safetensors.torch.save_file``, in small pieces, hashed meanwhile.

    Float32 tensors are streamed, so that no second copy of a model is in memory; others are left to the library.
    """
    if any(tensor.dtype != torch.float32 for tensor in tensors.values()):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
        return
    names = sorted(tensors)
    with hashed_file(path) as file:
        file.write(_head({name: tensors[name] for name in names}, metadata))
        for name in names:
            content = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            for start in range(0, len(content), _PIECE):
                file.write(content[start : start + _PIECE].data)


def _head(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """Return the file's header: its length, then JSON (name → dtype, shape, place), padded to eight bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
