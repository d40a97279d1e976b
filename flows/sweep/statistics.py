"""Comparing methods over seeds: paired differences, their interval, size and p-value, and what may be said about them.

Both methods start each seed from the same agents and meet the same prompts, so the differences are paired by seed.
Seeds are few, which decides the choices here: intervals are widened for small samples, and p-values are exact.
"""

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

Verdict = Literal["better", "worse", "not shown"]

LEVEL = 0.05
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
    # Seeds in which the method is above the baseline.
    higher: int

    @property
    def smallest_p(self) -> float:
        """Return the smallest p that so many seeds can give."""
        return smallest_p(self.seeds)


def compare(method_S: Sequence[float], baseline_S: Sequence[float], level: float = 0.95) -> Difference:
    """Compare values that are paired by position: ``method_S[i]`` and ``baseline_S[i]`` are of one seed."""
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
    """Return the smallest two-sided p that the sign-flip test can give with so many seeds."""
    return 2.0 ** (1 - seeds)


def effect_size(differences_S: Sequence[float] | Floats) -> float | None:
    """Return d_z, the mean difference in standard deviations of the differences."""
    values = np.asarray(differences_S, dtype=np.float64)
    if len(values) < 2 or float(values.std(ddof=1)) == 0:
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
    # How many comparisons the family has that was corrected for.
    compared: int

    @property
    def verdict(self) -> Verdict:
        """Return better or worse if the corrected p allows it."""
        if self.difference is None or self.p_corrected is None or self.p_corrected >= LEVEL:
            return "not shown"
        return "better" if self.difference.mean > 0 else "worse"

    def words(self) -> str:
        """Write what the seeds allow to say, and what they do not."""
        d = self.difference
        if d is None:
            return "baseline" if self.seeds else "no finished cells"
        if d.p is None:
            return "one seed: nothing can be said about chance"
        if self.verdict != "not shown":
            return self.verdict
        if self.compared * d.smallest_p >= LEVEL:
            hint = "interval excludes 0, but " if d.low > 0 or d.high < 0 else ""
            return (
                f"not shown: {hint}{d.seeds} seeds cannot show it (smallest possible p {d.smallest_p:.3g} × "
                f"{self.compared} comparisons; {seeds_needed(self.compared)} seeds could)"
            )
        return "not shown"


def compare_seeds(method: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Compare two methods on the seeds that both have; None if there is no such seed."""
    common = [seed for seed in method if seed in baseline]
    return compare([method[s] for s in common], [baseline[s] for s in common]) if common else None


def compare_variants(
    results: Sequence[CellResult], variants: Sequence[str], baseline: str, agents: Sequence[str]
) -> list[Comparison]:
    """Compare all variants with the baseline, by outcome; Holm's correction runs over the variants of one outcome.

    A claim about every agent needs each of them to pass, which is stricter than a correction over agents would be.
    """
    found: list[Comparison] = []
    for agent in (*agents, BOTH):
        values = {v: {r.seed: _after(r, agent, agents) for r in results if r.variant == v} for v in variants}
        differences = {v: compare_seeds(values[v], values[baseline]) if v != baseline else None for v in variants}
        corrected = dict(zip(variants, holm([d.p if d else None for d in differences.values()]), strict=True))
        family = sum(d is not None and d.p is not None for d in differences.values())
        for variant in variants:
            mine = list(values[variant].values())
            found.append(
                Comparison(
                    variant,
                    agent,
                    float(np.mean(mine)) if mine else float("nan"),
                    float(np.std(mine, ddof=1)) if len(mine) > 1 else None,
                    tuple(values[variant]),
                    differences[variant],
                    corrected[variant],
                    family,
                )
            )
    return found


def _after(result: CellResult, agent: str, agents: Sequence[str]) -> float:
    return float(np.mean([result.agents[a].after for a in (agents if agent == BOTH else (agent,))]))
