"""Clipping: what is left of a response's weight, for own responses (GSPO) and for foreign ones (HACPO)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hacrl_core.algorithm.checks import as_floats, require
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.errors import AlgorithmError

# Above 1 a foreign response would outweigh our own, so the ceiling is 1.
FOREIGN_CEILING = 1.0
# The response that sets a calibrated bound must still be inside after the ratio is computed again in float32.
CALIBRATION_SLACK = 1e-6


@dataclass(frozen=True)
class Terms:
    """Elementwise, whatever the shape: one entry per response, or per token for token-level ratios."""

    objective: Tensor  # to be maximised, differentiable
    weight: Tensor  # gradient of the objective by the log-prob, divided by the advantage; 0 where clipped
    below: Tensor  # clipped at the lower bound
    above: Tensor  # clipped at the upper bound


def own_terms(ratio: Tensor, advantage: Tensor, config: HacpoConfig) -> Terms:
    """GSPO: min(s·A, clip(s, 1 − low, 1 + high)·A). The `min` clips only what would move further the way the advantage points."""
    low, high = 1.0 - config.self_clip_low, 1.0 + config.self_clip_high
    objective = torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage)
    now = ratio.detach()
    below, above = (now < low) & (advantage < 0), (now > high) & (advantage > 0)
    return Terms(objective, now * ~(below | above), below, above)


def foreign_terms(ratio: Tensor, advantage: Tensor, omega: Tensor, lower_bound: float, config: HacpoConfig) -> Terms:
    """clip(s, low, 1) · stopgrad(clip(s))^α · ω(sampler, learner) · A, without `min` (eq. of the foreign objective, section 4).

    ``pessimistic`` (ours): min(s·A, clip(s, low, 1)·A) · stopgrad(min(s, 1))^α · ω. The two naive readings take GSPO's term.
    """
    omega = omega if config.capability_in_gradient else torch.ones_like(omega)
    if config.foreign_treatment != "hacpo":
        own = own_terms(ratio, advantage, config)
        return Terms(own.objective * omega, own.weight * omega, own.below, own.above)
    now = ratio.detach()
    if not config.cross_clip:
        damping, nowhere = now**config.alpha * omega, torch.zeros_like(now, dtype=torch.bool)
        return Terms(ratio * damping * advantage, now * damping, nowhere, nowhere)
    clipped = torch.clamp(ratio, lower_bound, FOREIGN_CEILING)
    below, above = now < lower_bound, now > FOREIGN_CEILING
    if config.pessimistic:
        below, above = below & (advantage < 0), above & (advantage > 0)
        damping = torch.clamp(now, max=FOREIGN_CEILING) ** config.alpha * omega
        objective = torch.minimum(ratio * advantage, clipped * advantage) * damping
    else:
        damping = clipped.detach() ** config.alpha * omega
        objective = clipped * damping * advantage
    return Terms(objective, now * damping * ~(below | above), below, above)


def calibrated_config(
    config: HacpoConfig,
    learner_mean_logprob_B: npt.ArrayLike,
    sampler_mean_logprob_B: npt.ArrayLike,
    is_own_B: npt.ArrayLike,
    weight_B: npt.ArrayLike | None = None,
) -> HacpoConfig:
    """Extension, not of the paper: δ chosen so that ``calibrated_share`` of an iteration's foreign responses is inside [1 − δ, 1].

    Call it once per iteration with the scores of *all* responses, before the first update; returns the config unchanged if
    ``calibrated_share`` is not set. Responses above 1 are outside whatever δ is; if they leave too few, every response
    below 1 is let in. Later updates narrow the calibrated window by δ_step as they narrow any other.
    """
    if config.calibrated_share is None:
        return config
    learner = as_floats("learner mean log-probs", learner_mean_logprob_B, axes="B")
    sampler = as_floats("sampler mean log-probs", sampler_mean_logprob_B, axes="B")
    foreign = ~np.asarray(is_own_B, dtype=np.bool_)
    weight = np.ones_like(learner) if weight_B is None else as_floats("weights", weight_B, axes="B")
    require("log-ratio", np.isfinite(learner - sampler), learner - sampler, "score the response again")
    limit = config.max_abs_log_ratio
    ratio, mass = np.exp(np.clip(learner - sampler, -limit, limit))[foreign], weight[foreign]
    below_ceiling = ratio <= FOREIGN_CEILING
    if not below_ceiling.any():
        return config.model_copy(update={"calibrated_share": None})
    downwards = np.argsort(-ratio[below_ceiling], kind="stable")
    ratio_sorted, inside = ratio[below_ceiling][downwards], np.cumsum(mass[below_ceiling][downwards])
    enough = np.searchsorted(inside, config.calibrated_share * mass.sum() * (1 - 1e-12))
    lower_bound = float(ratio_sorted[min(int(enough), len(ratio_sorted) - 1)]) * (1 - CALIBRATION_SLACK)
    return config.model_copy(update={"cross_clip_delta": 1.0 - lower_bound, "calibrated_share": None})


def require_calibrated(config: HacpoConfig) -> None:
    """A bound taken from one minibatch would differ from the iteration's, so the loss refuses to guess it."""
    if config.calibrated_share is not None:
        raise AlgorithmError(
            f"calibrated_share {config.calibrated_share:g}: the window is not chosen yet; "
            "pass the config through calibrated_config with the iteration's scores first"
        )
