"""Order, epochs, resumption, length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl_core.errors import ConfigError
from hacrl_core.problems import Problem, ProblemSet, problem_order, problems_for_iteration, within_length


def problem_set(n):
    problems = tuple(Problem(f"p{i}", ({"role": "user", "content": "x" * (i + 1)},), str(i), "test") for i in range(n))
    return ProblemSet(problems, "digest")


def names(problems):
    return [p.problem_id for p in problems]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), count=st.integers(1, 40), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_an_epoch_asks_every_problem_at_most_once(n, count, seed, epoch):
    if count > n:
        with pytest.raises(ConfigError, match="lower prompts_per_iteration"):
            problem_set(n).for_iteration(seed, 0, count)
        return
    per_epoch = n // count
    asked = [names(problem_set(n).for_iteration(seed, epoch * per_epoch + i, count)) for i in range(per_epoch)]
    flat = [name for batch in asked for name in batch]
    assert len(set(flat)) == len(flat) == per_epoch * count
    order = problem_order(seed, epoch, n)
    assert sorted(order) == list(range(n))
    assert flat == [f"p{index}" for index in order[: per_epoch * count]]


def test_position_is_a_function_of_the_iteration():
    straight = [names(problems_for_iteration(problem_set(10), 5, i, 3)) for i in range(9)]
    assert [names(problems_for_iteration(problem_set(10), 5, i, 3)) for i in reversed(range(9))] == straight[::-1]


def test_epochs_and_seeds_shuffle_differently():
    orders = {tuple(problem_order(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_rest_of_an_epoch_is_another_one_each_time():
    left_out = [set(range(100)) - set(problem_order(0, epoch, 100)[:96]) for epoch in range(20)]
    assert len(set.union(*left_out)) > 30


def test_order_is_pinned():
    """A change here would silently give every running campaign other prompts."""
    assert problem_order(0, 0, 8) == [6, 0, 7, 4, 1, 5, 3, 2]


def test_length_filter_asks_every_agent():
    problems = problem_set(10).problems
    renderers = {
        "characters": lambda messages: list(messages[0]["content"]),
        "pairs": lambda m: list(m[0]["content"][::2]),
    }
    found = within_length(problems, renderers, 4)
    assert names(found.problems) == ["p0", "p1", "p2", "p3"]
    assert found.too_long == {"characters": 6, "pairs": 2}
    with pytest.raises(ConfigError, match=r"shortest by agent: \{'characters': 1, 'pairs': 1\}"):
        within_length(problems, renderers, 0)
    assert within_length((), renderers, 4).problems == ()
    assert within_length(problems, {}, 4).problems == problems
