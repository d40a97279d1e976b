"""What identifies a checkpoint that lies outside the store."""

import hashlib
from pathlib import Path

from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.errors import ConfigError


def source_digest(config: CheckpointConfig) -> str:
    """What identifies the source: the content of a folder's files, or a hub id with its revision."""
    folder = Path(config.path)
    if not folder.is_dir():
        return f"hub:{config.path}@{config.revision or 'main'}"
    digest = hashlib.sha256()
    names = [config.gguf_file] if config.gguf_file else sorted(p.name for p in folder.iterdir() if p.is_file())
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"checkpoint {folder}: no file {name} in it; check checkpoint.gguf_file")
        with (folder / name).open("rb") as handle:
            digest.update(f"{name}\0{hashlib.file_digest(handle, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()
