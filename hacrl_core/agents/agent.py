"""An agent on disk and in memory: an ordinary ``transformers`` checkpoint folder, its model and its tokenizer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from hacrl_core.agents.out_of_memory import LOADING, out_of_memory_explained
from hacrl_core.config.agents import Attention
from hacrl_core.errors import EngineError

# Written only where the campaign's config lets the checkpoint run its own code; the others have none.
AGENT_FILE = "agent.json"


@dataclass(frozen=True)
class Agent:
    """A loaded agent: model, tokenizer and end tokens of one checkpoint."""

    model: PreTrainedModel
    tokenizer: Any
    stop_token_ids: tuple[int, ...]  # every end token of the model, not just the first
    checkpoint: Path

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return torch.device(next(self.model.parameters()).device)

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding token, or an end token where it has none."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.stop_token_ids[0])

    @property
    def context_length(self) -> int:
        """The most positions the model has; practically unlimited where its config names no limit."""
        return context_length(self.model)


def context_length(model: PreTrainedModel) -> int:
    """Return the most positions a model has; practically unlimited where its config names no limit."""
    return int(getattr(model.config, "max_position_embeddings", 0) or 1 << 30)


def load_agent(
    checkpoint: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tokenizer: Any = None,
    attention: Attention = "auto",
    own_code: bool = False,
) -> Agent:
    """Load weights and, unless it is given, the tokenizer.

    Reads safetensors only, and runs no code of the checkpoint unless ``own_code``: the campaign's config allows it.
    """
    if not (checkpoint / "config.json").is_file():
        raise EngineError(f"agent {checkpoint}: no config.json; give the folder of a transformers checkpoint")
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    trusted = is_trusted(checkpoint, own_code)
    try:
        with out_of_memory_explained(checkpoint, f"loading it on {device}", LOADING):
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=dtype, use_safetensors=True, trust_remote_code=trusted, **chosen
            )
            model.to(device)
    except (ImportError, ValueError) as problem:
        if attention == "auto":
            raise
        reason = " ".join(str(problem).split())[:200]
        raise EngineError(
            f"agent {checkpoint}: attention {attention} is not available here ({reason}); set its attention to auto"
        ) from problem
    model.eval()
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(checkpoint, own_code=own_code)
    return Agent(model, tokenizer, stop_token_ids(model, tokenizer), checkpoint)


def load_tokenizer(checkpoint: Path, *, own_code: bool = False) -> Any:
    """Load a checkpoint's tokenizer, and run code of the checkpoint only if ``own_code``."""
    trusted = is_trusted(checkpoint, own_code)
    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trusted)
    except (OSError, ValueError) as problem:
        reason = str(problem).splitlines()[0]
        raise EngineError(
            f"agent {checkpoint}: its tokenizer cannot be loaded ({reason}); the folder needs tokenizer.json"
        ) from problem


@dataclass(frozen=True)
class Reader:
    """An agent without its weights: it reads and writes text."""

    tokenizer: Any
    stop_token_ids: tuple[int, ...]


def read_agent(checkpoint: Path, tokenizer: Any, *, own_code: bool = False) -> Reader:
    """Read the end tokens of a checkpoint as `load_agent` finds them, without loading its weights."""
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=is_trusted(checkpoint, own_code))
    try:
        generation = GenerationConfig.from_pretrained(checkpoint)
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    return Reader(tokenizer, end_token_ids(str(checkpoint), tokenizer, generation, config))


def runs_own_code(checkpoint: Path) -> bool:
    """Whether the checkpoint was adopted with code of its own. Whether that may run is for the config to say."""
    file = checkpoint / AGENT_FILE
    return file.is_file() and json.loads(file.read_text()).get("trust_remote_code") is True


def is_trusted(checkpoint: Path, own_code: bool) -> bool:
    """Say whether the checkpoint's code is to run: a file in a store that somebody else made must not decide that."""
    needed = runs_own_code(checkpoint)
    if needed and not own_code:
        raise EngineError(
            f"agent {checkpoint}: wants to run Python code of its own, and the campaign's config does not allow it; "
            "set the agent's checkpoint.trust_remote_code: true if you trust that code, else delete this folder"
        )
    return needed


def stop_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """All end tokens of a loaded agent; the first one ends a turn."""
    return end_token_ids(model.name_or_path, tokenizer, model.generation_config, model.config)


def end_token_ids(name: str, tokenizer: Any, *configs: Any) -> tuple[int, ...]:
    """All end tokens: of the generation config (one id or several), the model config and the tokenizer."""
    found: list[int] = []
    for value in (*(getattr(config, "eos_token_id", None) for config in configs), tokenizer.eos_token_id):
        ids = value if isinstance(value, list | tuple) else [value]
        found += [int(i) for i in ids if i is not None]
    if not found:
        raise EngineError(f"agent {name}: no end token in generation config, model config or tokenizer; set eos_token")
    return tuple(dict.fromkeys(found))
