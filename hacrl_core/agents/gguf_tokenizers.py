"""Tokenizers of GGUF files, converted once per file and kept in the user's cache.

A file of 262k tokens takes most of a minute to convert, and every `hacrl doctor` would convert it again.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import transformers


def converted_tokenizer(file: Path, convert: Callable[[], Any]) -> Any:
    """Return the tokenizer of a GGUF file: from the cache, or converted and put there.

    What is returned was always read from a folder, so that it is the same whether or not it was in the cache. A cache
    that cannot be written costs a conversion and nothing else.
    """
    kept = cache_folder() / _key(file)
    if not (kept / "tokenizer.json").is_file():
        with tempfile.TemporaryDirectory() as draft:
            convert().save_pretrained(draft)
            if not _keep(Path(draft), kept):
                return _read(Path(draft))
    return _read(kept)


def cache_folder() -> Path:
    """Return where converted tokenizers are kept; ``XDG_CACHE_HOME`` moves it. Whatever is in it may be deleted."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hacrl" / "gguf-tokenizers"


def _key(file: Path) -> str:
    """What the conversion depends on: the file's content, and the libraries that convert it."""
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256")
    digest.update(f"{transformers.__version__} {tokenizers.__version__}".encode())
    return digest.hexdigest()[:32]


def _read(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def _keep(draft: Path, kept: Path) -> bool:
    """Copy a draft into the cache in one step; several processes may do so at once."""
    beside = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        shutil.copytree(draft, beside)
        try:
            beside.rename(kept)
        except OSError:  # another process was first
            shutil.rmtree(beside, ignore_errors=True)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        return False
    return (kept / "tokenizer.json").is_file()
