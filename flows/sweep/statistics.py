"""Comparing methods over seeds: paired differences, their interval, size and p-value, and what may be said about them.

Both methods start each seed from the same agents and meet the same prompts, so the differences are paired by seed.
Seeds are few, which decides the choices here: intervals are widened for small samples, and p-values are exact.
The primary outcome is the mean over the agents; each agent alone is secondary.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from flows.sweep.results import BOTH, CellResult

Floats = NDArray[np.float64]

Verdict = Literal["better", "worse", "same", "not shown"]

LEVEL = 0.05
# Differences of accuracies this small are rounding errors.
ROUNDING = 1e-9
# Two methods are called the same if their difference is shown to be smaller than this accuracy: one point.
SAME_WITHIN = 0.01
# Up to 6^6 = 46,656 resamples are listed; with more seeds, RESAMPLES are drawn.
EXACT_SEEDS = 6
RESAMPLES = 20_000
# Up to 2^16 sign patterns are listed.
EXACT_SIGNS = 16


@dataclass(frozen=True)
class Difference:
    """Method minus baseline over the seeds both have."""

    seeds: int
    mean: float
    low: float
    high: float
    # d_z: mean over standard deviation of the differences; None with one seed or no spread.
    effect: float | None
    # Two-sided; None with one seed.
    p: float | None
    # Of the test that the difference is within ±same_within; None with one seed.
    p_same: float | None
    same_within: float
    # Seeds in which the method is above the baseline.
    higher: int

    @property
    def smallest_p(self) -> float:
        """Return the smallest p that so many seeds can give."""
        return smallest_p(self.seeds)

    @property
    def excludes_zero(self) -> bool:
        """Say whether the interval lies on one side of zero, by more than a rounding error."""
        return self.low > ROUNDING or self.high < -ROUNDING


def compare(
    method_S: Sequence[float], baseline_S: Sequence[float], level: float = 0.95, same_within: float = SAME_WITHIN
) -> Difference:
    """Compare values that are paired by position: ``method_S[i]`` and ``baseline_S[i]`` are of one seed."""
    if len(method_S) != len(baseline_S) or not len(method_S):
        raise ValueError(
            f"{len(method_S)} values against {len(baseline_S)}: pairs need equally many of both, and at least one"
        )
    differences_S = np.asarray(method_S, dtype=np.float64) - np.asarray(baseline_S, dtype=np.float64)
    low, high = bootstrap_interval(differences_S, level)
    several = len(differences_S) > 1
    return Difference(
        seeds=len(differences_S),
        mean=float(differences_S.mean()),
        low=low,
        high=high,
        effect=effect_size(differences_S),
        p=sign_flip_p(differences_S) if several else None,
        p_same=equivalence_p(differences_S, same_within) if several else None,
        same_within=same_within,
        higher=int(np.sum(differences_S > ROUNDING)),
    )


def bootstrap_interval(values_S: Sequence[float] | Floats, level: float = 0.95) -> tuple[float, float]:
    """Return the expanded percentile bootstrap of the mean (Hesterberg 2015); the plain one is too narrow for few
    seeds.

    It takes the percentiles at Φ(±√(n/(n−1))·t), which compensates for the spread that resampling n values loses and
    for estimating it. One value has no interval: both ends are infinite.
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
    """Return the means of all resamples if they can be listed, else of RESAMPLES drawn with a fixed seed."""
    n = len(values_S)
    if n <= EXACT_SEEDS:
        chosen = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        chosen = np.random.default_rng(n).integers(n, size=(RESAMPLES, n))
    means: Floats = values_S[chosen].mean(axis=1)
    return means


def sign_flip_p(differences_S: Sequence[float] | Floats) -> float:
    """Return the exact two-sided permutation p: the share of the 2^n sign patterns with a mean as far from zero."""
    differences_S = np.asarray(differences_S, dtype=np.float64)
    sums = np.abs(_signs(len(differences_S)) @ differences_S)
    return _share_at_least(sums, abs(float(differences_S.sum())))


def sign_flip_p_above(differences_S: Sequence[float] | Floats, bound: float) -> float:
    """Return the exact one-sided permutation p for a mean above ``bound``."""
    over_S = np.asarray(differences_S, dtype=np.float64) - bound
    return _share_at_least(_signs(len(over_S)) @ over_S, float(over_S.sum()))


def equivalence_p(differences_S: Sequence[float] | Floats, within: float) -> float:
    """Return the p of two one-sided tests (TOST): a small one shows that the mean difference is within ±``within``."""
    differences_S = np.asarray(differences_S, dtype=np.float64)
    return max(sign_flip_p_above(differences_S, -within), sign_flip_p_above(-differences_S, -within))


@functools.cache
def _signs(n: int) -> Floats:
    """Return all sign patterns if they can be listed, else many drawn with a fixed seed."""
    if n <= EXACT_SIGNS:
        return np.array(list(itertools.product((1.0, -1.0), repeat=n)))
    signs = np.random.default_rng(n).choice((1.0, -1.0), size=(2**EXACT_SIGNS, n))
    signs[0] = 1.0
    return signs


def _share_at_least(sums: Floats, observed: float) -> float:
    """Return the share of sums that reach the observed one; sums in another order may differ in the last bits."""
    return float(np.mean(sums >= observed - abs(observed) * 1e-9 - 1e-12))


