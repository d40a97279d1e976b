"""How long a stage takes: a table of rates that the user can correct, and one formula per stage.

Needs no torch. The rates of GPUs are assumptions from data sheets and public reports; none was measured here. After a
first iteration ``hacrl plan --calibrate`` replaces them by factors from the campaign's own manifests.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hacrl_core.config.base import StrictConfig
from hacrl_core.config.generation import GenerateConfig, VllmEngineConfig
from hacrl_core.config.loading import merge, read_yaml, validate
from hacrl_core.config.training import UpdateConfig
from hacrl_core.learning.shape import Shape
from stages.spec import StageCall

GIGA, TERA = 1e9, 1e12
STEPS_AT_ONCE = 64  # of decoding, in the simulation of a batch


class DeviceRates(StrictConfig):
    """What one device does, as far as a campaign's stages reach it."""

    memory_gb: PositiveFloat = Field(description="Memory in units of 1e9 bytes.")
    train_tflops: PositiveFloat = Field(description="Body of the model, forward and backward.")
    forward_tflops: PositiveFloat = Field(description="Body of the model, forward only.")
    fp32_tflops: PositiveFloat = Field(description="Matrix products of the head in strict float32.")
    tf32_tflops: PositiveFloat = Field(description="Matrix products of the head in TF32.")
    memory_tbps: PositiveFloat = Field(description="Bandwidth of its memory, TB/s: what decoding is bound by.")


class Rates(StrictConfig):
    """Rates and fixed costs. A user's file is merged over the defaults."""

    devices: dict[str, DeviceRates] = Field(description="By name, as in --cluster 8xH100.")
    write_gbps: PositiveFloat = Field(2.5, description="Writing and syncing an artifact, GB/s, however many ranks.")
    read_gbps: PositiveFloat = Field(3.0, description="Reading weights into a process, GB/s.")
    hash_gbps: PositiveFloat = Field(1.4, description="sha256 of one thread, GB/s.")
    hash_threads: PositiveFloat = Field(1.0, description="Threads that hash a version of one rank.")
    engine_start_seconds: NonNegativeFloat = Field(60.0, description="vLLM's import, compilation and graph capture.")
    engine_wake_seconds: NonNegativeFloat = Field(4.0, description="A sleeping vLLM until it takes weights.")
    decode_step_seconds: NonNegativeFloat = Field(1.2e-3, description="Fixed cost of a decoding step.")
    allreduce_seconds: NonNegativeFloat = Field(28e-6, description="Per layer and step where several GPUs share it.")
    verify_seconds: PositiveFloat = Field(0.03, description="One response, on one core.")
    verify_cores: PositiveFloat = Field(4.0, description="Cores that verify at a time.")
    light_seconds: NonNegativeFloat = Field(0.3, description="A stage that only reads and writes tables.")
    call_seconds: NonNegativeFloat = Field(0.1, description="Look-up, lock, publishing and record of any stage.")
    stage_start_seconds: NonNegativeFloat = Field(2.0, description="A stage that runs a model, before its first pass.")
    sharded_efficiency: float = Field(0.85, gt=0, le=1, description="Of each rank, where several share an update.")
    prompt_tokens: PositiveFloat = Field(150.0, description="Mean length of a prompt.")
    response_tokens: PositiveFloat = Field(1000.0, description="Mean length of a response, half its limit at most.")
    response_spread: NonNegativeFloat = Field(0.8, description="Standard deviation of the logarithm of that length.")
    agents: dict[str, dict[str, PositiveFloat]] = Field(
        default_factory=dict, description="An agent's own prompt_tokens and response_tokens, where they are known."
    )
    factors: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="Measured over computed seconds, by 'stage agent variant'; from --calibrate."
    )

    def tokens(self, agent: str, limit: int) -> tuple[float, float]:
        """Return the mean length of prompts and of responses of an agent."""
        own = self.agents.get(agent, {})
        response = own.get("response_tokens", min(self.response_tokens, limit / 2))
        return own.get("prompt_tokens", self.prompt_tokens), min(response, limit)


