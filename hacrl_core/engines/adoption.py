"""Taking in an existing model: a folder, a hub id or a GGUF file becomes a plain safetensors checkpoint."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.errors import ConfigError


def adopt_checkpoint(config: CheckpointConfig, out: Path) -> dict[str, float]:
    """Load (safetensors or GGUF, no remote code unless the config says so), save plainly; returns the agent's size."""
    source = {"revision": config.revision} if config.revision else {}
    if config.gguf_file:
        source["gguf_file"] = config.gguf_file
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            **({} if config.gguf_file else {"use_safetensors": True}),
            **source,
        )
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code, **source)
    except (OSError, ValueError, ImportError) as problem:
        reason = " ".join(str(problem).split())[:300]
        raise ConfigError(f"checkpoint {config.path}: cannot be loaded: {reason}") from problem
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {"adopt/parameters": float(sum(p.numel() for p in model.parameters()))}
