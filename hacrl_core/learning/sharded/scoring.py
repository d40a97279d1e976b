"""Log-probs of given responses under a sharded agent: the forward pass of its trainer, without gradients."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hacrl_core.agents.out_of_memory import out_of_memory_explained
from hacrl_core.config.training import HeadPrecision
from hacrl_core.learning.fused import fused_pass, plan_chunks, read_head
from hacrl_core.learning.prefixes import response_states
from hacrl_core.learning.scoring import by_sequence
from hacrl_core.learning.sequences import Ints, Microbatch, TrainSequence, check_sequences, microbatches
from hacrl_core.learning.sharded.dealing import deal
from hacrl_core.learning.sharded.policy import ShardedAgent, set_checkpointing
from hacrl_core.learning.sharded.ranks import Rank


@torch.no_grad()
def score_sharded(
    agent: ShardedAgent,
    sequences: Sequence[TrainSequence],
    *,
    token_budget: int,
    temperature: float = 1.0,
    max_logits_mb: int = 256,
    head_precision: HeadPrecision = "fp32",
) -> list[npt.NDArray[np.float32]]:
    """Log-prob of every response token, in the order of ``sequences``; every rank calls this and gets all of them."""
    rank = agent.rank
    check_sequences(sequences, vocabulary=agent.vocabulary, context_length=agent.context_length)
    set_checkpointing(agent, False)
    hand = deal(sequences, rank.count, whole_prompts=agent.shares_prefixes)[rank.index]
    batches = microbatches(
        [sequences[row] for row in hand], token_budget, agent.pad_token_id, share_prefixes=agent.shares_prefixes
    )
    batches = [replace(batch, rows_B=hand[batch.rows_B]) for batch in batches]
    rounds = max(rank.gather(len(batches)))
    idle = microbatches(sequences[:1], 1, agent.pad_token_id)

    def logprobs(batch: Microbatch) -> torch.Tensor:
        targets_R = torch.from_numpy(batch.targets_R).to(rank.device, non_blocking=True)

        def work(model: nn.Module) -> torch.Tensor:
            hidden_RH = response_states(model, batch)
            head = read_head(model)
            chunks = plan_chunks(batch.lengths, len(head.weight_VH), max_logits_mb=max_logits_mb, device=rank.device)
            return fused_pass(
                hidden_RH,
                head,
                targets_R,
                batch.lengths,
                targets_R,
                chunks,
                temperature=temperature,
                precision=head_precision,
            ).logprobs_R.float()

        found: torch.Tensor = agent.policy(work)
        return found

    doing, remedy = f"scoring on {rank.device}", "lower score.token_budget or score.max_logits_mb"
    with out_of_memory_explained(agent.checkpoint, doing, remedy):
        # A rank without rows gathers weights with the others all the same.
        found = [logprobs(batch) for batch in [*batches, *idle * (rounds - len(batches))]]
    agent.policy.reshard()  # type: ignore[operator]
    return all_rows(rank, hand, by_sequence(batches, found[: len(batches)], len(sequences)))


def all_rows(rank: Rank, hand: Ints, own: Sequence[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.float32]]:
    """Return the log-probs of every row, of which this rank has computed those in its hand."""
    parts = rank.gather({int(row): own[row] for row in hand})
    found = {row: values for part in parts for row, values in part.items()}
    return [found[row] for row in range(len(own))]
