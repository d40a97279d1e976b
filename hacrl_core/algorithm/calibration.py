"""Calibrated window: δ chosen from an iteration's scores. An extension, not of the paper."""

import numpy as np
import numpy.typing as npt

from hacrl_core.algorithm.checks import as_floats, require
from hacrl_core.algorithm.hacpo import FOREIGN_CEILING
from hacrl_core.config.algorithm import HacpoConfig

# The response that sets a calibrated bound must still be inside after the ratio is computed again in float32.
CALIBRATION_SLACK = 1e-6


def calibrated_config(
    config: HacpoConfig,
    learner_mean_logprob_B: npt.ArrayLike,
    sampler_mean_logprob_B: npt.ArrayLike,
    is_own_B: npt.ArrayLike,
    weight_B: npt.ArrayLike | None = None,
) -> HacpoConfig:
    """Return the config with δ such that ``calibrated_share`` of an iteration's foreign responses is inside [1 − δ, 1].

    Call it once per iteration with the scores of *all* responses, before the first update; returns the config unchanged
    if ``calibrated_share`` is not set. Responses above 1 are outside whatever δ is; if they leave too few, every
    response below 1 is let in. Later updates narrow the calibrated window by δ_step as they narrow any other.
    """
    if config.calibrated_share is None:
        return config
    learner = as_floats("learner mean log-probs", learner_mean_logprob_B, axes="B")
    sampler = as_floats("sampler mean log-probs", sampler_mean_logprob_B, axes="B")
    foreign = ~np.asarray(is_own_B, dtype=np.bool_)
    weight = np.ones_like(learner) if weight_B is None else as_floats("weights", weight_B, axes="B")
    require("log-ratio", np.isfinite(learner - sampler), learner - sampler, "score the response again")
    limit = config.max_abs_log_ratio
    ratio = np.exp(np.clip(learner - sampler, -limit, limit))[foreign]
    mass = weight[foreign]
    below_ceiling = ratio <= FOREIGN_CEILING
    if not below_ceiling.any():
        return config.model_copy(update={"calibrated_share": None})
    downwards = np.argsort(-ratio[below_ceiling], kind="stable")
    ratio_sorted = ratio[below_ceiling][downwards]
    inside = np.cumsum(mass[below_ceiling][downwards])
    enough = np.searchsorted(inside, config.calibrated_share * mass.sum() * (1 - 1e-12))
    lower_bound = float(ratio_sorted[min(int(enough), len(ratio_sorted) - 1)]) * (1 - CALIBRATION_SLACK)
    return config.model_copy(update={"cross_clip_delta": 1.0 - lower_bound, "calibrated_share": None})
