"""Log-probs of given responses under an agent: the update's forward pass, microbatches and head, without gradients."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hacrl_core.agents.agent import Agent
from hacrl_core.agents.out_of_memory import out_of_memory_explained
from hacrl_core.config.training import Autocast, HeadPrecision
from hacrl_core.learning.fused import fused_pass, plan_chunks, read_head
from hacrl_core.learning.prefixes import response_states, shares_prefixes
from hacrl_core.learning.sequences import Microbatch, TrainSequence, check_sequences, microbatches


@torch.no_grad()
def score_sequences(
    agent: Agent,
    sequences: Sequence[TrainSequence],
    *,
    token_budget: int,
    temperature: float = 1.0,
    autocast: Autocast = "none",
    max_logits_mb: int = 256,
    head_precision: HeadPrecision = "fp32",
) -> list[npt.NDArray[np.float32]]:
    """Log-prob of every response token under the agent, in the order of ``sequences``.

    Results do not depend on ``token_budget``, on the order or on the company of a sequence beyond float32 rounding.
    """
    if not sequences:
        return []
    head = read_head(agent.model)
    check_sequences(sequences, vocabulary=len(head.weight_VH), context_length=agent.context_length)
    device = agent.device
    agent.model.eval()
    shared = autocast == "none" and shares_prefixes(agent.model)
    doing, remedy = f"scoring on {device}", "lower score.token_budget or score.max_logits_mb"
    batches = microbatches(sequences, token_budget, agent.pad_token_id, share_prefixes=shared)
    found = []
    for batch in batches:
        with out_of_memory_explained(agent.checkpoint, doing, remedy):
            # Without the cache: every weight is cast once either way, and its copy is freed with its layer.
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast == "bf16", cache_enabled=False):
                hidden_RH = response_states(agent.model, batch)
            chunks = plan_chunks(batch.lengths, len(head.weight_VH), max_logits_mb=max_logits_mb, device=device)
            targets_R = torch.from_numpy(batch.targets_R).to(device, non_blocking=True)
            outcome = fused_pass(
                hidden_RH,
                head,
                targets_R,
                batch.lengths,
                targets_R,
                chunks,
                temperature=temperature,
                precision=head_precision,
            )
        found.append(outcome.logprobs_R)
    return by_sequence(batches, found, len(sequences))


def by_sequence(
    batches: Sequence[Microbatch], logprobs: Sequence[torch.Tensor], sequences: int
) -> list[npt.NDArray[np.float32]]:
    """Return the log-probs of microbatches' tokens per sequence, in the order in which the sequences were given."""
    scores: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * sequences
    if not logprobs:
        return scores
    flat = torch.cat([part.float() for part in logprobs]).cpu().numpy()  # at the end: a GPU does not wait in between
    ends = np.cumsum([length for batch in batches for length in batch.lengths])
    rows = np.concatenate([batch.rows_B for batch in batches])
    for row, start, stop in zip(rows, [0, *ends[:-1]], ends, strict=True):
        scores[row] = flat[start:stop].copy()
    return scores
