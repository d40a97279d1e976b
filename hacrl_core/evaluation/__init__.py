"""Metrics of a benchmark: arrays in, numbers out."""

from hacrl_core.evaluation.metrics import (
    Interval,
    Outcomes,
    avg_at_k,
    best_at_k,
    by_tag,
    maj_at_k,
    majority_answers,
    pass_at_k,
    summarise,
    wilson_interval,
)

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
