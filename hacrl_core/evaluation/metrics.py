"""avg@k, pass@k, best@k, maj@k and their uncertainty, per problem or over problems.

Axes: P problems, S samples of each. ``rewards_PS`` holds the verifier's rewards, NaN where it failed: a failed verification
is neither right nor wrong, so it is left out of averages, and a problem without any verdict is left out altogether.
"""

from collections.abc import Sequence
from math import comb, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hacrl_core.errors import ContractError

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    low: float
    high: float


def avg_at_k(rewards_PS: Floats) -> Floats:
    """Mean reward of each problem's verified samples, NaN where there are none; k is the number of samples."""
    verified_PS = ~np.isnan(_checked(rewards_PS))
    total_P: Floats = np.where(verified_PS, rewards_PS, 0.0).sum(axis=1)
    with np.errstate(invalid="ignore"):
        mean_P: Floats = total_P / verified_PS.sum(axis=1)
    return mean_P


def pass_at_k(rewards_PS: Floats, k: int) -> Floats:
    """Chance that k of a problem's samples, drawn without putting back, contain a right one: 1 − C(n−c, k) / C(n, k).

    The unbiased estimate from n ≥ k samples of which c are right (reward above ½); NaN for a problem with fewer than k verdicts.
    """
    rewards_PS = _checked(rewards_PS)
    _check_k(k, rewards_PS.shape[1])
    n_P = (~np.isnan(rewards_PS)).sum(axis=1).tolist()
    right_P = (rewards_PS > 0.5).sum(axis=1).tolist()
    # Whole numbers, for C(2000, 1000) has no float; comb(a, k) is 0 for a < k: too few wrong ones to fill all k places.
    return np.array([1 - comb(n - c, k) / comb(n, k) if n >= k else np.nan for n, c in zip(n_P, right_P, strict=True)])


def best_at_k(rewards_PS: Floats, k: int) -> Floats:
    """Best reward among each problem's first k samples: what the paper reports on AIME (k = 30); NaN where none is verified.

    Unlike ``pass_at_k`` it looks at one fixed choice of samples; the two agree when k is the number of samples.
    """
    rewards_PS = _checked(rewards_PS)
    _check_k(k, rewards_PS.shape[1])
    first_PK = rewards_PS[:, :k]
    best_P = np.where(np.isnan(first_PK), -np.inf, first_PK).max(axis=1)
    return np.where(np.isneginf(best_P), np.nan, best_P)


def majority_answers(answers_PS: Sequence[Sequence[str]], k: int) -> list[int | None]:
    """Index of the first sample that gives the commonest answer among the first k, None where no sample gives one.

    Empty answers (nothing extracted, or cut off) do not vote. Of equally common answers the one given first wins, so the
    result depends on nothing but the samples' order. Answers are compared as given: normalise them before.
    """
    chosen: list[int | None] = []
    for answers in answers_PS:
        _check_k(k, len(answers))
        votes: dict[str, int] = {}
        for answer in answers[:k]:
            if answer:
                votes[answer] = votes.get(answer, 0) + 1
        winner = max(votes, key=votes.__getitem__) if votes else None  # max keeps the first of equals
        chosen.append(None if winner is None else list(answers).index(winner))
    return chosen


def maj_at_k(rewards_PS: Floats, answers_PS: Sequence[Sequence[str]], k: int) -> Floats:
    """Reward of each problem's majority answer among the first k samples; 0 where no sample gives an answer."""
    rewards_PS = _checked(rewards_PS)
    if len(answers_PS) != len(rewards_PS) or any(len(answers) != rewards_PS.shape[1] for answers in answers_PS):
        raise ContractError(
            f"maj@{k}: answers and rewards {rewards_PS.shape} differ in shape; give one answer for each reward"
        )
    chosen = majority_answers(answers_PS, k)
    return np.array([0.0 if s is None else rewards_PS[p, s] for p, s in enumerate(chosen)], dtype=np.float64)


def wilson_interval(successes: float, trials: float, z: float = 1.959963984540054) -> Interval:
    """Wilson's score interval of a share (95 % by default): sensible also for 0 of 30, where p ± z·σ has no width.

    Trials are problems: samples of one problem are not independent, so for avg@k ``successes`` is the sum over problems of
    the mean reward, and the interval is a little wide rather than much too narrow.
    """
    if trials < 0 or not 0 <= successes <= trials + 1e-9:
        raise ContractError(
            f"Wilson interval: {successes} successes of {trials} trials; successes must lie between 0 and trials"
        )
    if trials == 0:
        return Interval(0.0, 1.0)
    share = min(successes / trials, 1.0)
    centre = share + z * z / (2 * trials)
    spread = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    low = 0.0 if share == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if share == 1 else min(1.0, (centre + spread) / scale)
    return Interval(low, high)


def _checked(rewards_PS: Floats) -> Floats:
    rewards_PS = np.asarray(rewards_PS, dtype=np.float64)
    if rewards_PS.ndim != 2:
        raise ContractError(f"rewards have shape {rewards_PS.shape}; evaluation needs problems × samples")
    if np.isinf(rewards_PS).any():
        raise ContractError("rewards contain infinities; the verifier must give finite rewards, or NaN where it failed")
    return rewards_PS


def _check_k(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ContractError(f"k is {k}, the problems have {samples} samples; k must lie between 1 and that")
