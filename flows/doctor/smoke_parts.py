"""The parts of ``hacrl doctor --smoke``. Each returns what it found, or raises `Wrong` or `Skipped`."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hacrl_core.agents.agent import Agent, load_agent
from hacrl_core.agents.warmstart import make_model, make_tokenizer
from hacrl_core.config.generation import GenerateConfig, VllmEngineConfig
from hacrl_core.config.training import ScoreConfig, UpdateConfig
from hacrl_core.config.warmstart import ModelConfig, TokenizerConfig
from hacrl_core.errors import EngineError
from hacrl_core.learning.fused.rowwise import negative_gradient_, uses_triton
from hacrl_core.learning.memory import PROCESS_BYTES, estimate
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence
from hacrl_core.learning.shape import shape_of
from hacrl_core.learning.trainer import Trainer
from hacrl_core.place import module

# GSPO's window is 3e-4 wide; a third of it may be rounding (stages/update.py warns from there on).
MISMATCH = 1e-4
# bfloat16 keeps 8 bits: per response, and of the loss and the gradient's norm of the tiny agent below.
HALF_OFF = 0.02
RANKS_OFF = 1e-4
MEMORY_OFF = 0.1
# Nats per token between vLLM in float32 and our forward pass, as for a fresh engine (engine.weight_tolerance).
VLLM_OFF = 0.01
PROMPT, RESPONSE, ROWS = 24, 40, 12
MODEL = ModelConfig(
    architecture="qwen3", hidden_size=256, layers=4, heads=4, kv_heads=2, intermediate_size=512,
    tie_word_embeddings=True,
)  # fmt: skip


class Skipped(Exception):
    """This machine cannot run the part; the message says why."""


class Wrong(Exception):
    """The part ran and its numbers are not right."""

    def __init__(self, why: str, found: dict[str, Any]) -> None:
        super().__init__(why)
        self.found = found


def kernel(device: torch.device, folder: Path) -> dict[str, Any]:
    """The row-wise kernel of the fused loss against float64: log-probs, entropies and gradient."""
    rows, vocabulary = (2048, 151_936) if device.type == "cuda" else (64, 32_000)
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(rows, vocabulary, generator=generator).mul_(4).to(device)
    targets_R = torch.randint(vocabulary, (rows,), generator=generator).to(device)
    exact = logits_RV[:64].double().cpu()
    begun = time.perf_counter()
    logprobs_R, entropies_R = negative_gradient_(logits_RV, targets_R, entropy=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begun
    wanted = exact.log_softmax(-1)
    chosen = targets_R[:64].cpu()
    gradient = wanted.exp()
    gradient[torch.arange(64), chosen] -= 1.0
    assert entropies_R is not None
    off = {
        "logprob_off": _off(logprobs_R[:64], wanted[torch.arange(64), chosen]),
        "entropy_off": _off(entropies_R[:64], -(wanted.exp() * wanted).sum(-1)),
        "gradient_off": _off(logits_RV[:64], gradient),
    }
    found = {"path": "triton" if uses_triton(device) else "torch", **off, "milliseconds": round(1e3 * seconds, 2)}
    if max(off.values()) > 1e-4:
        raise Wrong(f"the kernel is off by {max(off.values()):.2g}, 1e-4 are allowed", found)
    return found


def agreement(device: torch.device, folder: Path) -> dict[str, Any]:
    """Log-probs that score computes against those that the update sees before its first step, in each precision.

    In bfloat16 they depend on the batch, so an update compares own responses with a pass of its own
    (`Trainer.logprobs`): that pass must agree with the step, and score only to the width of rounding.
    """
    found: dict[str, Any] = {}
    for autocast, allowed in (("none", MISMATCH), ("bf16", HALF_OFF)):
        agent = _agent(folder, device)
        sequences = _sequences(agent)
        scored = score_sequences(agent, sequences, token_budget=512, autocast=autocast)  # type: ignore[arg-type]
        seen = np.zeros(len(sequences))

        def objective(logprobs_BT: Tensor, mask_BT: Tensor, rows_B: Tensor, seen: Any = seen) -> Any:
            means = (logprobs_BT * mask_BT).sum(1) / mask_BT.sum(1)
            seen[rows_B.cpu().numpy()] = means.detach().double().cpu().numpy()
            return -means.sum() / len(seen), {}

        trainer = Trainer(agent, UpdateConfig(learning_rate=1e-6, token_budget=512, autocast=autocast))
        own = trainer.logprobs(sequences)
        step = trainer.step(sequences, objective)
        off, own_off = (
            float(np.abs(seen - np.array([values.mean(dtype=np.float64) for values in means])).max())
            for means in (scored, own)
        )
        found |= {f"score_off_{autocast}": off, f"own_ratio_off_{autocast}": own_off}
        if not step.finite or off > allowed:
            raise Wrong(f"score and update differ by {off:.2g} per response, {allowed:g} are allowed", found)
        if own_off > MISMATCH:
            raise Wrong(f"an update's own passes differ by {own_off:.2g} per response, {MISMATCH:g} are allowed", found)
    return found


def ranks(device: torch.device, folder: Path) -> dict[str, Any]:
    """One step of an update on several ranks (GPUs, or gloo processes on the CPU) against one process.

    In float32, and as the paper's configs train: bfloat16 layers, computed again in the backward pass.
    """
    from hacrl_core.learning.sharded.ranks import RankGroup

    count = torch.cuda.device_count() if device.type == "cuda" else 2
    if count < 2:
        raise Skipped("one GPU: an update has nothing to be spread over")
    agent = _agent(folder, device)
    sequences = _sequences(agent)
    plain = UpdateConfig(learning_rate=1e-6, token_budget=512)
    half = plain.model_copy(update={"autocast": "bf16", "gradient_checkpointing": True})
    alone = Trainer(agent, plain).step(sequences, _likelihood)
    found: dict[str, Any] = {"ranks": count, "backend": "nccl" if device.type == "cuda" else "gloo"}
    group = RankGroup(count, device.type)
    try:
        for name, config, allowed in (("", plain, RANKS_OFF), ("_bf16", half, HALF_OFF)):
            loss, norm = group.run(_StepOnRank(folder / "agent", config, sequences), name="smoke")
            off = {f"loss_off{name}": abs(loss - alone.loss), f"norm_off{name}": abs(norm / alone.gradient_norm - 1)}
            found |= off
            if not max(off.values()) <= allowed:
                raise Wrong(f"{count} ranks are off by {max(off.values()):.2g}, {allowed:g} are allowed", found)
    finally:
        group.close()
    return found


def memory(device: torch.device, folder: Path) -> dict[str, Any]:
    """The peak of an update with 135M parameters on the GPU against the estimate of ``hacrl doctor``."""
    if device.type != "cuda":
        raise Skipped("no GPU: `make bench-memory` compares the estimate with the CPU's peaks")
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    update = UpdateConfig(learning_rate=1e-6, token_budget=4096, gradient_checkpointing=True, autocast="bf16")
    limits = GenerateConfig(max_tokens=200)
    guess = estimate(shape_of(config), limits, ScoreConfig(), update, 56, on_gpu=True).update - PROCESS_BYTES
    agent = Agent(LlamaForCausalLM(config).to(device), _Padding(), (2,), folder)
    rng = np.random.default_rng(0)
    sequences = [TrainSequence(tuple(row[:56]), tuple(row[56:])) for row in rng.integers(3, 49152, (16, 256)).tolist()]
    trainer = Trainer(agent, update)
    trainer.step(sequences[:1], _likelihood)
    torch.cuda.reset_peak_memory_stats(device)
    trainer.step(sequences, _likelihood)
    peak = torch.cuda.max_memory_allocated(device)
    found = {"estimated_bytes": guess, "measured_bytes": peak, "ratio": round(guess / peak, 3)}
    if abs(guess / peak - 1) > MEMORY_OFF:
        raise Wrong(f"the estimate is {guess / peak:.2f} of the peak, {MEMORY_OFF:.0%} off are allowed", found)
    return found


def vllm(device: torch.device, folder: Path) -> dict[str, Any]:
    """vLLM on two versions of a tiny agent, with a sleep and two swaps of weights, against our own log-probs.

    A campaign survives a swap that its proofs refuse: vLLM is restarted. Here that is a fault, and so is whatever else
    the engine warns of.
    """
    engine = _vllm_engine()
    agents = [_agent(folder, torch.device("cpu"), seed) for seed in (0, 1)]
    seconds, off, other, free = [], [], [], [_free(device)]
    with _warnings_of(module("hacrl_core.generation.vllm")) as warnings:
        try:
            for version in (0, 1, 0):
                begun = time.perf_counter()
                rows, said = _sampled(engine, agents[version], str(version))
                seconds.append(time.perf_counter() - begun)
                off.append(_apart(said, score_sequences(agents[version], rows, token_budget=512)))
                other.append(_apart(said, score_sequences(agents[1 - version], rows, token_budget=512)))
                free.append(_free(device))
                if version == 0:
                    engine.rest()
                    free.append(_free(device))
        finally:
            engine.close()
    found = {
        "version": engine.version,
        "start_seconds": round(seconds[0], 1),
        "sleep_wake_and_swap_seconds": round(seconds[1], 1),
        "swap_seconds": round(seconds[2], 1),
        "logprob_off": max(off),
        "logprob_off_of_the_other_version": min(other),
    }
    if device.type == "cuda":
        # Before, while it sampled, asleep: what the estimate assumes of a sleeping engine (ASLEEP_BYTES).
        found |= {"awake_bytes": free[0] - free[1], "asleep_bytes": free[0] - free[2]}
    else:
        found["note"] = "the CPU build pauses in place of sleeping and frees no memory"
    if warnings:
        raise Wrong(warnings[0], found)
    if max(off) > VLLM_OFF or min(other) < 2 * max(off):
        allowed = f"{VLLM_OFF:g} are allowed"
        why = f"vLLM's log-probs are {max(off):.2g} per token off those of the version it was given ({allowed})"
        raise Wrong(f"{why} and {min(other):.2g} off those of the other one", found)
    return found


def _vllm_engine() -> Any:
    """Return an engine that is not started yet."""
    from hacrl_core.generation.vllm import VllmEngine
    from hacrl_core.generation.vllm.process import find_python

    try:
        find_python(None)
    except EngineError:
        raise Skipped("vLLM is not built; `make vllm` builds it") from None
    config = VllmEngineConfig(enforce_eager=True, max_sequences=16, max_length=128, memory_share=0.3, keep="sleep")
    return VllmEngine(config)


def _sampled(engine: Any, agent: Agent, version: str) -> tuple[list[TrainSequence], list[npt.NDArray[Any]]]:
    """Return what an engine samples from a version, and the log-probs that it says its responses have."""
    from hacrl_core.generation.protocols import GenerationRequest, SamplingParams

    requests = [GenerationRequest(str(i), tuple(range(3, 3 + 8)), i) for i in range(4)]
    answers = engine.generate(agent.checkpoint, version, requests, SamplingParams(max_tokens=16))
    rows = [TrainSequence(r.prompt_token_ids, a.token_ids) for r, a in zip(requests, answers, strict=True)]
    return rows, [np.array(answer.policy_logprobs) for answer in answers]


# -- what the parts share ----------------------------------------------------------------------------------------------


class _Padding:
    pad_token_id = 2


@dataclass(frozen=True)
class _StepOnRank:
    """What every rank does: load its slices, make one step, return loss and gradient norm."""

    checkpoint: Path
    config: UpdateConfig
    sequences: list[TrainSequence]

    def __call__(self, rank: Any) -> tuple[float, float]:
        from hacrl_core.learning.sharded.policy import agent_of, numerics_of
        from hacrl_core.learning.sharded.trainer import ShardedTrainer

        agent = agent_of(rank, self.checkpoint, "smoke", numerics_of(self.config, "auto"))
        step = ShardedTrainer(agent, self.config).step(self.sequences, _likelihood)
        return step.loss, step.gradient_norm


def _likelihood(logprobs_BT: Tensor, mask_BT: Tensor, rows_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs_BT * mask_BT).sum() / (ROWS * RESPONSE), {}


def _agent(folder: Path, device: torch.device, seed: int = 0) -> Agent:
    """Return a tiny random agent, written to ``folder`` once."""
    place = folder / ("agent" if not seed else f"agent-{seed}")
    if not place.exists():
        tokenizer = make_tokenizer(TokenizerConfig(kind="characters"), ["0123456789+-="], 256)
        make_model(MODEL, tokenizer, seed).save_pretrained(place)
        tokenizer.save_pretrained(place)
    return load_agent(place, device=str(device))


def _sequences(agent: Agent) -> list[TrainSequence]:
    vocabulary = agent.model.get_input_embeddings().num_embeddings
    rows = np.random.default_rng(0).integers(3, vocabulary, (ROWS, PROMPT + RESPONSE)).tolist()
    # Lengths differ, so that microbatches and ranks have unequal work.
    return [TrainSequence(tuple(row[:PROMPT]), tuple(row[PROMPT : PROMPT + 8 + 2 * i])) for i, row in enumerate(rows)]


@contextmanager
def _warnings_of(name: str) -> Iterator[list[str]]:
    """Collect what a package logs as a warning."""
    heard: list[str] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    handler = Collects(logging.WARNING)
    logging.getLogger(name).addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger(name).removeHandler(handler)


def _apart(said: Sequence[npt.NDArray[Any]], scored: Sequence[npt.NDArray[Any]]) -> float:
    """Return the mean distance per token of two lists of log-probs."""
    return float(np.abs(np.concatenate(said) - np.concatenate(scored)).mean())


def _free(device: torch.device) -> int:
    """Return the free bytes of a GPU; 0 for the CPU."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def _off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double().cpu() - wanted).abs().max())
