"""From one row per rollout to the arrays of the algorithm; a group with a hole is refused by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hacrl_core.algorithm.checks import FloatArray, masked_floats, require
from hacrl_core.errors import AlgorithmError


@dataclass(frozen=True)
class Groups:
    """``rewards_PNG`` is masked where the verifier failed; ``row_PNG`` leads back to the caller's rows."""

    prompt_ids: tuple[str, ...]
    rewards_PNG: np.ma.MaskedArray[Any, np.dtype[np.float64]]
    row_PNG: npt.NDArray[np.int64]
    rollout_ids_PNG: npt.NDArray[np.object_]

    def mean_rewards(self) -> FloatArray:
        """Return each agent's mean reward, the row it adds to the capability history; NaN if nothing was verified."""
        values, valid = masked_floats("rewards", self.rewards_PNG, axes="PNG")
        total_N, count_N = np.where(valid, values, 0.0).sum(axis=(0, 2)), valid.sum(axis=(0, 2))
        mean_N: FloatArray = np.where(count_N > 0, total_N / np.maximum(count_N, 1), np.nan)
        return mean_N


def arrange_groups(
    *,
    rollout_ids: Sequence[str],
    agent_ids: Sequence[str],
    prompt_ids: Sequence[str],
    rewards: Sequence[float | None],
    agents: Sequence[str],
) -> Groups:
    """Return rows in any order as P × N × G; a reward of None is a verifier failure.

    Within a group the order is that of the rows.
    """
    lengths = {len(rollout_ids), len(agent_ids), len(prompt_ids), len(rewards)}
    if len(lengths) != 1:
        raise AlgorithmError(f"rollout columns have different lengths {sorted(lengths)}; pass one entry per rollout")
    prompts = tuple(dict.fromkeys(prompt_ids))
    members: dict[tuple[str, str], list[int]] = {(prompt, agent): [] for prompt in prompts for agent in agents}
    seen: set[str] = set()
    for row, (rollout, prompt, agent) in enumerate(zip(rollout_ids, prompt_ids, agent_ids, strict=True)):
        if rollout in seen:
            raise AlgorithmError(f"rollout {rollout} appears twice; pass every rollout once")
        if (prompt, agent) not in members:
            raise AlgorithmError(f"rollout {rollout}: agent {agent!r} is not one of the samplers {list(agents)}")
        seen.add(rollout)
        members[prompt, agent].append(row)
    row_PNG = _rectangular(members, len(prompts), len(agents), rollout_ids)
    values = np.array([0.0 if reward is None else reward for reward in rewards], dtype=np.float64)
    failed = np.array([reward is None for reward in rewards], dtype=np.bool_)
    require("reward", np.isfinite(values), values, "verify it again, or pass None for a verifier error", rollout_ids)
    return Groups(
        prompt_ids=prompts,
        rewards_PNG=np.ma.masked_array(values[row_PNG], mask=failed[row_PNG]),
        row_PNG=row_PNG,
        rollout_ids_PNG=np.array(rollout_ids, dtype=object)[row_PNG],
    )


def _rectangular(
    members: dict[tuple[str, str], list[int]], prompts: int, agents: int, rollout_ids: Sequence[str]
) -> npt.NDArray[np.int64]:
    samples = max((len(rows) for rows in members.values()), default=0)
    if samples == 0:
        raise AlgorithmError("no rollouts to give credit for; the generate stage wrote none")
    for (prompt, agent), rows in members.items():
        if not rows:
            raise AlgorithmError(f"prompt {prompt!r}: sampler {agent!r} is missing; generate its rollouts again")
        if len(rows) != samples:
            raise AlgorithmError(
                f"prompt {prompt!r}: agent {agent!r} has {len(rows)} responses where others have {samples} "
                f"(its last is rollout {rollout_ids[rows[-1]]}); generate the missing ones again"
            )
    return np.array(list(members.values()), dtype=np.int64).reshape(prompts, agents, samples)
