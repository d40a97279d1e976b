"""Things a process keeps warm between stages: loaded tokenizers, agents and generation engines.

The owner of the dictionary decides how long they live; nothing here is global. Only the newest version of an agent is kept.
"""

import contextlib
import ctypes
import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hacrl_core.agents.agent import Agent, load_agent, load_tokenizer
from hacrl_core.config.agents import Attention
from hacrl_core.config.generation import BuiltinEngineConfig, GenerateConfig
from hacrl_core.generation.factory import create_engine
from hacrl_core.generation.protocols import GenerationEngine
from hacrl_core.rendering import tokenizer_fingerprint

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_WORTH_GIVING_BACK = 64 << 20  # bytes of weights; gradient, moments and activations are a multiple of that
Warm = dict[str, Any]
# The first version's files are written by another hand than the later ones', and KL needs both in every iteration.
MOST_TOKENIZERS = 3


def warm_tokenizer(warm: Warm, checkpoint: Path) -> tuple[Any, str]:
    """A checkpoint's tokenizer and its fingerprint. Updates change weights, not tokenizers, so it is known by its files."""
    digest = hashlib.sha256()
    for path in sorted(
        [*checkpoint.glob("tokenizer*"), *checkpoint.glob("*.jinja"), *checkpoint.glob("special_tokens*")]
    ):
        digest.update(path.name.encode() + path.read_bytes())
    kept: dict[bytes, tuple[Any, str]] = warm.setdefault("tokenizers", {})
    known = digest.digest()
    if known not in kept:
        while len(kept) >= MOST_TOKENIZERS:
            del kept[next(iter(kept))]
        tokenizer = load_tokenizer(checkpoint)
        kept[known] = (tokenizer, tokenizer_fingerprint(tokenizer))
    return kept[known]


def warm_agent(
    warm: Warm,
    checkpoint: Path,
    policy_digest: str,
    *,
    device: str,
    dtype: torch.dtype = torch.float32,
    slot: str = "agent",
    attention: Attention = "auto",
) -> Agent:
    """The agent of these weights. Each slot keeps one: the newest version, and where memory is no concern the first one, for KL."""
    wanted = (policy_digest, device, dtype)
    kept = warm.get(slot)
    if kept is None or kept[0] != wanted:
        warm.pop(slot, None)  # let go of the old weights before the new ones come in
        kept = warm[slot] = (
            wanted,
            load_agent(
                checkpoint,
                dtype=dtype,
                device=device,
                tokenizer=warm_tokenizer(warm, checkpoint)[0],
                attention=attention,
            ),
        )
    agent: Agent = kept[1]
    return agent


def take_agent(
    warm: Warm, checkpoint: Path, policy_digest: str, *, device: str, attention: Attention = "auto"
) -> Agent:
    """The agent of these weights in float32, to be trained: it is no longer kept, so that a failure leaves no half-trained one behind."""
    agent = warm_agent(warm, checkpoint, policy_digest, device=device, attention=attention)
    del warm["agent"]
    if sum(p.numel() * p.element_size() for p in agent.model.parameters()) < _WORTH_GIVING_BACK:
        _keep_freed_memory()
    return agent


def keep_agent(warm: Warm, agent: Agent, checkpoint: Path, policy_digest: str, *, device: str) -> None:
    """Keep an agent whose weights have just been published as ``policy_digest``. Its tokenizer is that of the new files, as after loading."""
    tokenizer = warm_tokenizer(warm, checkpoint)[0]
    warm["agent"] = (
        (policy_digest, device, torch.float32),
        replace(agent, checkpoint=checkpoint, tokenizer=tokenizer),
    )


def warm_engine(warm: Warm, config: GenerateConfig, device: str) -> GenerationEngine:
    """The engine of this config. Limits on prompts are the stages' business: generation and benchmarks share one engine."""
    engine_config = config.engine
    if isinstance(engine_config, BuiltinEngineConfig) and engine_config.device == "auto":
        engine_config = engine_config.model_copy(update={"device": device})
    config = config.model_copy(update={"max_prompt_tokens": None, "engine": engine_config})
    kept = warm.get("engine")
    if kept is None or kept[0] != config:
        if kept is not None:
            kept[1].close()
        kept = warm["engine"] = (config, create_engine(config))
    engine: GenerationEngine = kept[1]
    return engine


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep up to a quarter of a gigabyte that was freed. By itself it returns every larger block at once, and a tiny
    model's update asked the system for 75 MB of the same pages again: a tenth of its time."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest value it takes; larger blocks go back as ever
        libc.mallopt(_TRIM_THRESHOLD, 256 << 20)


def give_back_memory(of: int | None = None) -> None:
    """Return what was freed to the system. An update frees gigabytes, and the C library and CUDA's allocator keep them for next time.

    After an update of a model of few bytes (``of``) that is not worth it: the next one would ask for every page again.
    """
    if of is not None and of < _WORTH_GIVING_BACK:
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def close_warm(warm: Warm) -> None:
    """Stop what runs and let go of what is held: engines with worker processes, weights on a device."""
    if "engine" in warm:
        warm["engine"][1].close()
    for kept in warm.values():
        if isinstance(kept, dict):  # a process that serves several agents keeps each one's things apart
            close_warm(kept)
    warm.clear()
    give_back_memory()
