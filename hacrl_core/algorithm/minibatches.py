"""An iteration's responses in the order the learner sees them: one minibatch per update."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    reference: tuple[float, ...] | None  # under the campaign's first version of the learner, for KL


def minibatches(
    responses: Sequence[Response],
    *,
    prompts_each: int,
    order: Literal["own_first", "mixed"],
    epochs: int,
    rng: np.random.Generator,
) -> list[list[Response]]:
    """Return the minibatches of an iteration, ``prompts_each`` prompts at a time.

    ``own_first``: the learner's own responses, then each other sampler's in the order of their names; ``mixed``:
    everybody's together, prompts shuffled by ``rng``.
    """
    prompts = list(dict.fromkeys(response.prompt_id for response in responses))
    if order == "mixed":
        prompts = [prompts[i] for i in rng.permutation(len(prompts))]
        sources = [list(responses)]
    else:
        others = sorted({response.sampler for response in responses if not response.is_own})
        sources = [[r for r in responses if r.is_own], *([r for r in responses if r.sampler == o] for o in others)]
    groups = [set(prompts[start : start + prompts_each]) for start in range(0, len(prompts), prompts_each)]
    batches = [[r for r in source if r.prompt_id in group] for source in sources for group in groups]
    return [batch for batch in batches if batch] * epochs
