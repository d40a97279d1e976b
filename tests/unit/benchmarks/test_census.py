"""The figures of benchmarks/census.py against a slow, obvious computation, and its made problems."""

import math
import re

import numpy as np
import pytest

from benchmarks.census import (
    LENGTHS,
    Reading,
    directions,
    distribution,
    ratios,
    readings,
    readings_csv,
)
from benchmarks.census_problems import EXAMPLES, made_problems
from hacrl_core.algorithm.hacpo import FOREIGN_CEILING

# Words of each kind of problem → its answer from its numbers.
STEPS = {
    "each and gives": lambda a, b, c: a * b - c,
    "times as many": lambda a, b: a + a * b,
    "A ticket costs": lambda a, b, c: c - a * b,
    "every morning": lambda a, b, c: (a + b) * c,
    "shares the rest": lambda a, b, c: (a - b) / c,
    "A bus has": lambda a, b, c: a - b + c,
}


def scored(rollout, sampler, learner, logprobs):
    """A row of the learner's score table."""
    return {
        "rollout_id": rollout,
        "sampler": sampler,
        "is_own": sampler == learner,
        "token_ids": list(range(len(logprobs))),
        "mean_logprob": sum(logprobs) / len(logprobs),
    }


@pytest.fixture
def logprobs():
    """By learner and rollout: the log-probs of the response's tokens, of which the two agents count different many."""
    rng = np.random.default_rng(3)
    made = {}
    for learner in ("a", "b"):
        for sampler in ("a", "b"):
            for i in range(7):
                scale = 0.3 if learner == sampler else 0.5
                made[learner, f"{sampler}{i}"] = (-scale * rng.random(int(rng.integers(3, 12)))).tolist()
    return made


@pytest.fixture
def scores(logprobs):
    tables = {"a": [], "b": []}
    for (learner, rollout), values in logprobs.items():
        tables[learner].append(scored(rollout, rollout[0], learner, values))
    return tables


def slow_ratio(learner, sampler, length):
    divisor = {"sampler": len(sampler), "learner": len(learner)}.get(length)
    return math.exp(sum(learner) / (divisor or len(learner)) - sum(sampler) / (divisor or len(sampler)))


@pytest.mark.parametrize("length", LENGTHS)
def test_every_direction_has_the_ratios_of_the_token_log_probs(scores, logprobs, length):
    figures = directions(scores)
    assert set(figures) == {"a <- b", "b <- a"}
    for learner, sampler in (("a", "b"), ("b", "a")):
        rollouts = [f"{sampler}{i}" for i in range(7)]
        slow = sorted(slow_ratio(logprobs[learner, r], logprobs[sampler, r], length) for r in rollouts)
        of_direction = figures[f"{learner} <- {sampler}"]
        found = of_direction["ratio"][length]
        assert of_direction["responses"] == 7
        assert of_direction["learner_tokens"] == sum(len(logprobs[learner, r]) for r in rollouts) / 7
        assert found["mean"] == pytest.approx(sum(slow) / 7)
        assert found["median"] == pytest.approx(slow[3])
        assert found["inside_0.8"] == sum(0.8 <= s <= 1 for s in slow) / 7
        assert found["inside_0.85"] == sum(0.85 <= s <= 1 for s in slow) / 7
        assert found["above_1"] == sum(s > 1 for s in slow) / 7
        assert found["below_0.8"] + found["inside_0.8"] + found["above_1"] == pytest.approx(1)


def test_a_response_that_the_learner_could_not_read_is_left_out(scores):
    del scores["a"][next(i for i, row in enumerate(scores["a"]) if row["rollout_id"] == "b4")]
    assert len(readings(scores["a"], scores["b"])) == 6
    assert len(readings(scores["b"], scores["a"])) == 7


def test_a_far_ratio_is_clamped_and_the_ends_of_the_window_lie_inside():
    far = readings([scored("b0", "b", "a", [-50.0])], [scored("b0", "b", "b", [-1.0])])
    assert ratios(far, "own", max_abs_log_ratio=2.0).tolist() == [pytest.approx(math.exp(-2))]
    ends = distribution(np.array([0.8, FOREIGN_CEILING, 0.79, 1.01]))
    assert (ends["below_0.8"], ends["inside_0.8"], ends["above_1"]) == (0.25, 0.5, 0.25)


def test_made_problems_are_repeatable_different_and_answered_by_their_own_numbers():
    problems = made_problems(120)
    assert problems == made_problems(120) != made_problems(120, seed=1)
    assert len({p["problem"] for p in problems}) == 120
    assert not {p["problem"] for p in problems} & {question for question, _ in EXAMPLES}
    for p in problems:
        numbers = [int(number) for number in re.findall(r"\d+", p["problem"])]
        (wanted,) = [step(*numbers) for words, step in STEPS.items() if words in p["problem"]]
        assert int(p["answer"]) == wanted > 0


def test_the_written_readings_give_the_same_ratios(scores):
    written = [row.split(",") for row in readings_csv(scores).splitlines()[1:]]
    again = [Reading(float(r[2]), int(r[3]), float(r[4]), int(r[5])) for r in written if r[0] == "a"]
    found = readings(scores["a"], scores["b"])
    assert len(written) == 14
    np.testing.assert_allclose(ratios(again, "sampler"), ratios(found, "sampler"), rtol=1e-5)
