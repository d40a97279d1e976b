"""The mathematics of HACPO as pure functions on arrays.

`hacpo` is the page to read first; docs/algorithm.md explains it.
"""

from hacrl_core.algorithm.advantage import group_advantages, learner_advantages
from hacrl_core.algorithm.calibration import calibrated_config
from hacrl_core.algorithm.capability import baseline_omega, capability_ratio, gradient_omega, smoothed_capability
from hacrl_core.algorithm.diagnostics import (
    RowStats,
    cosine_of_norms,
    credit_metrics,
    effective_sample_size,
    foreign_weight_bound,
    share_without_signal,
    summarise,
)
from hacrl_core.algorithm.groups import Groups, arrange_groups
from hacrl_core.algorithm.hacpo import Terms, foreign_window, hacpo_loss
from hacrl_core.algorithm.objective import Objective, ObjectiveRows, make_objective
from hacrl_core.config.algorithm import HacpoConfig, campaign_overrides, preset

__all__ = [
    "Groups",
    "HacpoConfig",
    "Objective",
    "ObjectiveRows",
    "RowStats",
    "Terms",
    "arrange_groups",
    "baseline_omega",
    "calibrated_config",
    "campaign_overrides",
    "capability_ratio",
    "cosine_of_norms",
    "credit_metrics",
    "effective_sample_size",
    "foreign_weight_bound",
    "foreign_window",
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
