"""Advantage: every response of a prompt, everyone's, judged on the learner's scale."""

import numpy as np
import numpy.typing as npt

from hacrl_core.algorithm.capability import baseline_omega
from hacrl_core.algorithm.checks import BoolArray, FloatArray, as_floats, masked_floats, require
from hacrl_core.config.algorithm import CreditConfig
from hacrl_core.errors import AlgorithmError

SIGMA_EPSILON = 1e-6
# A weak sampler that solves a prompt is worth ω > 1 each; together they may lift μ above the largest reward, and then
# even a right answer would have a negative advantage. The slack keeps rounding from deciding.
BASELINE_CEILING = 1.0 + 1e-9


def group_advantages(
    rewards_PNG: npt.ArrayLike,
    capability_N: npt.ArrayLike,
    *,
    learner: int,
    rollout_ids_PNG: npt.ArrayLike | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return one learner's advantages A = (R − μ) / (σ + 1e-6), and the capability-aware baseline μ of each prompt.

    ``rewards_PNG`` may be a `numpy.ma` masked array: masked responses (the verifier failed) count neither in μ nor in σ
    and get advantage 0. A NaN that is not masked is an error. A prompt whose rewards are all equal teaches nothing: A =
    0, and the baseline returned is that reward. A prompt with nothing but masked responses has baseline 0.
    """
    rewards, valid = _rewards(rewards_PNG, rollout_ids_PNG)
    omega_N = baseline_omega(capability_N, learner=learner)
    if omega_N.shape[0] != rewards.shape[1]:
        raise AlgorithmError(
            f"capability of {omega_N.shape[0]} agents, rewards of {rewards.shape[1]}; a sampler is missing"
        )
    baseline_P = capability_baseline(rewards, valid, omega_N)
    baseline_P = np.where(baseline_P > BASELINE_CEILING, _own_mean(rewards, valid, learner), baseline_P)

    lowest_P = np.where(valid, rewards, np.inf).min(axis=(1, 2))
    highest_P = np.where(valid, rewards, -np.inf).max(axis=(1, 2))
    silent_P = lowest_P >= highest_P  # all equal; also inf >= -inf where everything is masked
    common_P = np.where(np.isfinite(lowest_P), lowest_P, 0.0)
    baseline_P = np.where(silent_P, common_P, baseline_P)

    advantages = (rewards - baseline_P[:, None, None]) / (_deviation(rewards, valid) + SIGMA_EPSILON)[:, None, None]
    return np.where(valid & ~silent_P[:, None, None], advantages, 0.0), baseline_P


def learner_advantages(
    rewards_PNG: npt.ArrayLike,
    capability_N: npt.ArrayLike,
    *,
    learner: int,
    config: CreditConfig,
    rollout_ids_PNG: npt.ArrayLike | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return `group_advantages` as a config wants them.

    Without ``share_rollouts`` only own responses count; without ``capability_aware_advantage`` every ω is 1. A method
    with a file of its own brings its own credit.
    """
    if config.plug_in is not None:
        return config.plug_in.credit(*_rewards(rewards_PNG, rollout_ids_PNG), learner)
    capability = as_floats("capability", capability_N, axes="N")
    if not config.capability_aware_advantage:
        capability = np.ones_like(capability)
    if config.share_rollouts:
        return group_advantages(rewards_PNG, capability, learner=learner, rollout_ids_PNG=rollout_ids_PNG)
    rewards, valid = _rewards(rewards_PNG, rollout_ids_PNG)
    if not 0 <= learner < rewards.shape[1]:
        raise AlgorithmError(f"learner {learner}: there are {rewards.shape[1]} agents, numbered from 0")
    own = slice(learner, learner + 1)
    own_rewards = np.ma.masked_array(rewards[:, own], mask=~valid[:, own])
    advantages = np.zeros_like(rewards)
    advantages[:, own], baseline_P = group_advantages(own_rewards, np.ones(1), learner=0)
    return advantages, baseline_P


def capability_baseline(rewards_PNG: FloatArray, valid_PNG: BoolArray, omega_N: FloatArray) -> FloatArray:
    """μ = mean over all valid responses of ω(learner, sampler)·R, before the ceiling and the rule for silent prompts.

    With ω exact each sampler's term has the learner's expected reward, so the mean is unbiased whatever each sampler's
    share of valid responses.
    """
    weighted = np.where(valid_PNG, rewards_PNG, 0.0) * omega_N[None, :, None]
    mean: FloatArray = weighted.sum(axis=(1, 2)) / np.maximum(valid_PNG.sum(axis=(1, 2)), 1)
    return mean


def _own_mean(rewards: FloatArray, valid: BoolArray, learner: int) -> FloatArray:
    """The learner's own mean reward on each prompt; the pooled mean where none of its own was verified."""
    kept = np.where(valid, rewards, 0.0)
    own_count = valid[:, learner].sum(axis=1)
    pooled = kept.sum(axis=(1, 2)) / np.maximum(valid.sum(axis=(1, 2)), 1)
    own = kept[:, learner].sum(axis=1) / np.maximum(own_count, 1)
    mean: FloatArray = np.where(own_count > 0, own, pooled)
    return mean


def _deviation(rewards: FloatArray, valid: BoolArray) -> FloatArray:
    """σ: sample standard deviation (n − 1) of the raw rewards of each prompt."""
    count = valid.sum(axis=(1, 2))
    mean = np.where(valid, rewards, 0.0).sum(axis=(1, 2)) / np.maximum(count, 1)
    squares = np.where(valid, (rewards - mean[:, None, None]) ** 2, 0.0).sum(axis=(1, 2))
    deviation: FloatArray = np.sqrt(squares / np.maximum(count - 1, 1))
    return deviation


def _rewards(rewards_PNG: npt.ArrayLike, rollout_ids_PNG: npt.ArrayLike | None) -> tuple[FloatArray, BoolArray]:
    values, valid = masked_floats("rewards", rewards_PNG, axes="PNG")
    if 0 in values.shape:
        raise AlgorithmError(
            f"rewards: shape {values.shape} is empty; every agent must answer at least one prompt once"
        )
    ids = None if rollout_ids_PNG is None else np.asarray(rollout_ids_PNG, dtype=object)
    require("reward", np.isfinite(values) | ~valid, values, "verify it again, or mask it as a verifier error", ids)
    return np.where(valid, values, 0.0), valid
