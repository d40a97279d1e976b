"""Taking in an existing model: a folder, a hub id or a GGUF file becomes a plain safetensors checkpoint."""

import hashlib
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


def source_digest(config: CheckpointConfig) -> str:
    """What identifies the source: the content of a folder's files, or a hub id with its revision."""
    folder = Path(config.path)
    if not folder.is_dir():
        return f"hub:{config.path}@{config.revision or 'main'}"
    digest = hashlib.sha256()
    names = [config.gguf_file] if config.gguf_file else sorted(p.name for p in folder.iterdir() if p.is_file())
    for name in names:
        with (folder / name).open("rb") as handle:
            digest.update(f"{name}\0{hashlib.file_digest(handle, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()
