"""Where an agent's stages run, and how agents that share a GPU take turns.

A turn ends the process of the agent that used the GPU before. Only the end of a process frees everything that it held
on the device: weights, optimizer, caches, the CUDA context and the engines it has started.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hacrl_core.config.agents import AgentConfig, Attention
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.generation import EngineConfig, VllmEngineConfig


@dataclass(frozen=True)
class Placement:
    """What a stage call gets to run on. It is plain data, and none of it changes a result beyond rounding."""

    device: str = "auto"
    gpus: tuple[int, ...] = ()  # the GPUs that the process sees; empty: all
    attention: Attention = "auto"
    threads: int = 1  # of torch, in each process
    node: str = ""  # the machine; empty: this one, the only one that today's executors know
    own_code: bool = False  # whether the agent's checkpoint may run Python code of its own
    processes: int = 1  # that share the call: ranks of an update, replicas of an engine


def placements_of(config: CampaignConfig) -> dict[str, Placement]:
    """Each agent's placement, as the campaign's config says it."""
    return {
        name: Placement(
            agent.device, agent.gpus, agent.attention, config.runtime.threads_per_agent, own_code=agent.own_code
        )
        for name, agent in config.agents.items()
    }


class Sharer(Protocol):
    """A worker that shares a device with others."""

    def rest(self) -> None:
        """End the idle process; the next call starts another."""


class Turn:
    """Lets one agent at a time use a device. Consecutive stages of one agent reuse its warm process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Sharer | None = None

    @contextmanager
    def taken_by(self, sharer: Sharer) -> Iterator[None]:
        """Hold the turn inside; whoever held it last gives up its process first."""
        with self._lock:
            if self._last is not None and self._last is not sharer:
                self._last.rest()
            self._last = sharer
            yield


def turns_of(config: CampaignConfig) -> dict[str, Turn]:
    """Return one turn for all agents whose GPUs overlap, also through others; an agent that shares none has none."""
    used = {name: gpus_of(agent, config.generation(name).engine) for name, agent in config.agents.items()}
    turns: dict[str, Turn] = {}
    for name in used:
        group, frontier = {name}, set(used[name])
        while more := {n for n in used if n not in group and used[n] & frontier}:
            group |= more
            frontier |= set().union(*(used[n] for n in more))
        if len(group) > 1:
            turns[name] = next((turns[n] for n in group if n in turns), None) or Turn()
    return turns


def gpus_of(agent: AgentConfig, engine: EngineConfig, machine: int | None = None) -> frozenset[int]:
    """Return the numbers of the GPUs that an agent uses: its own, else those that its device and engine name."""
    if agent.gpus:
        return frozenset(agent.gpus)
    count = count_gpus() if machine is None else machine
    used: set[int] = set()
    if agent.device.startswith("cuda") or (agent.device == "auto" and count):
        used.add(int(agent.device.partition(":")[2] or 0))
    if isinstance(engine, VllmEngineConfig):
        width = engine.tensor_parallel_size * engine.replicas
        used |= set(range(width if count and engine.url is None else 0))
    elif engine.device.startswith("cuda"):
        used.add(int(engine.device.partition(":")[2] or 0))
    return frozenset(used)


def count_gpus() -> int:
    """Count the machine's GPUs without importing torch, which the campaign's own process does not need."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
