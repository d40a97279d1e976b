"""The plan of a campaign on a cluster: memory, time, disk, idle GPUs and critical path, as plain data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flows.plan.graph import record_graph, workload_of
from flows.plan.rates import GIGA, Rates, Workload, stage_gpus, version_bytes
from flows.plan.simulate import Interval, Simulation, simulate
from flows.store.space import BYTES_PER_TOKEN
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.errors import ConfigError
from hacrl_core.learning.memory import Estimate, beside, estimate, on_one_host, together
from hacrl_core.learning.shape import Shape

# A longer campaign goes on as these iterations do on average, benchmarks and gradient cosines included.
SIMULATED_ITERATIONS = 300
_CLUSTER = re.compile(r"^(?:(\d+)x)?(\d+)x([A-Za-z0-9_-]+)$")


@dataclass(frozen=True)
class Cluster:
    """Machines of one kind. A campaign runs on one of them."""

    device: str
    gpus: int  # of one machine; 0: it has none
    machines: int = 1

    @property
    def text(self) -> str:
        """The cluster as the user writes it."""
        if not self.gpus:
            return "cpu"
        return f"{f'{self.machines}x' if self.machines > 1 else ''}{self.gpus}x{self.device}"


@dataclass(frozen=True)
class StagePlan:
    """One stage of one agent: its seconds in a typical iteration, its GPUs and the memory on the busiest of them."""

    agent: str
    stage: str
    seconds: float
    gpus: int
    memory: int | None


@dataclass(frozen=True)
class Plan:
    """What a campaign will take."""

    campaign: str
    cluster: Cluster
    stages: tuple[StagePlan, ...]
    critical_path: tuple[tuple[str, float], ...]
    iteration_seconds: float
    campaign_seconds: float
    idle_share: float | None
    version_bytes: dict[str, int]
    disk_bytes: int
    memory_bytes: int  # of one device; 0: not known
    faults: tuple[str, ...]
    calibrated: bool


def parse_cluster(text: str, rates: Rates) -> Cluster:
    """Read 8xH100, 16x8xH100 (machines × GPUs) or cpu; raise ConfigError naming what is known."""
    if text.lower() == "cpu":
        return Cluster("CPU", 0)
    match = _CLUSTER.match(text)
    known = {name.lower(): name for name in rates.devices if name != "CPU"}
    if match is None:
        raise ConfigError(f"--cluster {text}: not of the form 8xH100, 16x8xH100 (machines × GPUs) or cpu")
    machines, gpus, device = int(match[1] or 1), int(match[2]), match[3].lower()
    if device not in known:
        raise ConfigError(
            f"--cluster {text}: no rates for {match[3]}; known are {', '.join(known.values())}. Give others under "
            "devices in a file for --rates"
        )
    if not gpus or not machines:
        raise ConfigError(f"--cluster {text}: a machine without GPUs; write cpu")
    return Cluster(known[device], gpus, machines)


def default_cluster(config: CampaignConfig) -> str:
    """Return the cluster that a config seems to be written for: as many GPUs as it names, else the CPU."""
    named = [gpu for agent in config.agents.values() for gpu in agent.gpus]
    on_gpus = any(isinstance(config.generation(a).engine, VllmEngineConfig) for a in config.agents)
    if named:
        return f"{max(named) + 1}xH100"
    return "1xH100" if on_gpus else "cpu"


def make_plan(config: CampaignConfig, cluster: Cluster, rates: Rates) -> Plan:
    """Simulate the campaign and add it up."""
    work = workload_of(config, cluster.device, cluster.gpus)
    shown = min(config.iterations, SIMULATED_ITERATIONS)
    simulation = simulate(record_graph(config, shown), work, rates)
    typical = simulation.typical_iteration
    size = int(rates.devices[cluster.device].memory_gb * GIGA) if cluster.gpus else 0
    memory = {agent: _memory(config, work, rates, agent, size) for agent in config.agents}
    versions = {agent: version_bytes(work.shapes[agent], config.training(agent)) for agent in config.agents}
    path = [(interval.call.title, interval.seconds) for interval in simulation.critical_path(typical)]
    return Plan(
        campaign=config.name,
        cluster=cluster,
        stages=tuple(_stages(simulation, typical, memory, work)),
        critical_path=tuple(path),
        iteration_seconds=simulation.iteration_seconds,
        campaign_seconds=simulation.seconds + (config.iterations - shown) * simulation.mean_iteration_seconds,
        idle_share=simulation.idle_share(cluster.gpus) if cluster.gpus else None,
        version_bytes=versions,
        disk_bytes=_disk(config, work, rates, versions),
        memory_bytes=size,
        faults=tuple(_faults(config, cluster, memory, size, work.shapes)),
        calibrated=bool(rates.factors),
    )


def memory_of(config: CampaignConfig, shape: Shape, agent: str, prompt_tokens: int, total: int) -> Estimate:
    """Return an agent's memory on a GPU of ``total`` bytes (0: on the CPU, all ranks together), and all beside it."""
    generate, update, objective = config.generation(agent), config.training(agent), config.objective(agent)
    has_reference = objective.kl_coefficient > 0 or objective.measure_kl
    alone = estimate(shape, generate, config.scoring(agent), update, prompt_tokens, on_gpu=total > 0)
    found = together(alone, beside(shape, generate, update, has_reference=has_reference, total=total))
    return found if total or update.ranks == 1 else on_one_host(found, shape, update)


