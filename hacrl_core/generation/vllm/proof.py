"""Proof that vLLM samples from the right weights: a probe's log-probs against our own forward pass of the checkpoint.

Swapping weights in a running engine can go wrong in silence (a head tied to the embeddings that keeps its old weights
still writes plausible text), and responses of a policy other than the one named in their rollouts poison every ratio
computed later.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hacrl_core.agents.agent import load_agent
from hacrl_core.seeding import derive_rng

PROBE_TOKENS = 48
# What a fresh load differs from our forward is the engine's rounding. A swap must come as near, up to this factor, or
# to the floor: float32 rounding is far below it, and an update that changes log-probs less cannot be told apart.
SWAP_FACTOR, SWAP_FLOOR = 3.0, 2e-5
# Policies this far apart give different log-probs in 16 bits too; the very same ones are then those of the old weights.
DISTINCT = 1e-3
# A 7- or 10-bit mantissa against our float32: 0.03 and 0.003 nats per token on the agents of the tests, where 0.25 are
# allowed.
HALF_PRECISION_FACTOR = 25.0

Logprobs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    """What the engine needs to know of a checkpoint; the weights themselves are not kept."""

    policy_digest: str
    shape: str  # equal shapes: a running engine can take the weights
    dtype: str
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    context_length: int
    probe: tuple[int, ...]
    probe_logprobs: Logprobs  # of every token but the first
    next_logprobs_V: Logprobs  # after the whole probe


@torch.no_grad()
def expect(checkpoint: Path, policy_digest: str, dtype: str) -> Expected:
    """Load the checkpoint on the CPU, run the probe through it, let go of the weights."""
    agent = load_agent(checkpoint)
    vocabulary = min(len(agent.tokenizer), agent.model.get_input_embeddings().num_embeddings)
    length = min(PROBE_TOKENS, agent.context_length)
    probe = derive_rng(0, "vllm-probe").integers(vocabulary, size=length)
    ids = torch.from_numpy(probe)
    logprobs_TV = agent.model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
    return Expected(
        policy_digest,
        _shape(checkpoint),
        _dtype(checkpoint) if dtype == "auto" else dtype,
        agent.tokenizer,
        agent.stop_token_ids,
        agent.context_length,
        tuple(probe.tolist()),
        logprobs_TV[:-1].gather(1, ids[1:, None])[:, 0].numpy(),
        logprobs_TV[-1].numpy(),
    )


def deviation(expected: Expected, found: list[float]) -> float:
    """Mean absolute difference per token of the probe; infinite for anything that is not a log-prob."""
    difference = float(np.abs(expected.probe_logprobs - np.asarray(found)).mean())
    return difference if np.isfinite(difference) else float("inf")


def limit(expected: Expected, tolerance: float, fresh: float | None) -> float:
    """Return the largest deviation accepted: of a fresh engine (``fresh`` is None), or after a swap into one."""
    widest = tolerance * (1.0 if expected.dtype == "float32" else HALF_PRECISION_FACTOR)
    return widest if fresh is None else min(widest, max(SWAP_FACTOR * fresh, SWAP_FLOOR))


def differ(new: Expected, old: Expected) -> bool:
    """Whether two policies differ so much on the probe that equal log-probs from vLLM would be a stale swap."""
    return float(np.abs(new.probe_logprobs - old.probe_logprobs).mean()) > DISTINCT


def _shape(checkpoint: Path) -> str:
    """A digest of what a swap cannot change: architecture, dtype and tokenizer."""
    config = json.loads((checkpoint / "config.json").read_text())
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    tokenizer = checkpoint / "tokenizer.json"
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.hexdigest()


def _dtype(checkpoint: Path) -> str:
    """vLLM's own "auto" would turn float32 into a 16-bit type."""
    config = json.loads((checkpoint / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
