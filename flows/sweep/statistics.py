"""Comparing two methods over seeds: paired differences, their interval, size and probability, with nothing but numpy and scipy.

Both methods start each seed from the same agents and meet the same prompts, so the differences are paired by seed. Seeds are few, which
decides the choices here: intervals are widened for small samples, and p-values are exact.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

EXACT_SEEDS = 6  # up to 6^6 = 46,656 resamples are simply listed
RESAMPLES = 20_000
EXACT_SIGNS = 16  # up to 2^16 sign patterns are listed


@dataclass(frozen=True)
class Difference:
    """Method minus baseline over the seeds both have."""

    seeds: int
    mean: float
    low: float
    high: float
    effect: float | None  # d_z: mean over standard deviation of the differences; None with one seed or no spread
    p: float | None  # two-sided; None with one seed
    higher: int  # seeds in which the method is above the baseline

    @property
    def smallest_p(self) -> float:
        """What no result with so many seeds can go below."""
        return smallest_p(self.seeds)


def compare(method_S: Sequence[float], baseline_S: Sequence[float], level: float = 0.95) -> Difference:
    """Paired by position: ``method_S[i]`` and ``baseline_S[i]`` are of one seed."""
    if len(method_S) != len(baseline_S) or not len(method_S):
        raise ValueError(
            f"{len(method_S)} values against {len(baseline_S)}: pairs need equally many of both, and at least one"
        )
    differences_S = np.asarray(method_S, dtype=np.float64) - np.asarray(baseline_S, dtype=np.float64)
    low, high = bootstrap_interval(differences_S, level)
    return Difference(
        seeds=len(differences_S),
        mean=float(differences_S.mean()),
        low=low,
        high=high,
        effect=effect_size(differences_S),
        p=sign_flip_p(differences_S) if len(differences_S) > 1 else None,
        higher=int(np.sum(differences_S > 0)),
    )


def bootstrap_interval(values_S: Sequence[float] | Floats, level: float = 0.95) -> tuple[float, float]:
    """Expanded percentile bootstrap of the mean (Hesterberg 2015): with few seeds the plain one is far too narrow.

    It takes the percentiles at Φ(±√(n/(n−1))·t), which makes up for the spread that resampling n values loses and for not knowing it.
    One value has no interval: both ends are infinite.
    """
    values_S = np.asarray(values_S, dtype=np.float64)
    n = len(values_S)
    if n < 2:
        return -math.inf, math.inf
    t = stats.t.ppf(0.5 + level / 2, n - 1)
    tail = float(stats.norm.cdf(-math.sqrt(n / (n - 1)) * t))
    low, high = np.quantile(_resampled_means(values_S), [tail, 1 - tail])
    return float(low), float(high)


def _resampled_means(values_S: Floats) -> Floats:
    """Means of all resamples where they can be listed, else of many drawn with a fixed seed: equal input, equal interval."""
    n = len(values_S)
    if n <= EXACT_SEEDS:
        chosen = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        chosen = np.random.default_rng(n).integers(n, size=(RESAMPLES, n))
    means: Floats = values_S[chosen].mean(axis=1)
    return means


def sign_flip_p(differences_S: Sequence[float] | Floats) -> float:
    """Exact two-sided permutation test: how many of the 2^n sign patterns give a mean at least as far from zero?"""
    differences_S = np.asarray(differences_S, dtype=np.float64)
    n = len(differences_S)
    if n <= EXACT_SIGNS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=n)))
    else:
        signs = np.random.default_rng(n).choice((1.0, -1.0), size=(2**EXACT_SIGNS, n))
        signs[0] = 1.0
    sums = np.abs(signs @ differences_S)
    # Sums of the same numbers in another order may differ in the last bit.
    return float(np.mean(sums >= abs(differences_S.sum()) * (1 - 1e-9) - 1e-12))


def smallest_p(seeds: int) -> float:
    return 2.0 ** (1 - seeds)


def effect_size(differences_S: Sequence[float] | Floats) -> float | None:
    """d_z: the mean difference in standard deviations of the differences."""
    values = np.asarray(differences_S, dtype=np.float64)
    if len(values) < 2 or float(values.std(ddof=1)) == 0:
        return None
    return float(values.mean() / values.std(ddof=1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction for many comparisons; a missing p stays missing and does not count."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        corrected[index] = highest
    return corrected


def seeds_needed(comparisons: int, level: float = 0.05) -> int:
    """The fewest seeds with which the strongest of so many comparisons can pass Holm's correction at all."""
    seeds = 2
    while comparisons * smallest_p(seeds) >= level:
        seeds += 1
    return seeds
