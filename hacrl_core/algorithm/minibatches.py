"""An iteration's responses in the order the learner sees them: one minibatch per update."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Response:
    """One response the learner may learn from: its credit joined with its log-probs."""

    rollout_id: str
    prompt_id: str
    sampler: str
    is_own: bool
    advantage: float
    omega: float
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    old_logprobs: tuple[float, ...]  # under the learner at the start of the iteration
    old_mean: float
    sampler_mean: float  # under the sampler when it wrote the response, in the sampler's tokens
    sampler_tokens: int
    reference: tuple[float, ...] | None  # under the campaign's first version of the learner, for KL


@dataclass(frozen=True)
class Minibatch:
    """The responses of one update, and the m that sets the window of the foreign ones among them."""

    window_index: int
    responses: tuple[Response, ...]

    @property
    def has_foreign(self) -> bool:
        """Whether another agent wrote one of the responses."""
        return any(not response.is_own for response in self.responses)


def successes_of_others(responses: Sequence[Response]) -> list[Response]:
    """Return the responses of other agents that were better than the learner's baseline: what is worth a replay."""
    return [response for response in responses if not response.is_own and response.advantage > 0]


def minibatches(
    responses: Sequence[Response],
    *,
    prompts_each: int,
    order: Literal["own_first", "mixed"],
    epochs: int,
    rng: np.random.Generator,
) -> list[Minibatch]:
    """Return the minibatches of an iteration, ``prompts_each`` prompts at a time.

    ``own_first``: the learner's own responses, then the others' in rounds. A round holds one minibatch of each other
    sampler, in an order drawn by ``rng``, all with the same window: a sampler's name decides nothing. With one other
    sampler a round is an update. ``mixed``: everybody's together, prompts shuffled by ``rng``.
    """
    prompts = list(dict.fromkeys(response.prompt_id for response in responses))
    if order == "mixed":
        prompts = [prompts[i] for i in rng.permutation(len(prompts))]
    groups = [set(prompts[start : start + prompts_each]) for start in range(0, len(prompts), prompts_each)]
    if order == "mixed":
        rounds = [[batch] for batch in _split(responses, groups)]
    else:
        rounds = [[batch] for batch in _split([r for r in responses if r.is_own], groups)]
        others = sorted({response.sampler for response in responses if not response.is_own})
        foreign = [_split([r for r in responses if r.sampler == other], groups) for other in others]
        for batches in zip_longest(*foreign):
            present = [batch for batch in batches if batch]
            rounds.append([present[i] for i in rng.permutation(len(present))] if len(present) > 1 else present)
    return [Minibatch(m, batch) for m, batches in enumerate(rounds * epochs) for batch in batches]


def _split(responses: Sequence[Response], groups: Sequence[set[str]]) -> list[tuple[Response, ...]]:
    """Return the responses by group of prompts, without empty groups."""
    batches = [tuple(r for r in responses if r.prompt_id in group) for group in groups]
    return [batch for batch in batches if batch]
