"""Agents that share a GPU take turns: whoever begins ends the process of who was there before, and with it all it held on the device.

Ending the process is the only way that frees everything: weights, optimizer, caches, the CUDA context and the engines it has started.
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
    """Where an agent's worker runs. None of it changes a result beyond rounding."""

    device: str = "auto"
    gpus: tuple[int, ...] = ()  # what it sees; empty: all
    attention: Attention = "auto"


class Sharer(Protocol):
    def rest(self) -> None:
        """End the process; the next call starts another."""


class Turn:
    """One at a time. Who comes twice in a row finds everything as it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Sharer | None = None

    @contextmanager
    def taken_by(self, sharer: Sharer) -> Iterator[None]:
        with self._lock:
            if self._last is not None and self._last is not sharer:
                self._last.rest()
            self._last = sharer
            yield


def turns_of(config: CampaignConfig) -> dict[str, Turn]:
    """The same turn for agents whose GPUs overlap, directly or through others; none for an agent that shares with nobody."""
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
    """Numbers of the machine's GPUs that an agent uses: those it is given, else those its device and its engine name."""
    if agent.gpus:
        return frozenset(agent.gpus)
    count = count_gpus() if machine is None else machine
    used: set[int] = set()
    if agent.device.startswith("cuda") or (agent.device == "auto" and count):
        used.add(int(agent.device.partition(":")[2] or 0))
    if isinstance(engine, VllmEngineConfig):
        used |= set(range(engine.tensor_parallel_size if count and engine.url is None else 0))
    elif engine.device.startswith("cuda"):
        used.add(int(engine.device.partition(":")[2] or 0))
    return frozenset(used)


def count_gpus() -> int:
    """Without torch, which the campaign's own process does without."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
