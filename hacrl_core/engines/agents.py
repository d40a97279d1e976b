"""An agent on disk and in memory: an ordinary ``transformers`` checkpoint folder, its model and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hacrl_core.errors import EngineError


@dataclass(frozen=True)
class Agent:
    model: PreTrainedModel
    tokenizer: Any
    stop_token_ids: tuple[int, ...]  # every end token of the model, not just the first
    checkpoint: Path

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.model.parameters()).device)

    @property
    def pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.stop_token_ids[0])

    @property
    def context_length(self) -> int:
        return int(getattr(self.model.config, "max_position_embeddings", 0) or 1 << 30)


def load_agent(
    checkpoint: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", tokenizer: Any = None
) -> Agent:
    """Load weights (safetensors only, no remote code) and, unless it is given, the tokenizer from a checkpoint folder."""
    if not (checkpoint / "config.json").is_file():
        raise EngineError(f"agent {checkpoint}: no config.json; give the folder of a transformers checkpoint")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    model.to(device)
    model.eval()
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(checkpoint)
    return Agent(model, tokenizer, stop_token_ids(model, tokenizer), checkpoint)


def load_tokenizer(checkpoint: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        reason = str(problem).splitlines()[0]
        raise EngineError(
            f"agent {checkpoint}: its tokenizer cannot be loaded ({reason}); the folder needs tokenizer.json"
        ) from problem


def stop_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """All end tokens: of the generation config (one id or several), the model config and the tokenizer."""
    found: list[int] = []
    for value in (
        getattr(model.generation_config, "eos_token_id", None),
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        ids = value if isinstance(value, list | tuple) else [value]
        found += [int(i) for i in ids if i is not None]
    if not found:
        raise EngineError(
            f"agent {model.name_or_path}: no end token in generation config, model config or tokenizer; set eos_token"
        )
    return tuple(dict.fromkeys(found))