def share_faults(config: CampaignConfig, shape: Shape, agent: str, total: int) -> list[str]:
    """Return what is wrong with the share of a GPU of ``total`` bytes that an agent's vLLM may take."""
    generate, update = config.generation(agent), config.training(agent)
    engine = generate.engine
    if not isinstance(engine, VllmEngineConfig) or not total:
        return []
    needs = estimate(shape, generate, config.scoring(agent), update, generate.max_prompt_tokens or 0, on_gpu=True)
    if needs.generate <= engine.memory_share * total:
        return []
    return [
        f"vLLM needs about {needs.generate / GIGA:.0f} GB on each GPU for its weights and one response, and "
        f"engine.memory_share {engine.memory_share:g} allows {engine.memory_share * total / GIGA:.0f}; raise it, or "
        "engine.tensor_parallel_size"
    ]


def _memory(config: CampaignConfig, work: Workload, rates: Rates, agent: str, total: int) -> Estimate:
    generate = config.generation(agent)
    prompt = generate.max_prompt_tokens or int(rates.tokens(agent, generate.max_tokens)[0])
    return memory_of(config, work.shapes[agent], agent, prompt, total)


def _stages(simulation: Simulation, iteration: int, memory: dict[str, Estimate], work: Workload) -> list[StagePlan]:
    """Return every call of one iteration; of benchmarks the first time that each is run."""
    shown: dict[str, Interval] = {}
    for interval in simulation.intervals:
        call = interval.call
        if call.iteration == iteration and call.stage != "evaluate":
            shown[call.label] = interval
        elif call.stage == "evaluate":
            shown.setdefault(f"{call.agent} {call.variant}", interval)
    plans = []
    # The iteration in the order of its calls, then the benchmarks.
    for interval in sorted(shown.values(), key=lambda i: (i.call.stage == "evaluate", i.call.agent)):
        call = interval.call
        peak = getattr(memory.get(call.agent), {"evaluate": "generate"}.get(call.stage, call.stage), None)
        name = " ".join(part for part in (call.stage, call.variant) if part)
        plans.append(StagePlan(call.agent, name, interval.seconds, stage_gpus(call, work), peak))
    return plans


def _disk(config: CampaignConfig, work: Workload, rates: Rates, versions: dict[str, int]) -> int:
    """Return the bytes at the campaign's end: kept versions, one on its way, the first ones, and the tables."""
    kept = config.iterations + 1 if config.keep is None else config.keep.count(config.iterations)
    first = sum(4 * work.shapes[agent].parameters for agent in config.agents)
    tables = 0.0
    for agent in config.agents:
        prompt, response = rates.tokens(agent, work.limits[agent])
        readers = sum(config.objective(a).share_rollouts or a == agent for a in config.agents)
        tables += work.responses * (prompt + response) * BYTES_PER_TOKEN * (len(config.attempts) + readers)
    passing = 1 if config.keep is not None else 0
    return int(sum(size * (kept - 1 + passing) for size in versions.values()) + first + config.iterations * tables)


def _faults(
    config: CampaignConfig, cluster: Cluster, memory: dict[str, Estimate], size: int, shapes: Mapping[str, Shape]
) -> list[str]:
    faults = []
    for agent, settings in config.agents.items():
        missing = [str(gpu) for gpu in settings.gpus if gpu >= cluster.gpus]
        if cluster.gpus and missing:
            what = f"GPU {missing[0]} is" if len(missing) == 1 else f"GPUs {', '.join(missing)} are"
            faults.append(f"agent {agent}: {what} beyond {cluster.text}; correct agents.{agent}.gpus")
        faults += [f"agent {agent}: {fault}" for fault in share_faults(config, shapes[agent], agent, size)]
        for stage in ("generate", "score", "update"):
            need = getattr(memory[agent], stage)
            if size and need > size:
                faults.append(
                    f"agent {agent}: {stage} needs about {need / GIGA:.0f} GB on a GPU of {size / GIGA:.0f}; "
                    "spread it over more GPUs, set update.gradient_checkpointing, or lower a token_budget"
                )
    return faults
