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
    window_index_B: npt.ArrayLike,
    weight_B: npt.ArrayLike | None = None,
) -> HacpoConfig:
    """Return the config with δ such that ``calibrated_share`` of the responses is inside the window they will meet.

    Call it once per iteration, before the first update, with the scores of all foreign responses that carry an
    advantage; ``window_index_B`` is the m of the minibatch that each is in, so that the narrowing by δ_step is counted
    in. Responses above 1 are outside whatever δ is; if they leave too few, every response below 1 is let in. Returns
    the config unchanged if ``calibrated_share`` is not set.
    """
    if config.calibrated_share is None:
        return config
    learner = as_floats("learner mean log-probs", learner_mean_logprob_B, axes="B")
    sampler = as_floats("sampler mean log-probs", sampler_mean_logprob_B, axes="B")
    mass = np.ones_like(learner) if weight_B is None else as_floats("weights", weight_B, axes="B")
    require("log-ratio", np.isfinite(learner - sampler), learner - sampler, "score the response again")
    limit = config.max_abs_log_ratio
    ratio = np.exp(np.clip(learner - sampler, -limit, limit))
    below_ceiling = ratio <= FOREIGN_CEILING
    if not below_ceiling.any():
        return config.model_copy(update={"calibrated_share": None})
    # Inside: ratio ≥ 1 − δ + m·δ_step, or ratio − m·δ_step ≥ 1 − δ.
    step = config.cross_clip_step if config.stepwise_clip else 0.0
    narrowed = step * as_floats("window indices", window_index_B, axes="B")
    bound = ratio * (1 - CALIBRATION_SLACK) - np.where(ratio < FOREIGN_CEILING, narrowed, 0.0)  # 1 is always inside
    downwards = np.argsort(-bound[below_ceiling], kind="stable")
    inside = np.cumsum(mass[below_ceiling][downwards])
    enough = np.searchsorted(inside, config.calibrated_share * mass.sum() * (1 - 1e-12))
    lower_bound = float(bound[below_ceiling][downwards][min(int(enough), len(downwards) - 1)])
    return config.model_copy(update={"cross_clip_delta": 1.0 - lower_bound, "calibrated_share": None})
