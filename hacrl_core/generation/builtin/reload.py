"""New weights into a model that is already there: in RL only the numbers change, and building a model takes a tiny one's time."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from hacrl_core.agents.agent import Agent
from hacrl_core.agents.checkpoints import WEIGHTS


def reload_agent(agent: Agent, checkpoint: Path) -> Agent | None:
    """The agent with the checkpoint's weights, or None when anything but the weights differs; then nothing was changed."""
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
    """Everything beside the weights: architecture, tokenizer, template, generation settings."""
    kinds = ("config.json", "generation_config.json", "tokenizer*", "special_tokens*", "*.jinja", "vocab*", "merges*")
    return {path.name: path.read_bytes() for kind in kinds for path in checkpoint.glob(kind) if path.is_file()}
