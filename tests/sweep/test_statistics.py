"""The statistics against scipy, published numbers and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from flows.sweep.results import BOTH, AgentResult, CellResult
from flows.sweep.statistics import (
    bootstrap_interval,
    compare,
    compare_variants,
    effect_size,
    equivalence_p,
    holm,
    largest,
    seeds_needed,
    sign_flip_p,
    sign_flip_p_above,
    smallest_p,
)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_sign_flip_p_equals_scipys_permutation_test(n):
    rng = np.random.default_rng(n)
    for shift in (0.0, 0.5, 2.0):
        values = rng.normal(shift, 1, n)
        scipys = stats.permutation_test(
            (values,),
            lambda x, axis: x.mean(axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=np.inf,
        )
        assert sign_flip_p(values) == pytest.approx(scipys.pvalue)


def test_sign_flip_p_of_equal_signs_is_the_smallest_there_is():
    assert sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0]) == 0.0625 == smallest_p(5)
    assert sign_flip_p([0.1] * 6) == smallest_p(6) == 0.03125
    assert sign_flip_p([1.0, -1.0]) == 1.0


def test_sign_flip_p_with_many_seeds_is_near_the_t_test():
    values = np.random.default_rng(0).normal(0.4, 1, 30)
    assert sign_flip_p(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.01)


def test_holm_on_the_textbook_case_and_against_its_definition():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([0.04, None, 0.01]) == [0.04, None, 0.02]
    assert holm([]) == []


@pytest.mark.parametrize("n", [5, 8])
def test_interval_covers_as_often_as_it_says(n):
    """A plain percentile bootstrap of five values covers about 83 %; the expanded one must come close to 95 %."""
    rng = np.random.default_rng(1)
    covered = sum(low <= 0 <= high for low, high in (bootstrap_interval(rng.normal(0, 1, n)) for _ in range(400)))
    assert 0.91 <= covered / 400 <= 0.99


def test_interval_of_many_values_agrees_with_scipys_bootstrap_and_t():
    values = np.random.default_rng(2).normal(1, 2, 60)
    low, high = bootstrap_interval(values)
    t_low, t_high = stats.t.interval(0.95, 59, values.mean(), stats.sem(values))
    assert (low, high) == pytest.approx((t_low, t_high), abs=0.06)
    assert bootstrap_interval(values) == (low, high)  # no hidden randomness


def test_one_seed_gives_a_mean_and_nothing_else():
    only = compare([0.7], [0.5])
    assert only.mean == pytest.approx(0.2)
    assert (only.low, only.high, only.p, only.effect) == (-math.inf, math.inf, None, None)


def test_compare_is_paired():
    baseline = [0.1, 0.5, 0.9]
    better = [0.2, 0.6, 1.0]
    found = compare(better, baseline)
    assert found.mean == pytest.approx(0.1)
    assert (found.seeds, found.higher) == (3, 3)
    assert found.high - found.low < 1e-9  # spread between seeds does not count, only that of the differences
    with pytest.raises(ValueError, match="3 values against 2"):
        compare(better, baseline[:2])


def test_effect_size_is_that_of_a_paired_t_test():
    values = np.array([1.0, 2.0, 4.0, 5.5])
    assert effect_size(values) == pytest.approx(stats.ttest_1samp(values, 0).statistic / math.sqrt(4))
    assert effect_size([1.0, 1.0]) is None


def test_seeds_needed_for_a_claim():
    assert seeds_needed(1) == 6  # 2/2^6 = 0.031
    assert seeds_needed(8) == 9


# -- one side, sameness, families, rounding ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 8])
def test_one_sided_p_equals_scipys_permutation_test(n):
    values = np.random.default_rng(n).normal(0.5, 1, n)
    for bound in (-1.0, 0.0, 0.7):
        scipys = stats.permutation_test(
            (values - bound,),
            lambda x, axis: x.mean(axis=axis),
            permutation_type="samples",
            alternative="greater",
            vectorized=True,
            n_resamples=np.inf,
        )
        assert sign_flip_p_above(values, bound) == pytest.approx(scipys.pvalue)


def test_equivalence_needs_both_bounds():
    near = [0.001, -0.002, 0.003, 0.0, -0.001, 0.002]
    assert equivalence_p(near, 0.01) == 1 / 2**6
    assert equivalence_p(near, 0.0001) > 0.05
    above = [value + 0.02 for value in near]
    assert equivalence_p(above, 0.01) == 1.0
    assert equivalence_p([-value for value in above], 0.01) == 1.0


@pytest.mark.parametrize("n", [5, 8])
def test_equivalence_is_rarely_claimed_where_the_difference_is_the_bound(n):
    """At the bound itself, methods are called the same in at most five percent; well inside it, nearly always."""
    rng = np.random.default_rng(5)
    at_bound = np.mean([equivalence_p(rng.normal(0.01, 0.004, n), 0.01) < 0.05 for _ in range(2000)])
    inside = np.mean([equivalence_p(rng.normal(0.0, 0.004, n), 0.01) < 0.05 for _ in range(400)])
    assert at_bound <= 0.05
    assert inside > 0.9


def test_sign_flip_p_keeps_its_error_rate():
    rng = np.random.default_rng(6)
    assert np.mean([sign_flip_p(rng.normal(0, 1, 8)) < 0.05 for _ in range(4000)]) <= 0.05


def test_the_largest_p_is_that_of_a_claim_with_several_parts():
    assert largest([0.01, 0.2]) == 0.2
    assert largest([0.01, None]) is None
    assert largest([]) is None


def cells(variant, *agents):
    names = ("ada", "ben")[: len(agents)]
    return [
        CellResult(
            variant,
            seed,
            {n: AgentResult(accuracy={0: 0.1, 9: v}) for n, v in zip(names, row, strict=True)},
            frozenset(),
            {},
            0,
            0,
        )
        for seed, row in enumerate(zip(*agents, strict=True))
    ]


def test_the_mean_over_agents_comes_first_and_agents_are_one_family():
    base = [0.5 + 0.01 * i for i in range(8)]
    up = [b + 0.05 + 0.001 * i for i, b in enumerate(base)]
    results = cells("b", base, base) + cells("m", up, up) + cells("n", base, up)
    found = compare_variants(results, ["b", "m", "n"], "b", ["ada", "ben"])
    assert [(c.variant, c.agent) for c in found] == [(v, a) for a in (BOTH, "ada", "ben") for v in ("b", "m", "n")]
    by_place = {(c.variant, c.agent): c for c in found}
    assert (by_place["m", BOTH].compared, by_place["m", "ada"].compared) == (2, 4)
    assert by_place["m", BOTH].p_corrected == pytest.approx(2 * 2 / 2**8)
    assert by_place["m", "ada"].p_corrected == pytest.approx(4 * 2 / 2**8)
    assert by_place["n", "ada"].words() == "no difference beyond ±1 point"
    assert by_place["m", BOTH].verdict == "better"


def test_agents_verdicts_keep_the_error_rate_of_their_family():
    """Two variants of two agents, none different: "better" or "worse" anywhere in at most five percent of tables."""
    rng = np.random.default_rng(8)
    rounds, wrong = 1000, 0
    for _ in range(rounds):
        p_values = [sign_flip_p(rng.normal(0, 1, 8)) for _ in range(4)]
        wrong += any(p < 0.05 for p in holm(p_values))
    assert wrong / rounds <= 0.05


@pytest.mark.parametrize("rounding", [9e-74, 1.4e-17, -1.4e-17])
def test_a_bound_at_zero_does_not_exclude_zero(rounding):
    values = [0.0, 0.1, 0.2]
    d = compare([v + rounding for v in values], [0.0] * 3)
    at_zero = type(d)(3, 0.1, rounding, 0.2, None, 0.25, 1.0, 0.01, 2)
    assert not at_zero.excludes_zero
    assert type(d)(3, 0.1, 0.001, 0.2, None, 0.25, 1.0, 0.01, 3).excludes_zero


def test_ties_up_to_rounding_are_no_seeds_up_and_no_spread():
    baseline = [0.1 + 0.2, 0.7, 0.3]
    method = [0.3, 0.1 * 7, 0.1 * 3]
    found = compare(method, baseline)
    assert (found.higher, found.effect) == (0, None)
