"""Where an agent's stages run, and how processes that share a GPU take turns.

A stage has a role. ``sample`` (generate), ``evaluate`` and ``learn`` (score, update, first versions) use the agent's
device; ``check`` (verify) needs none; what is ``here`` (sample, credit) takes milliseconds and runs in the campaign's
own process. A *seat* is a process that serves one or more roles of an agent. On a CPU all roles share one seat. An
agent with a GPU has a second one for ``check``, so that verification never waits for the device. A role with GPUs of
its own (``agents.X.gpus_for``) has a seat of its own.

A turn ends the process that used the GPU before. Only the end of a process frees everything that it held on the device:
weights, optimizer, caches, the CUDA context and the engines it has started.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from flows.run.line import Line, Urgency
from hacrl_core.config.agents import AgentConfig, Attention
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.generation import EngineConfig, VllmEngineConfig

Role = Literal["sample", "evaluate", "learn", "check", "here"]
_ROLES: dict[str, Role] = {
    "sample": "here",
    "credit": "here",
    "share": "here",
    "verify": "check",
    "generate": "sample",
    "evaluate": "evaluate",
}


def role_of(stage: str) -> Role:
    """Return the role that runs a stage."""
    return _ROLES.get(stage, "learn")


@dataclass(frozen=True)
class Placement:
    """What a stage call gets to run on. It is plain data, and none of it changes a result beyond rounding."""

    device: str = "auto"
    gpus: tuple[int, ...] = ()  # the GPUs that the process sees; empty: all
    attention: Attention = "auto"
    threads: int = 1  # of torch, in each process
    node: str = ""  # the machine; empty: any
    own_code: bool = False  # whether the agent's checkpoint may run Python code of its own
    processes: int = 1  # that share the call: ranks of an update, replicas of an engine
    needs_torch: bool = True  # checking answers does not: its process starts sooner and is small
    profile: bool = False  # whether the process reports what it did
    profile_ops: tuple[str, ...] = ()  # the stages of which torch's operations are reported too


@dataclass(frozen=True)
class Seat:
    """A process that serves some roles of one agent."""

    name: str
    agent: str
    place: Placement
    gpus: frozenset[int]  # that it uses, also where its placement names none
    roles: frozenset[Role] = frozenset()


def placements_of(config: CampaignConfig) -> dict[str, Placement]:
    """Each agent's placement, as the campaign's config says it."""
    return {
        name: Placement(
            agent.device,
            agent.gpus,
            agent.attention,
            config.runtime.threads_per_agent,
            own_code=agent.own_code,
            profile=config.runtime.profile,
            profile_ops=config.runtime.profile_ops,
        )
        for name, agent in config.agents.items()
    }


def seats_of(
    config: CampaignConfig, machine: int | None = None, *, check_apart: bool = False
) -> dict[tuple[str, Role], Seat]:
    """Return the process that serves each role of each agent; ``machine`` is the number of GPUs, counted if not given.

    ``check_apart``: checking has a process of its own also where the agent has no GPU. Processes start with their first
    call, so a seat that nothing is asked of costs nothing.
    """
    seats: dict[tuple[str, Role], Seat] = {}
    for name, place in placements_of(config).items():
        agent = config.agents[name]
        used = gpus_of(agent, config.generation(name).engine, machine)
        main = Seat(name, name, place, used)
        apart: dict[Role, Seat] = {
            role: Seat(f"{name}/{role}", name, replace(place, gpus=gpus), frozenset(gpus))
            for role, gpus in agent.gpus_for.items()
        }
        if used or check_apart:
            beside = replace(place, device="cpu", gpus=(), needs_torch=False)
            apart["check"] = Seat(f"{name}/check", name, beside, frozenset())
        roles: tuple[Role, ...] = ("sample", "evaluate", "learn", "check")
        for role in roles:
            # Benchmarks are sampled where training samples, unless they have GPUs of their own.
            fallback = apart.get("sample", main) if role == "evaluate" else main
            seats[name, role] = apart.get(role, fallback)
    served = {seat.name: frozenset(role for (_, role), one in seats.items() if one is seat) for seat in seats.values()}
    whole = {seat.name: replace(seat, roles=served[seat.name]) for seat in seats.values()}
    return {key: whole[seat.name] for key, seat in seats.items()}


def deferring_agents(config: CampaignConfig, machine: int | None = None) -> frozenset[str]:
    """Return the agents that evaluate on the GPUs they learn on.

    Between score and update their weights stay on the device: an engine that starts beside them may find too little
    memory.
    """
    seats = seats_of(config, machine)
    return frozenset(a for a in config.agents if seats[a, "evaluate"].gpus & seats[a, "learn"].gpus)


class Sharer(Protocol):
    """A worker that shares a device with others."""

    def rest(self) -> None:
        """End the idle process; the next call starts another."""


class Turn:
    """Lets one process at a time use a device. Consecutive stages of one process reuse what it keeps warm."""

    def __init__(self) -> None:
        self._line = Line()
        self._last: Sharer | None = None

    @contextmanager
    def taken_by(self, sharer: Sharer, urgency: Urgency = (0, 0)) -> Iterator[None]:
        """Hold the turn inside; whoever held it last gives up its process first."""
        with self._line.turn(urgency):
            if self._last is not None and self._last is not sharer:
                self._last.rest()
            self._last = sharer
            yield


def turns_of(config: CampaignConfig) -> dict[str, Turn]:
    """Return one turn for all seats whose GPUs overlap, also through others; a seat that shares none has none."""
    used = {seat.name: seat.gpus for seat in seats_of(config).values()}
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


def computes_in_bfloat16(config: CampaignConfig) -> bool:
    """Whether an agent samples or learns in bfloat16 on the CPU."""
    for name, agent in config.agents.items():
        engine = config.generation(name).engine
        if agent.device == "cpu" or (agent.device == "auto" and not gpus_of(agent, engine)):
            halves = (config.training(name).autocast == "bf16", engine.dtype == "bfloat16")
            if any(halves):
                return True
    return False


def count_gpus() -> int:
    """Count the machine's GPUs without importing torch, which the campaign's own process does not need."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
