"""Capability: how good an agent has lately been, and how good relative to another."""

import numpy as np
import numpy.typing as npt

from hacrl_core.algorithm.checks import FloatArray, as_floats, masked_floats
from hacrl_core.errors import AlgorithmError

CAPABILITY_FLOOR = 1e-8  # an agent that never scores still divides
OMEGA_MIN = 0.1
OMEGA_MAX = 10.0


def smoothed_capability(mean_rewards_IN: npt.ArrayLike, window: int) -> FloatArray:
    """Return the smoothed capability P̂ of each agent: its mean reward averaged over the last K iterations.

    Oldest iteration first; the last row is the current one, and is included. NaN (or a masked entry) says that the
    agent took no part in that iteration: it is left out of the average, so a newcomer's capability is that of its first
    iteration, and one that returns is not held to what it was more than K iterations ago. An agent absent from the
    whole window gets NaN, which `group_advantages` and `capability_ratio` refuse.
    """
    if window < 1:
        raise AlgorithmError(f"capability window {window}: must be at least 1 iteration")
    values_IN, taken_part_IN = masked_floats("mean rewards", mean_rewards_IN, axes="IN")
    history_IN = np.where(taken_part_IN, values_IN, np.nan)
    if history_IN.shape[0] == 0 or history_IN.shape[1] == 0:
        raise AlgorithmError(
            f"mean rewards: shape {history_IN.shape} is empty; the current iteration must be the last row"
        )
    if np.isinf(history_IN).any():
        raise AlgorithmError("mean rewards: an infinite value; verify the rewards of that iteration again")
    recent_IN = history_IN[-window:]
    present_IN = ~np.isnan(recent_IN)
    count_N = present_IN.sum(axis=0)
    total_N = np.where(present_IN, recent_IN, 0.0).sum(axis=0)
    mean_N = np.where(count_N > 0, total_N / np.maximum(count_N, 1), np.nan)
    capability_N: FloatArray = np.maximum(mean_N, CAPABILITY_FLOOR)  # np.maximum keeps NaN
    return capability_N


def capability_ratio(numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> FloatArray:
    """ω(a, b) = P̂a / P̂b, clamped to [0.1, 10] (paper, eq. 8).

    It says how much more a reward of `b` is worth on the scale of `a`.
    """
    top = np.asarray(numerator, dtype=np.float64)
    bottom = np.asarray(denominator, dtype=np.float64)
    for name, value in (("numerator", top), ("denominator", bottom)):
        if not (np.isfinite(value).all() and (value >= 0).all()):
            raise AlgorithmError(
                f"capability ratio: {name} {value.tolist()} is not a finite capability; "
                "an agent without a measured iteration in the window has none and cannot share rollouts"
            )
    ratio: FloatArray = np.clip(
        np.maximum(top, CAPABILITY_FLOOR) / np.maximum(bottom, CAPABILITY_FLOOR), OMEGA_MIN, OMEGA_MAX
    )
    return ratio


def gradient_omega(capability_N: npt.ArrayLike, *, learner: int) -> FloatArray:
    """Return ω(sampler, learner) of every sampler (paper, eq. 8); 1 for the learner itself.

    It is the factor of the sampler's responses in the learner's gradient.
    """
    capability = _capabilities(capability_N, learner)
    return capability_ratio(capability, capability[learner])


def baseline_omega(capability_N: npt.ArrayLike, *, learner: int) -> FloatArray:
    """Return ω(learner, sampler), a sampler's factor in the baseline: 1 / the *clamped* ω(sampler, learner)."""
    inverse: FloatArray = 1.0 / gradient_omega(capability_N, learner=learner)
    return inverse


def _capabilities(capability_N: npt.ArrayLike, learner: int) -> FloatArray:
    capability = as_floats("capability", capability_N, axes="N")
    if not 0 <= learner < capability.shape[0]:
        raise AlgorithmError(f"learner {learner}: there are {capability.shape[0]} agents, numbered from 0")
    return capability