# H100 and A100 of 80 GB, and one core of an ordinary server. Sustained, not peak: see docs/gpus.md.
DEFAULTS: dict[str, Any] = {
    "devices": {
        "H100": {"memory_gb": 80, "train_tflops": 400, "forward_tflops": 450, "fp32_tflops": 53, "tf32_tflops": 250,
                 "memory_tbps": 2.3},
        "H200": {"memory_gb": 141, "train_tflops": 400, "forward_tflops": 450, "fp32_tflops": 53, "tf32_tflops": 250,
                 "memory_tbps": 3.3},
        "A100": {"memory_gb": 80, "train_tflops": 140, "forward_tflops": 150, "fp32_tflops": 15.5, "tf32_tflops": 75,
                 "memory_tbps": 1.4},
        "CPU": {"memory_gb": 8, "train_tflops": 0.03, "forward_tflops": 0.04, "fp32_tflops": 0.04, "tf32_tflops": 0.04,
                "memory_tbps": 0.01},
    }
}  # fmt: skip


def load_rates(path: Path | None = None) -> Rates:
    """Return the default rates with the user's file, if any, merged over them; raise ConfigError for a bad one."""
    own = read_yaml(path) if path is not None else {}
    return validate(merge(DEFAULTS, own), Rates, "rates" if path is None else str(path))


def dump_rates(rates: Rates) -> str:
    """Return the rates as YAML that ``load_rates`` reads, each line with its meaning."""
    import yaml

    dumped = rates.model_dump(mode="json")
    meanings = [f"# {name}: {info.description}" for name, info in Rates.model_fields.items()]
    return "\n".join([*meanings, yaml.safe_dump(dumped, sort_keys=False).rstrip()])


@dataclass(frozen=True)
class Workload:
    """What of a campaign decides the seconds of its stages besides the call's own settings."""

    device: str  # a name in the table of rates
    prompts: int
    samples: int
    shapes: Mapping[str, Shape]
    gpus: Mapping[str, int] = field(default_factory=dict)  # agent → GPUs it has; 0: it runs on the CPU
    problems: Mapping[str, int] = field(default_factory=dict)  # benchmark → problems
    limits: Mapping[str, int] = field(default_factory=dict)  # agent → the longest response that it may write

    @property
    def responses(self) -> int:
        """Responses of one agent in an iteration."""
        return self.prompts * self.samples


def stage_seconds(call: StageCall, work: Workload, rates: Rates) -> float:
    """Return the seconds that a stage call will take, publishing included."""
    compute = _FORMULAS.get(call.stage)
    seconds: float = rates.light_seconds if compute is None else compute(call, work, rates)
    return float(rates.call_seconds + seconds * rates.factors.get(factor_name(call), 1.0))


def factor_name(call: Any) -> str:
    """Return the name under which a call, or an entry of the record, is calibrated."""
    return " ".join(part for part in (call.stage, call.agent, call.variant) if part)


def stage_gpus(call: StageCall, work: Workload) -> int:
    """Return how many of its agent's GPUs a call keeps busy."""
    if not work.gpus.get(call.agent):
        return 0
    config: Any = call.config
    if call.stage in ("generate", "evaluate"):
        return min(work.gpus[call.agent], engine_gpus(config.generate))
    if call.stage == "score":
        return int(config.ranks)
    return int(config.update.ranks) if call.stage == "update" else 0


def engine_gpus(config: GenerateConfig) -> int:
    """Return the GPUs that an engine takes."""
    engine = config.engine
    return engine.tensor_parallel_size * engine.replicas if isinstance(engine, VllmEngineConfig) else 1


# -- one formula per stage ---------------------------------------------------------------------------------------------


