"""Against slow, obvious references: enumeration of all subsets, exact binomials, published interval values."""

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hacrl_core.errors import ContractError
from hacrl_core.evaluation import avg_at_k, best_at_k, maj_at_k, majority_answers, pass_at_k, wilson_interval

binary = arrays(
    np.float64, st.tuples(st.integers(1, 5), st.integers(1, 7)), elements=st.sampled_from([0.0, 1.0, np.nan])
)


@settings(max_examples=80, deadline=None)
@given(rewards=binary, data=st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(rewards, data):
    k = data.draw(st.integers(1, rewards.shape[1]))
    for row, found in zip(rewards, pass_at_k(rewards, k), strict=True):
        verified = [r for r in row if not np.isnan(r)]
        if len(verified) < k:
            assert np.isnan(found)
        else:
            subsets = list(combinations(verified, k))
            assert found == pytest.approx(sum(max(s) for s in subsets) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k"), [(30, 1, 30), (30, 0, 30), (30, 30, 1), (64, 3, 16), (2000, 1, 1000), (2000, 700, 1)]
)
def test_pass_at_k_exactly(n, c, k):
    rewards = np.array([[1.0] * c + [0.0] * (n - c)])
    assert pass_at_k(rewards, k)[0] == pytest.approx(float(1 - Fraction(comb(n - c, k), comb(n, k))), abs=1e-12)


def test_pass_at_k_is_unbiased_and_the_plug_in_is_not():
    rng = np.random.default_rng(0)
    chance, n, k = 0.15, 8, 4
    rewards = (rng.random((40_000, n)) < chance).astype(np.float64)
    truth = 1 - (1 - chance) ** k
    assert pass_at_k(rewards, k).mean() == pytest.approx(truth, abs=0.005)
    plug_in = 1 - (1 - rewards.mean(axis=1)) ** k
    assert abs(plug_in.mean() - truth) > 0.02


@settings(max_examples=60, deadline=None)
@given(rewards=binary)
def test_relations_between_the_metrics(rewards):
    samples = rewards.shape[1]
    np.testing.assert_allclose(pass_at_k(rewards, 1), avg_at_k(rewards), atol=1e-12)
    whole = ~np.isnan(rewards).any(axis=1)
    np.testing.assert_allclose(pass_at_k(rewards, samples)[whole], best_at_k(rewards, samples)[whole])
    for k in range(1, samples):
        assert (best_at_k(rewards[whole], k) <= best_at_k(rewards[whole], k + 1)).all()


def test_failed_verifications_are_left_out():
    rewards = np.array([[1.0, np.nan, 0.0], [np.nan, np.nan, np.nan]])
    np.testing.assert_array_equal(avg_at_k(rewards), [0.5, np.nan])
    np.testing.assert_array_equal(best_at_k(rewards, 2), [1.0, np.nan])
    np.testing.assert_array_equal(pass_at_k(rewards, 3), [np.nan, np.nan])


def test_majority():
    answers = [("4", "5", "5"), ("a", "b", "b"), ("", "", "7"), ("", "", ""), ("x", "y", "z")]
    assert majority_answers(answers, 3) == [1, 1, 2, None, 0]
    assert majority_answers(answers, 2) == [0, 0, None, None, 0]  # ties go to the answer given first
    rewards = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]], dtype=float)
    np.testing.assert_array_equal(maj_at_k(rewards, answers, 3), [1, 0, 1, 0, 1])


def test_majority_can_beat_and_lose_to_the_mean():
    rewards = np.array([[1, 1, 0, 0.0]])
    assert maj_at_k(rewards, [("3", "3", "1", "2")], 4)[0] == 1
    assert maj_at_k(1 - rewards, [("3", "3", "1", "2")], 4)[0] == 0


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # the first four from the closed form by hand, the others published
        (0, 10, 0.0, 0.2775),
        (1, 10, 0.0179, 0.4042),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, as are the next three
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@settings(max_examples=100, deadline=None)
@given(trials=st.integers(1, 10_000), share=st.floats(0, 1))
def test_wilson_solves_its_equation(trials, share):
    """Its ends are the p whose score test has exactly z: (p̂ − p)² = z² p(1−p)/n."""
    z = 1.959963984540054
    interval = wilson_interval(share * trials, trials)
    assert 0 <= interval.low <= share + 1e-9
    assert share - 1e-9 <= interval.high <= 1
    for end in interval:
        if 0 < end < 1:
            assert (share - end) ** 2 == pytest.approx(z * z * end * (1 - end) / trials, rel=1e-6, abs=1e-12)


def test_wilson_covers_the_truth():
    rng = np.random.default_rng(1)
    truth, n = 0.1, 30
    intervals = [wilson_interval(int(s), n) for s in rng.binomial(n, truth, 4000)]
    covered = np.mean([low <= truth <= high for low, high in intervals])
    assert 0.93 < covered < 0.99


def test_wilson_without_trials_knows_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: pass_at_k(np.zeros((2, 3)), 4),
        lambda: best_at_k(np.zeros((2, 3)), 0),
        lambda: avg_at_k(np.zeros(3)),
        lambda: avg_at_k(np.array([[np.inf]])),
        lambda: maj_at_k(np.zeros((2, 3)), [("a", "b", "c")], 3),
        lambda: maj_at_k(np.zeros((1, 3)), [("a", "b")], 2),
        lambda: wilson_interval(5, 4),
        lambda: wilson_interval(-1, 4),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(ContractError):
        call()
