"""The statistics against scipy, published numbers and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from flows.sweep.statistics import (
    bootstrap_interval,
    compare,
    effect_size,
    holm,
    seeds_needed,
    sign_flip_p,
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
