"""Adoption: an existing model (folder, hub id or GGUF file) becomes a plain, self-contained safetensors checkpoint.

What the config adds (chat template, end tokens, BOS) is written into the checkpoint, so that every stage, vLLM and
whoever runs the trained agent alone see the same agent.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hacrl_core.agents.agent import AGENT_FILE, end_token_ids
from hacrl_core.agents.gguf_tokenizers import converted_tokenizer
from hacrl_core.artifacts.sources import locate
from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.errors import ConfigError, EngineError
from hacrl_core.problems.rows import cache_only_without_network
from hacrl_core.rendering import render_prompt, turn_end

_PROBE = ({"role": "user", "content": "0"},)


@dataclass(frozen=True)
class Origin:
    """All of an existing checkpoint but its weights."""

    config: Any
    tokenizer: Any  # with the agent's chat template
    stop_token_ids: tuple[int, ...]  # the first one ends a turn
    commit: str | None  # of a hub id


def read_origin(config: CheckpointConfig, chat_template: str | None = None) -> Origin:
    """Read the model's config, tokenizer and end tokens, without its weights."""
    with _reading(config) as (place, options):
        model_config = AutoConfig.from_pretrained(place, **options)
        return _origin(config, model_config, _generation_config(place, options), chat_template, place, options)


def adopt_checkpoint(config: CheckpointConfig, out: Path, chat_template: str | None = None) -> tuple[Origin, int]:
    """Load a checkpoint and save it plainly; return what was read and the number of parameters.

    Reads safetensors or GGUF, and runs no remote code unless the config says so.
    """
    with _reading(config) as (place, options):
        safely = {} if config.gguf_file else {"use_safetensors": True}
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **safely, **options)
        origin = _origin(config, model.config, model.generation_config, chat_template, place, options)
    if config.gguf_file:
        # The weights are plain float32 by now, but the library still calls the model quantised and refuses to save it.
        model.hf_quantizer.remove_quantization_config(model)
    ids = list(origin.stop_token_ids)
    model.generation_config.eos_token_id = ids if len(ids) > 1 else ids[0]
    model.save_pretrained(out)
    origin.tokenizer.save_pretrained(out)
    if config.trust_remote_code:
        (out / AGENT_FILE).write_text(json.dumps({"trust_remote_code": True}) + "\n")
    return origin, sum(p.numel() for p in model.parameters())


def _origin(
    config: CheckpointConfig, model_config: Any, generation: Any, chat_template: str | None, place: str, options: Any
) -> Origin:
    tokenizer = _tokenizer(config, place, options)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if config.add_bos:
        _write_bos(config, tokenizer)
    stops = _stop_tokens(config, tokenizer, end_token_ids(config.path, tokenizer, generation, model_config))
    return Origin(model_config, tokenizer, stops, _commit(config))


def _tokenizer(config: CheckpointConfig, place: str, options: dict[str, Any]) -> Any:
    """Load the tokenizer; that of a GGUF file, whose conversion takes up to a minute, is converted once and kept."""
    file = Path(place) / (config.gguf_file or "")
    if not config.gguf_file or not file.is_file():
        return AutoTokenizer.from_pretrained(place, **options)
    return converted_tokenizer(file, lambda: AutoTokenizer.from_pretrained(place, **options))


def _stop_tokens(config: CheckpointConfig, tokenizer: Any, found: tuple[int, ...]) -> tuple[int, ...]:
    """Order the end tokens: the config's, the one that ends a turn in the chat template, the model's others."""
    vocabulary = tokenizer.get_vocab()
    unknown = [token for token in config.stop_tokens if token not in vocabulary]
    if unknown:
        raise ConfigError(
            f"checkpoint {config.path}: stop token {unknown[0]!r} is not one token of its vocabulary; "
            "correct checkpoint.stop_tokens"
        )
    wanted = tuple(int(vocabulary[token]) for token in config.stop_tokens)
    return tuple(dict.fromkeys((*wanted, turn_end(tokenizer, (*wanted, *found)), *found)))


def _commit(config: CheckpointConfig) -> str | None:
    """The commit that the files just read belong to: the cache keeps them in a folder of its name."""
    if isinstance(locate(config), Path):
        return None
    found = try_to_load_from_cache(config.path, config.gguf_file or "config.json", revision=config.revision)
    parts = Path(found).parts if isinstance(found, str) else ()
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else None


def _write_bos(config: CheckpointConfig, tokenizer: Any) -> None:
    if tokenizer.bos_token_id is None:
        raise ConfigError(
            f"checkpoint {config.path}: add_bos is set but its tokenizer has no BOS token; remove add_bos"
        )
    if render_prompt(tokenizer, _PROBE)[0] != tokenizer.bos_token_id:
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template


def _generation_config(place: str, options: dict[str, Any]) -> Any:
    plain = {name: value for name, value in options.items() if name != "gguf_file"}
    try:
        return GenerationConfig.from_pretrained(place, **plain)
    except OSError:
        return None  # not every checkpoint has one


@contextmanager
def _reading(config: CheckpointConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where to read from and with which options; what goes wrong becomes one line."""
    place = locate(config)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    options |= {"revision": config.revision} if config.revision else {}
    options |= {"gguf_file": config.gguf_file} if config.gguf_file else {}
    if isinstance(place, Path) and not config.gguf_file:
        _need_safetensors(config, [path.name for path in place.iterdir()])
    # Without a network the libraries would retry for a minute before they look into their cache.
    with nullcontext(False) if isinstance(place, Path) else cache_only_without_network() as offline:
        try:
            yield str(place), options
        except (OSError, ValueError, ImportError, EngineError) as problem:
            raise ConfigError(_why(config, offline, problem)) from problem


def _need_safetensors(config: CheckpointConfig, names: list[str]) -> None:
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth")) and "model" in name]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise ConfigError(_pickle_line(config, pickles[0]))


def _pickle_line(config: CheckpointConfig, file: str) -> str:
    return (
        f"checkpoint {config.path}: has its weights in {file} only, a pickle, which may run code when it is read; "
        "take a revision with safetensors, or load it once with transformers where you trust it and save_pretrained it "
        "into a folder"
    )


def _why(config: CheckpointConfig, offline: bool, problem: Exception) -> str:
    text = " ".join(str(problem).split())
    if isinstance(problem, EngineError):
        return text
    if offline and isinstance(problem, OSError):
        return (
            f"checkpoint {config.path}: no folder here, not in the local cache, and the hub cannot be reached "
            "(offline); fetch it once with network access, or give a folder"
        )
    if "trust_remote_code" in text:
        return (
            f"checkpoint {config.path}: it comes with Python code of its own, which is not run; "
            "read that code, then set checkpoint.trust_remote_code: true if you trust it"
        )
    if "model.safetensors" in text:
        return _pickle_line(config, "pytorch_model.bin")
    return f"checkpoint {config.path}: cannot be loaded: {text[:300]}"
