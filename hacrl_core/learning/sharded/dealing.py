"""Which rank runs which rows of a minibatch."""

import heapq
from collections.abc import Sequence

import numpy as np

from hacrl_core.learning.sequences import Ints, TrainSequence


def deal(sequences: Sequence[TrainSequence], ranks: int, *, whole_prompts: bool = False) -> list[Ints]:
    """Deal rows out so that ranks have about the same number of tokens: the longest first, each to the emptiest rank.

    The same on every rank, without a word between them. ``whole_prompts`` keeps the responses of a prompt together, for
    models that run a shared prefix once. A rank may get nothing.
    """
    groups: dict[object, list[int]] = {}
    for row, sequence in enumerate(sequences):
        groups.setdefault(sequence.prompt_token_ids if whole_prompts else row, []).append(row)
    tokens = [len(s.prompt_token_ids) + len(s.response_token_ids) for s in sequences]
    hands: list[list[int]] = [[] for _ in range(ranks)]
    emptiest = [(0, rank) for rank in range(ranks)]
    for rows in sorted(groups.values(), key=lambda rows: (-sum(tokens[row] for row in rows), rows)):
        held, rank = heapq.heappop(emptiest)
        hands[rank] += rows
        heapq.heappush(emptiest, (held + sum(tokens[row] for row in rows), rank))
    return [np.array(sorted(hand), dtype=np.int64) for hand in hands]