def _warmstart(call: StageCall, work: Workload, rates: Rates) -> float:
    config: Any = call.config
    tokens: int = config.warmstart.steps * config.warmstart.batch_size * 24
    return rates.stage_start_seconds + 6 * work.shapes[call.agent].parameters * tokens / _flops(work, rates, "train")


def _adopt(call: StageCall, work: Workload, rates: Rates) -> float:
    return _publishing(4 * work.shapes[call.agent].parameters, rates) + _reading(work.shapes[call.agent], rates)


def _generate(call: StageCall, work: Workload, rates: Rates) -> float:
    config: Any = call.config
    return _sampling(call.agent, work.responses, config.generate, work, rates)


def _evaluate(call: StageCall, work: Workload, rates: Rates) -> float:
    config: Any = call.config
    answers = work.problems.get(call.variant, 500) * config.benchmark.samples
    return _sampling(call.agent, answers, config.sampling, work, rates) + _checking(answers, rates)


def _verify(call: StageCall, work: Workload, rates: Rates) -> float:
    return _checking(work.responses, rates)


def _score(call: StageCall, work: Workload, rates: Rates) -> float:
    config: Any = call.config
    each = min(work.responses, config.most or work.responses)
    shape, ranks = work.shapes[call.agent], config.ranks
    whole, answered = _token_counts(dict.fromkeys(config.samplers, each), work, rates)
    body = 2 * shape.body * whole / _flops(work, rates, "forward")
    head = 2 * shape.head * answered / _flops(work, rates, config.head_precision)
    # The learner's weights are warm since its update. A reference stays beside them on ranks, else it is read again.
    load = _reading(shape, rates) if config.is_reference and ranks == 1 else 0.0
    return rates.stage_start_seconds + load + _shared(body + head, ranks, rates)


def _update(call: StageCall, work: Workload, rates: Rates) -> float:
    config: Any = call.config
    update: UpdateConfig = config.update
    shape, ranks = work.shapes[call.agent], update.ranks
    passed = {sampler: float(update.epochs) for sampler in config.samplers}
    # Cosine of gradients: own responses one and a half times, foreign ones twice (hacrl_core.learning.learner).
    if config.algorithm.gradient_cosine and not config.iteration % config.algorithm.gradient_cosine_every:
        passed = {sampler: n + (1.5 if sampler == call.agent else 2.0) for sampler, n in passed.items()}
    whole, answered = _token_counts({s: n * work.responses for s, n in passed.items()}, work, rates)
    passes = (6 if update.lora else 8) if update.gradient_checkpointing else (4 if update.lora else 6)
    body = passes * shape.body * whole / _flops(work, rates, "train")
    head = 6 * shape.head * answered / _flops(work, rates, update.head_precision)
    published = version_bytes(shape, update)
    return (
        rates.stage_start_seconds
        + _reading(shape, rates) * 2 / ranks  # the optimizer's moments; the weights are warm
        + _shared(body + head, ranks, rates)
        + _publishing(published, rates, update.files_of_state)
    )


_FORMULAS: dict[str, Callable[[StageCall, Workload, Rates], float]] = {
    "warmstart": _warmstart,
    "adopt": _adopt,
    "generate": _generate,
    "evaluate": _evaluate,
    "verify": _verify,
    "score": _score,
    "update": _update,
}


def version_bytes(shape: Shape, update: UpdateConfig) -> int:
    """Return the bytes of a version: float32 weights and, where every weight is trained, AdamW's two moments."""
    return 4 * shape.parameters * (1 if update.lora else 3)


# -- parts of the formulas ---------------------------------------------------------------------------------------------


def _token_counts(responses: Mapping[str, float], work: Workload, rates: Rates) -> tuple[float, float]:
    """Return the tokens that go through the body, and those that reach the head; ``responses`` are by sampler."""
    whole = answered = 0.0
    for sampler, count in responses.items():
        prompt, response = rates.tokens(sampler, work.limits[sampler])
        whole += count * (prompt + response)
        answered += count * response
    return whole, answered


