"""avg@k, pass@k, best@k, maj@k and their uncertainty: per problem, over a benchmark, and by tag.

Axes: P problems, S samples of each. ``rewards_PS`` holds the verifier's rewards, NaN where it failed: a failed
verification is neither right nor wrong, so it is left out of averages, and a problem without any verdict is left out
altogether.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hacrl_core.errors import ContractError

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def avg_at_k(rewards_PS: Floats) -> Floats:
    """Return the mean reward of each problem's verified samples, NaN without any; k is the number of samples."""
    verified_PS = ~np.isnan(_checked(rewards_PS))
    total_P: Floats = np.where(verified_PS, rewards_PS, 0.0).sum(axis=1)
    with np.errstate(invalid="ignore"):
        mean_P: Floats = total_P / verified_PS.sum(axis=1)
    return mean_P


def pass_at_k(rewards_PS: Floats, k: int) -> Floats:
    """Return the chance that k samples, drawn without replacement, contain a right one: 1 − C(n−c, k) / C(n, k).

    This is the unbiased estimate from n ≥ k samples of which c are right (reward above ½); NaN for a problem with fewer
    than k verdicts.
    """
    rewards_PS = _checked(rewards_PS)
    _check_k(k, rewards_PS.shape[1])
    n_P = (~np.isnan(rewards_PS)).sum(axis=1).tolist()
    right_P = (rewards_PS > 0.5).sum(axis=1).tolist()
    # Integers, because C(2000, 1000) overflows a float; comb(a, k) is 0 for a < k: too few wrong ones to fill k places.
    return np.array([1 - comb(n - c, k) / comb(n, k) if n >= k else np.nan for n, c in zip(n_P, right_P, strict=True)])


def best_at_k(rewards_PS: Floats, k: int) -> Floats:
    """Return the best reward among each problem's first k samples; NaN where none is verified.

    The paper reports it on AIME (k = 30). Unlike ``pass_at_k`` it looks at one fixed choice of samples; the two agree
    when k is the number of samples.
    """
    rewards_PS = _checked(rewards_PS)
    _check_k(k, rewards_PS.shape[1])
    first_PK = rewards_PS[:, :k]
    best_P = np.where(np.isnan(first_PK), -np.inf, first_PK).max(axis=1)
    return np.where(np.isneginf(best_P), np.nan, best_P)


def majority_answers(answers_PS: Sequence[Sequence[str]], k: int) -> list[int | None]:
    """Return the first sample with the most common answer among the first k, None where no sample gives one.

    Empty answers (nothing extracted, or cut off) do not vote. Of equally common answers the one given first wins, so
    the result depends on the samples' order alone. Answers are compared as given: normalise them before.
    """
    chosen: list[int | None] = []
    for answers in answers_PS:
        _check_k(k, len(answers))
        votes: dict[str, int] = {}
        for answer in answers[:k]:
            if answer:
                votes[answer] = votes.get(answer, 0) + 1
        # max keeps the first of equals.
        winner = max(votes, key=votes.__getitem__) if votes else None
        chosen.append(None if winner is None else list(answers).index(winner))
    return chosen


def maj_at_k(rewards_PS: Floats, answers_PS: Sequence[Sequence[str]], k: int) -> Floats:
    """Return the reward of each problem's majority answer among the first k samples; 0 where none gives an answer."""
    rewards_PS = _checked(rewards_PS)
    if len(answers_PS) != len(rewards_PS) or any(len(answers) != rewards_PS.shape[1] for answers in answers_PS):
        raise ContractError(
            f"maj@{k}: answers and rewards {rewards_PS.shape} differ in shape; give one answer for each reward"
        )
    chosen = majority_answers(answers_PS, k)
    return np.array([0.0 if s is None else rewards_PS[p, s] for p, s in enumerate(chosen)], dtype=np.float64)