def smallest_p(seeds: int) -> float:
    """Return the smallest two-sided p that the sign-flip test can give with so many seeds."""
    return 2.0 ** (1 - seeds)


def effect_size(differences_S: Sequence[float] | Floats) -> float | None:
    """Return d_z, the mean difference in standard deviations of the differences."""
    values = np.asarray(differences_S, dtype=np.float64)
    if len(values) < 2 or float(values.std(ddof=1)) < ROUNDING:
        return None
    return float(values.mean() / values.std(ddof=1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Apply Holm's step-down correction for many comparisons; a missing p stays missing and does not count."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        corrected[index] = highest
    return corrected


def largest(p_values: Sequence[float | None]) -> float | None:
    """Return the p of a claim that needs all of its parts: the largest one; None if there is none or one is missing."""
    known = [p for p in p_values if p is not None]
    return max(known) if known and len(known) == len(p_values) else None


def seeds_needed(comparisons: int, level: float = 0.05) -> int:
    """Return the fewest seeds with which the strongest of so many comparisons can pass Holm's correction."""
    seeds = 2
    while comparisons * smallest_p(seeds) >= level:
        seeds += 1
    return seeds


# -- variants of a sweep ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One variant and one outcome: an agent's accuracy, or the mean of all agents."""

    variant: str
    agent: str
    mean: float
    # Standard deviation over seeds.
    deviation: float | None
    seeds: tuple[int, ...]
    # None for the baseline itself, or if no seed is common.
    difference: Difference | None
    p_corrected: float | None
    p_same_corrected: float | None
    # How many comparisons the family has that was corrected for.
    compared: int

    @property
    def verdict(self) -> Verdict:
        """Return better, worse or the same if the corrected p allows it; a difference comes before sameness."""
        if self.difference is None:
            return "not shown"
        if self.p_corrected is not None and self.p_corrected < LEVEL:
            return "better" if self.difference.mean > 0 else "worse"
        return "same" if self.p_same_corrected is not None and self.p_same_corrected < LEVEL else "not shown"

    def words(self) -> str:
        """Write what the seeds allow to say, and what they do not."""
        d = self.difference
        if d is None:
            return "baseline" if self.seeds else "no finished cells"
        if d.p is None:
            return "one seed: nothing can be said about chance"
        if self.verdict == "same":
            return f"no difference beyond ±{100 * d.same_within:g} point{'' if d.same_within == SAME_WITHIN else 's'}"
        if self.verdict != "not shown":
            return self.verdict
        if self.compared * d.smallest_p >= LEVEL:
            hint = "interval excludes 0, but " if d.excludes_zero else ""
            return (
                f"not shown: {hint}{d.seeds} seeds cannot show it (smallest possible p {d.smallest_p:.3g} × "
                f"{self.compared} comparisons; {seeds_needed(self.compared)} seeds could)"
            )
        return "not shown"


def compare_seeds(
    method: Mapping[int, float], baseline: Mapping[int, float], same_within: float = SAME_WITHIN
) -> Difference | None:
    """Compare two methods on the seeds that both have; None if there is no such seed."""
    common = [seed for seed in method if seed in baseline]
    if not common:
        return None
    return compare([method[s] for s in common], [baseline[s] for s in common], same_within=same_within)


def compare_variants(
    results: Sequence[CellResult],
    variants: Sequence[str],
    baseline: str,
    agents: Sequence[str],
    same_within: float = SAME_WITHIN,
) -> list[Comparison]:
    """Compare all variants with the baseline: first the mean over the agents, then each agent.

    There are two families, each with one Holm correction: the means of all variants, and all agents of all variants.
    """
    return [
        comparison
        for family in ((BOTH,), tuple(agents))
        for comparison in _compare_family(results, variants, baseline, agents, family, same_within)
    ]


def _compare_family(
    results: Sequence[CellResult],
    variants: Sequence[str],
    baseline: str,
    agents: Sequence[str],
    outcomes: Sequence[str],
    same_within: float,
) -> list[Comparison]:
    """Compare all variants on some outcomes, with one correction over all of these comparisons."""
    places = [(variant, outcome) for outcome in outcomes for variant in variants]
    values = {(v, o): {r.seed: _after(r, o, agents) for r in results if r.variant == v} for v, o in places}
    differences = [
        compare_seeds(values[v, o], values[baseline, o], same_within) if v != baseline else None for v, o in places
    ]
    corrected = holm([d.p if d else None for d in differences])
    same = holm([d.p_same if d else None for d in differences])
    compared = sum(d is not None and d.p is not None for d in differences)
    found = []
    for place, difference, p, p_same in zip(places, differences, corrected, same, strict=True):
        mine = list(values[place].values())
        mean = float(np.mean(mine)) if mine else float("nan")
        deviation = float(np.std(mine, ddof=1)) if len(mine) > 1 else None
        found.append(Comparison(*place, mean, deviation, tuple(values[place]), difference, p, p_same, compared))
    return found


def _after(result: CellResult, agent: str, agents: Sequence[str]) -> float:
    return float(np.mean([result.agents[a].after for a in (agents if agent == BOTH else (agent,))]))
