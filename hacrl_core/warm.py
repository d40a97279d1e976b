"""What a process keeps loaded between stages: tokenizers, agents, a generation engine and the problems.

The owner of a `WarmModels` decides how long it lives; nothing here is global. None of it changes a result. The module
imports torch only when something is loaded, so that a campaign answered from the cache never does.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl_core.config.agents import Attention
from hacrl_core.config.generation import BuiltinEngineConfig, GenerateConfig

if TYPE_CHECKING:
    from hacrl_core.agents.agent import Agent
    from hacrl_core.generation.protocols import GenerationEngine
    from hacrl_core.learning.sharded.ranks import RankGroup, StartRank
    from hacrl_core.problems import ProblemSet

# Bytes of weights; gradient, moments and activations are a multiple of that.
_WORTH_GIVING_BACK = 64 << 20
_OF_TOKENIZER = re.compile(r"tokenizer|special_tokens|.*\.jinja$", re.DOTALL)
# The tokenizer files of a first version differ from those of its updates, and KL needs both in every iteration.
MOST_TOKENIZERS = 3


@dataclass(frozen=True)
class LoadedAgent:
    """An agent in memory, and the weights and device it was loaded for."""

    policy_digest: str
    device: str
    agent: "Agent"


@dataclass
class WarmModels:
    """Loaded models of one agent, newest version only.

    A process that serves several agents keeps one per agent: `for_agent`.
    """

    # The campaign's config lets the agent's checkpoint run Python code of its own.
    own_code: bool = False
    newest: LoadedAgent | None = None
    first: LoadedAgent | None = None
    # How ranks other than this process are started; None: as processes on this machine.
    start_rank: "StartRank | None" = None
    # How an engine is made; None: in this process. An executor of several machines may spread it.
    make_engine: "Callable[[GenerateConfig, bool], GenerationEngine] | None" = None
    # Where ranks of other machines find this one.
    address: str = "127.0.0.1"
    _tokenizers: dict[bytes, tuple[Any, str]] = field(default_factory=dict)
    # The tokenizer files that were hashed last, as the system knows them, and their digest.
    _hashed: tuple[tuple[tuple[str, int, int, int, int], ...], bytes] | None = None
    _engine: "tuple[GenerateConfig, GenerationEngine] | None" = None
    _ranks: "RankGroup | None" = None
    _problems: "tuple[object, ProblemSet] | None" = None
    _agents: "dict[str, WarmModels]" = field(default_factory=dict)

    def tokenizer(self, checkpoint: Path) -> tuple[Any, str]:
        """Return a checkpoint's tokenizer and its fingerprint. Tokenizers are kept by the content of their files."""
        from hacrl_core.agents.agent import load_tokenizer
        from hacrl_core.rendering import tokenizer_fingerprint

        known = self._content(checkpoint)
        if known not in self._tokenizers:
            while len(self._tokenizers) >= MOST_TOKENIZERS:
                del self._tokenizers[next(iter(self._tokenizers))]
            tokenizer = load_tokenizer(checkpoint, own_code=self.own_code)
            self._tokenizers[known] = (tokenizer, tokenizer_fingerprint(tokenizer))
        return self._tokenizers[known]

    def _content(self, checkpoint: Path) -> bytes:
        """Return a digest of a checkpoint's tokenizer files, hashed again only where they are others than last time."""
        with os.scandir(checkpoint) as entries:
            files = sorted((entry.name, entry.stat()) for entry in entries if _OF_TOKENIZER.match(entry.name))
        seen = tuple((name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in files)
        if self._hashed is None or self._hashed[0] != seen:
            digest = hashlib.sha256()
            for name, _ in files:
                digest.update(name.encode() + (checkpoint / name).read_bytes())
            self._hashed = (seen, digest.digest())
        return self._hashed[1]

    def agent(self, checkpoint: Path, policy_digest: str, *, device: str, attention: Attention = "auto") -> "Agent":
        """Return the agent of these weights in float32, loading it in place of the version kept before."""
        if self.newest is None or (self.newest.policy_digest, self.newest.device) != (policy_digest, device):
            self.newest = None  # frees the old weights before the new ones are loaded
            self.newest = self._load(checkpoint, policy_digest, device, attention)
        return self.newest.agent

    def first_version(
        self, checkpoint: Path, policy_digest: str, *, device: str, attention: Attention = "auto"
    ) -> "Agent":
        """Return the agent's first version, the reference of KL; kept beside the newest one."""
        if self.first is None or (self.first.policy_digest, self.first.device) != (policy_digest, device):
            self.first = None
            self.first = self._load(checkpoint, policy_digest, device, attention)
        return self.first.agent

    def has_room_for_first(self, device: str) -> bool:
        """Whether the first version may stay on the device beside the newest one while that is trained.

        A GPU must have room for its weights and for gradient and moments of the newest, with a quarter to spare for
        activations; where it has not, the first version takes the newest one's place.
        """
        if not device.startswith("cuda") or (self.first is not None and self.first.device == device):
            return True
        if self.newest is None:
            return False
        import torch

        weights = sum(p.numel() * p.element_size() for p in self.newest.agent.model.parameters())
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return bool(free - torch.cuda.memory_allocated(device) > 5 * weights)

    def take_agent(
        self, checkpoint: Path, policy_digest: str, *, device: str, attention: Attention = "auto"
    ) -> "Agent":
        """Return the agent of these weights to be trained, and keep it no longer.

        A failure must not leave a half-trained agent here.
        """
        agent = self.agent(checkpoint, policy_digest, device=device, attention=attention)
        self.newest = None
        if sum(p.numel() * p.element_size() for p in agent.model.parameters()) < _WORTH_GIVING_BACK:
            _keep_freed_memory()
        return agent

    def keep_agent(self, agent: "Agent", checkpoint: Path, policy_digest: str, *, device: str) -> None:
        """Keep an agent whose weights were just published as ``policy_digest``.

        Its tokenizer becomes that of the published files.
        """
        tokenizer, _ = self.tokenizer(checkpoint)
        self.newest = LoadedAgent(policy_digest, device, replace(agent, checkpoint=checkpoint, tokenizer=tokenizer))

    def engine(self, config: GenerateConfig, device: str) -> "GenerationEngine":
        """Return the engine of this config.

        Stages check the limit on prompts, so that generation and benchmarks share one engine.
        """
        from hacrl_core.generation import create_engine

        engine_config = config.engine
        if isinstance(engine_config, BuiltinEngineConfig) and engine_config.device == "auto":
            engine_config = engine_config.model_copy(update={"device": device})
        config = config.model_copy(update={"max_prompt_tokens": None, "engine": engine_config})
        if self._engine is None or self._engine[0] != config:
            if self._engine is not None:
                self._engine[1].close()
            make = self.make_engine or (lambda config, own_code: create_engine(config, own_code=own_code))
            self._engine = (config, make(config, self.own_code))
        return self._engine[1]

    def ranks(self, count: int, device: str) -> "RankGroup":
        """Return a group of ranks with this process as rank 0. It takes the place of weights that are kept here."""
        from hacrl_core.learning.sharded.ranks import RankGroup

        group = self._ranks
        if group is None or not group.is_open or (group.count, group.device) != (count, device):
            if group is not None:
                group.close()
            self.newest = self.first = None
            self._ranks = RankGroup(count, device, start=self.start_rank, address=self.address)
            return self._ranks
        return group

    @property
    def has_engine(self) -> bool:
        """Whether a generation engine is kept."""
        return self._engine is not None

    def problems(self, known: object, load: "Callable[[], ProblemSet]") -> "ProblemSet":
        """Return the problems that were loaded under this key, or load them."""
        if self._problems is None or self._problems[0] != known:
            self._problems = (known, load())
        return self._problems[1]

    def for_agent(self, name: str, *, own_code: bool = False) -> "WarmModels":
        """Return what is kept for one of several agents that this process serves."""
        kept = self._agents.setdefault(name, WarmModels())
        if kept.own_code != own_code:
            # Another campaign's agent of the same name: an engine keeps what it was allowed.
            kept.close()
            kept.own_code = own_code
        return kept

    def close(self) -> None:
        """Stop the engine's worker processes and release weights and memory, also those of `for_agent`."""
        if self._engine is not None:
            self._engine[1].close()
        if self._ranks is not None:
            self._ranks.close()
        for kept in self._agents.values():
            kept.close()
        self._ranks = None
        self.newest = self.first = self._engine = self._problems = None
        self._tokenizers.clear()
        self._agents.clear()
        give_back_memory()

    def _load(self, checkpoint: Path, policy_digest: str, device: str, attention: Attention) -> LoadedAgent:
        import torch

        from hacrl_core.agents.agent import load_agent

        tokenizer, _ = self.tokenizer(checkpoint)
        agent = load_agent(
            checkpoint,
            dtype=torch.float32,
            device=device,
            tokenizer=tokenizer,
            attention=attention,
            own_code=self.own_code,
        )
        return LoadedAgent(policy_digest, device, agent)


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep up to a quarter of a gigabyte of freed memory.

    By default it returns every larger block at once. A tiny model's update then asked the system for the same 75 MB of
    pages again, which took a tenth of its time.
    """
    from hacrl_core.agents.freed_memory import keep_freed_blocks

    keep_freed_blocks(256 << 20)


def give_back_memory(of: int | None = None) -> None:
    """Return freed memory to the system. An update frees gigabytes that the C library and CUDA's allocator would keep.

    After an update of a model of few bytes (``of``) that is not worth it: the next one would ask for every page again.
    """
    if of is not None and of < _WORTH_GIVING_BACK:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