def wilson_interval(successes: float, trials: float, z: float = 1.959963984540054) -> Interval:
    """Return Wilson's score interval of a share (95 % by default); it also works for 0 of 30, where p ± z·σ has no
    width.

    Trials are problems: samples of one problem are not independent. For avg@k ``successes`` is therefore the sum over
    problems of the mean reward, and the interval is a little wide rather than much too narrow.
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


@dataclass(frozen=True)
class Outcomes:
    """Every sample of every problem of one benchmark, problems × samples."""

    # NaN where the verifier failed.
    rewards_PS: Floats
    # Extracted answers, empty where there is none.
    answers_PS: tuple[tuple[str, ...], ...]
    # Lengths of the responses.
    tokens_PS: NDArray[np.int64]
    # Whether a response was cut off at max_tokens.
    truncated_PS: NDArray[np.bool_]
    tags_P: tuple[Mapping[str, str], ...]

    def __post_init__(self) -> None:
        shape = np.shape(self.rewards_PS)
        shapes = [np.shape(self.tokens_PS), np.shape(self.truncated_PS), (len(self.answers_PS), *shape[1:])]
        if len(shape) != 2 or any(other != shape for other in shapes) or len(self.tags_P) != shape[0]:
            raise ContractError(
                f"evaluation: rewards {shape}, tokens, truncated, answers and tags differ in shape: {shapes}"
            )

    def select(self, problems: Sequence[int]) -> "Outcomes":
        """Return the outcomes of some of the problems."""
        rows = list(problems)
        return Outcomes(
            self.rewards_PS[rows],
            tuple(self.answers_PS[p] for p in rows),
            self.tokens_PS[rows],
            self.truncated_PS[rows],
            tuple(self.tags_P[p] for p in rows),
        )


def summarise(outcomes: Outcomes, ks: Sequence[int]) -> dict[str, float]:
    """Return avg@S with its Wilson interval; pass@k, best@k, maj@k for each k; tokens; shares truncated and unverified.

    A metric that no problem supports (all verifications failed) is left out rather than reported as NaN.
    """
    problems, samples = outcomes.rewards_PS.shape
    if problems == 0:
        return {"problems": 0.0, "samples": float(samples)}
    avg_P = avg_at_k(outcomes.rewards_PS)
    known_P = avg_P[~np.isnan(avg_P)]
    # Shaped rewards may leave [0, 1]; an interval of a share would then mean nothing.
    interval = wilson_interval(float(known_P.sum()), len(known_P)) if _are_shares(known_P) else None
    metrics = {
        "problems": float(problems),
        "samples": float(samples),
        f"avg@{samples}": _mean(known_P),
        f"avg@{samples}/low": interval.low if interval else None,
        f"avg@{samples}/high": interval.high if interval else None,
        "tokens_mean": float(outcomes.tokens_PS.mean()),
        "tokens_max": float(outcomes.tokens_PS.max()),
        "tokens_total": float(outcomes.tokens_PS.sum()),
        "truncated_share": float(outcomes.truncated_PS.mean()),
        "unverified_share": float(np.isnan(outcomes.rewards_PS).mean()),
    }
    for k in dict.fromkeys(ks):
        metrics[f"pass@{k}"] = _mean(pass_at_k(outcomes.rewards_PS, k))
        metrics[f"best@{k}"] = _mean(best_at_k(outcomes.rewards_PS, k))
        metrics[f"maj@{k}"] = _mean(maj_at_k(outcomes.rewards_PS, outcomes.answers_PS, k))
    return {name: value for name, value in metrics.items() if value is not None}


def by_tag(outcomes: Outcomes, ks: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the metrics for each value of each tag, e.g. ``["level"]["5"]["avg@1"]``; numbers sort as numbers."""
    members: dict[str, dict[str, list[int]]] = {}
    for index, tags in enumerate(outcomes.tags_P):
        for name, value in tags.items():
            members.setdefault(name, {}).setdefault(value, []).append(index)
    return {
        name: {value: summarise(outcomes.select(values[value]), ks) for value in sorted(values, key=_natural)}
        for name, values in sorted(members.items())
    }


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


def _natural(value: str) -> tuple[int, int, str]:
    return (0, int(value), "") if value.isascii() and value.isdigit() else (1, 0, value)


def _are_shares(values: Floats) -> bool:
    return bool(len(values) and values.min() >= 0 and values.max() <= 1)


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
