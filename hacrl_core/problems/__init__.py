"""Problems with verifiable answers: the built-in arithmetic, datasets, presets, and the order in which they come."""

from hacrl_core.problems.datasets import load_problems
from hacrl_core.problems.presets import PRESETS
from hacrl_core.problems.problem import Message, Problem
from hacrl_core.problems.sets import ProblemSet, WithinLength, problem_order, problems_for_iteration, within_length

__all__ = [
    "PRESETS",
    "Message",
    "Problem",
    "ProblemSet",
    "WithinLength",
    "load_problems",
    "problem_order",
    "problems_for_iteration",
    "within_length",
]
