"""Statistics of a benchmark: arrays in, numbers out."""

from hacrl_core.evaluation.metrics import (
    Interval,
    avg_at_k,
    best_at_k,
    maj_at_k,
    majority_answers,
    pass_at_k,
    wilson_interval,
)
from hacrl_core.evaluation.summary import Outcomes, by_tag, summarise

__all__ = [
    "Interval",
    "Outcomes",
    "avg_at_k",
    "best_at_k",
    "by_tag",
    "maj_at_k",
    "majority_answers",
    "pass_at_k",
    "summarise",
    "wilson_interval",
]
