"""Weights, tokenizer and optimizer on disk: safetensors and JSON, never pickle, the same bytes for the same numbers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from hacrl_core.agents.agent import AGENT_FILE, Agent, runs_own_code
from hacrl_core.agents.tensorfiles import write_tensors
from hacrl_core.errors import EngineError

# In a folder of its own: vLLM and others take every *.safetensors beside config.json for weights.
TRAINING = "training"
_TENSORS, _COUNTS, _FORMAT = f"{TRAINING}/optimizer.safetensors", f"{TRAINING}/optimizer.json", "hacrl-adamw/1"
WEIGHTS, _MANIFEST = "model.safetensors", "manifest.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_model(agent: Agent, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Weights (``state`` instead of the model's own where given), configs and tokenizer, as ``load_agent`` wants them.

    An update after an update changes numbers only: the rest is copied, which takes a fraction of the time of writing it again and gives the same bytes.
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
    """One file with exactly the model's parameters: no shards, no buffers, no names that loading translates."""
    file = agent.checkpoint / WEIGHTS
    if not file.is_file():
        return False
    with safe_open(file, framework="pt") as held:
        return set(held.keys()) == {name for name, _ in agent.model.named_parameters()}


def save_optimizer(folder: Path, optimizer: torch.optim.AdamW, names: Sequence[str], updates: int) -> None:
    tensors = {}
    for name, parameter in zip(names, optimizer.param_groups[0]["params"], strict=True):
        state = optimizer.state.get(parameter, {})
        for moment in _MOMENTS:
            tensors[f"{moment}/{name}"] = state[moment] if state else torch.zeros_like(parameter)
    (folder / TRAINING).mkdir(exist_ok=True)
    write_tensors(tensors, folder / _TENSORS)
    (folder / _COUNTS).write_text(json.dumps({"format": _FORMAT, "updates": updates}, sort_keys=True) + "\n")


def has_optimizer(folder: Path) -> bool:
    """Whether training goes on from this checkpoint, or starts at it."""
    return (folder / _TENSORS).exists()


def load_optimizer(folder: Path, optimizer: torch.optim.AdamW, names: Sequence[str]) -> int:
    """Put the moments back; return the number of updates they have seen."""
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
