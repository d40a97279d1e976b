"""The mathematics of HACPO: pure functions on arrays, one module per mechanism. docs/algorithm.md reads beside it."""

from hacrl_core.algorithm.advantage import group_advantages, learner_advantages
from hacrl_core.algorithm.capability import baseline_omega, capability_ratio, gradient_omega, smoothed_capability
from hacrl_core.algorithm.clipping import calibrated_config
from hacrl_core.algorithm.diagnostics import (
    RowStats,
    credit_metrics,
    effective_sample_size,
    gradient_cosine,
    share_without_signal,
    summarise,
)
from hacrl_core.algorithm.groups import Groups, arrange_groups
from hacrl_core.algorithm.loss import hacpo_loss
from hacrl_core.algorithm.objective import Objective, ObjectiveRows, make_objective
from hacrl_core.config.algorithm import HacpoConfig, campaign_overrides, preset

__all__ = [
    "Groups",
    "HacpoConfig",
    "Objective",
    "ObjectiveRows",
    "RowStats",
    "arrange_groups",
    "baseline_omega",
    "calibrated_config",
    "campaign_overrides",
    "capability_ratio",
    "credit_metrics",
    "effective_sample_size",
    "gradient_cosine",
    "gradient_omega",
    "group_advantages",
    "hacpo_loss",
    "learner_advantages",
    "make_objective",
    "preset",
    "share_without_signal",
    "smoothed_capability",
    "summarise",
]
