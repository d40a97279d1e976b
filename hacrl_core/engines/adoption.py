"""Taking in an existing model: a folder, a hub id or a GGUF file becomes a plain safetensors checkpoint."""

from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.errors import ConfigError
from hacrl_core.problems.rows import cache_only_without_network


def adopt_checkpoint(config: CheckpointConfig, out: Path) -> dict[str, float]:
    """Load (safetensors or GGUF, no remote code unless the config says so), save plainly; returns the agent's size."""
    source = {"revision": config.revision} if config.revision else {}
    if config.gguf_file:
        source["gguf_file"] = config.gguf_file
    # Without a network the libraries would retry for a minute before they look into their cache.
    with nullcontext(False) if Path(config.path).is_dir() else cache_only_without_network() as offline:
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
            raise ConfigError(_why(config, offline, problem)) from problem
    if config.gguf_file:
        # The weights are plain float32 by now, but the library still calls the model quantised and refuses to save it.
        model.hf_quantizer.remove_quantization_config(model)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {"adopt/parameters": float(sum(p.numel() for p in model.parameters()))}


def _why(config: CheckpointConfig, offline: bool, problem: Exception) -> str:
    if offline and isinstance(problem, OSError):
        return (
            f"checkpoint {config.path}: no folder here, not in the local cache, and the hub cannot be reached (offline); "
            "fetch it once with network access, or give a folder"
        )
    return f"checkpoint {config.path}: cannot be loaded: {' '.join(str(problem).split())[:300]}"
