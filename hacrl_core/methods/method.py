"""What a method is: credit for everybody's responses, and the term of a foreign response, as two pure functions.

A method's file names neither configs nor models: credit works on numpy arrays, the term on tensors through their own
methods, so that the config can list methods without torch. Own responses have GSPO's or GRPO's term, which
`hacrl_core/algorithm/hacpo.py` holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# A torch.Tensor. Its name would import torch, which listing methods must not do.
Tensor = Any
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
# (rewards_PNG, valid_PNG, learner) → advantages_PNG and the baseline of each prompt.
Credit = Callable[[Floats, Bools, int], tuple[Floats, Floats]]
# (mean log-prob under the learner, log s, advantage) → the objective, and its slope by the log-prob over the advantage.
ForeignTerm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Method:
    """A way of sharing experience; raise ``version`` when the same inputs give other numbers."""

    name: str
    version: int
    equation: str
    source: str
    reading: str  # what the source leaves open, and how it is read here; empty where nothing is
    credit: Credit
    foreign: ForeignTerm | None  # None: the others' rewards are read, their responses are not learned from


def pooled(rewards_PNG: Floats, valid_PNG: Bools, learner: int) -> tuple[Floats, Floats]:
    """A = (R − mean) / (σ + 1e-6) over everybody's responses to a prompt, as in one large group."""
    return _normalised(rewards_PNG, valid_PNG, valid_PNG)


def own_group(rewards_PNG: Floats, valid_PNG: Bools, learner: int) -> tuple[Floats, Floats]:
    """A of the learner's own responses over its own group; 0 for all others."""
    own = valid_PNG.copy()
    own[:, np.arange(rewards_PNG.shape[1]) != learner] = False
    return _normalised(rewards_PNG, own, own)


def _normalised(rewards_PNG: Floats, counted_PNG: Bools, given_PNG: Bools) -> tuple[Floats, Floats]:
    count_P = np.maximum(counted_PNG.sum(axis=(1, 2)), 1)
    mean_P = np.where(counted_PNG, rewards_PNG, 0.0).sum(axis=(1, 2)) / count_P
    off_PNG = np.where(counted_PNG, rewards_PNG - mean_P[:, None, None], 0.0)
    sigma_P = np.sqrt((off_PNG**2).sum(axis=(1, 2)) / np.maximum(count_P - 1, 1))
    silent_P = np.abs(off_PNG).max(axis=(1, 2)) <= 1e-12
    advantages = (rewards_PNG - mean_P[:, None, None]) / (sigma_P + 1e-6)[:, None, None]
    return np.where(given_PNG & ~silent_P[:, None, None], advantages, 0.0), mean_P