def _shared(seconds: float, ranks: int, rates: Rates) -> float:
    return seconds if ranks == 1 else seconds / ranks / rates.sharded_efficiency


def _checking(responses: int, rates: Rates) -> float:
    return responses * rates.verify_seconds / rates.verify_cores


def _reading(shape: Shape, rates: Rates) -> float:
    return 4 * shape.parameters / rates.read_gbps / GIGA


def _publishing(size: float, rates: Rates, files: int = 1) -> float:
    """Return the seconds to write and hash an artifact; its files are hashed at the same time, the disk is one."""
    return size * (1 / rates.write_gbps + 1 / (rates.hash_gbps * max(rates.hash_threads, files))) / GIGA


def _flops(work: Workload, rates: Rates, kind: str) -> float:
    return float(getattr(rates.devices[work.device], f"{kind}_tflops")) * TERA


def _sampling(agent: str, responses: int, config: GenerateConfig, work: Workload, rates: Rates) -> float:
    """Return the seconds until the last response: the engine's start or new weights, and a batch that runs empty."""
    engine, shape = config.engine, work.shapes[agent]
    prompt, mean = rates.tokens(agent, config.max_tokens)
    device = rates.devices[work.device]
    slots, width, replicas, begin = config.batch_size, 1, 1, rates.stage_start_seconds
    if isinstance(engine, VllmEngineConfig):
        slots, width, replicas = engine.max_sequences, engine.tensor_parallel_size, engine.replicas
        start = rates.engine_start_seconds if engine.keep is False else rates.engine_wake_seconds
        begin = start + 2 * _reading(shape, rates)  # the checkpoint is read for the swap and for its proof
    size = 2 if engine.dtype in ("bfloat16", "float16") else 4
    lengths = response_lengths(math.ceil(responses / replicas), mean, rates.response_spread, config.max_tokens)
    step = rates.decode_step_seconds + (shape.layers * rates.allreduce_seconds if width > 1 else 0.0)
    return begin + decode_seconds(
        lengths,
        slots=slots,
        weights=2 * shape.parameters / (device.forward_tflops * TERA * width),
        read=size * shape.parameters / (device.memory_tbps * TERA * width),
        cache=2 * shape.layers * shape.key * size / (device.memory_tbps * TERA * width),
        prompt=prompt,
        step=step,
    )


@lru_cache(maxsize=256)
def response_lengths(count: int, mean: float, spread: float, limit: int) -> tuple[int, ...]:
    """Return lengths of this mean, log-normal, cut at the limit; always the same ones."""
    drawn = np.random.default_rng(0).lognormal(math.log(max(mean, 1.0)) - spread**2 / 2, spread, count)
    return tuple(int(n) for n in np.clip(drawn, 1, limit))


@lru_cache(maxsize=256)
def decode_seconds(
    lengths: tuple[int, ...], *, slots: int, weights: float, read: float, cache: float, prompt: float, step: float
) -> float:
    """Return the seconds until the last response is written by one engine with continuous batching.

    A step takes the larger of reading all weights and of one token's arithmetic for each response in flight, and the
    reading of their caches. ``weights`` and ``cache`` are seconds per token, ``read`` is seconds per step.
    """
    waiting = list(reversed(lengths))
    left = np.zeros(0, int)
    written = np.zeros(0, int)
    seconds = 0.0
    while waiting or len(left):
        fresh = [waiting.pop() for _ in range(min(slots - len(left), len(waiting)))]
        if fresh:
            left, written = np.append(left, fresh), np.append(written, np.zeros(len(fresh), int))
            seconds += len(fresh) * prompt * weights
        steps = int(min(left.min(), STEPS_AT_ONCE))
        context = len(left) * prompt + float(written.sum())
        seconds += steps * (max(read, len(left) * weights) + context * cache + step)
        left, written = left - steps, written + steps
        left, written = left[left > 0], written[left > 0]
    return seconds
