"""The built-in task: right answers, honest working, and a split that no seed, size or mixture can break."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl_core.config.problems import KINDS, LEVELS, ArithmeticConfig, Kind, Level
from hacrl_core.errors import ConfigError
from hacrl_core.problems.arithmetic import (
    HELD_OUT_SHARE,
    Fact,
    fact_of,
    held_out_problems,
    make_problem,
    split_of,
    training_problem,
    training_problems,
    worked_answer,
)

EVERYTHING = ArithmeticConfig(kinds=dict.fromkeys(KINDS, 1.0), levels=dict.fromkeys(LEVELS, 1.0))
any_kind, any_level, any_seed = st.sampled_from(KINDS), st.sampled_from(LEVELS), st.integers(0, 2**40)


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        ("47+38", "7+8=15, 4+3+1=8, \\boxed{85}"),
        ("99+99", "9+9=18, 9+9+1=19, \\boxed{198}"),
        ("52-38", "12-8=4, 5-1-3=1, \\boxed{14}"),
        ("700-459", "10-9=1, 10-1-5=4, 7-1-4=2, \\boxed{241}"),
        ("40-40", "0-0=0, 4-4=0, \\boxed{0}"),
        ("47*6", "7*6=42, 4*6+4=28, \\boxed{282}"),
        ("7+8", "7+8=15, \\boxed{15}"),
    ],
)
def test_worked_answers_write_carries_and_borrows(fact: str, text: str) -> None:
    problem = make_problem("addition", "easy", np.random.default_rng(0))
    assert worked_answer(type(problem)("x", problem.messages, "", "", {"fact": fact})) == text


@given(any_kind, any_level, any_seed)
def test_every_step_is_true_and_the_digits_make_the_answer(kind: Kind, level: Level, seed: int) -> None:
    problem = make_problem(kind, level, np.random.default_rng(seed))
    *steps, boxed = worked_answer(problem).split(", ")
    digits = ""
    for step in steps:
        left, right = step.split("=")
        assert eval(left) == int(right) >= 0
        digits = right[-1] + digits
    digits = right[:-1] + digits  # the last step keeps its carry
    assert boxed == f"\\boxed{{{problem.answer}}}"
    assert int(digits) == int(problem.answer) == eval(problem.tags["fact"])


@given(any_kind, any_level, any_seed)
def test_the_question_asks_for_the_fact(kind: Kind, level: Level, seed: int) -> None:
    problem = make_problem(kind, level, np.random.default_rng(seed))
    fact = fact_of(problem)
    question = problem.messages[0]["content"]
    assert re.findall(r"\d+", question) == [str(fact.left), str(fact.right)]
    assert problem.tags["kind"] == kind
    assert problem.tags["level"] == level
    assert len(str(fact.left)) == {"easy": 1, "medium": 2, "hard": 3}[level]
    assert "/" not in problem.problem_id


@given(any_seed, any_seed, st.integers(1, 60))
@settings(max_examples=25)
def test_training_and_held_out_share_no_fact(train_seed: int, held_seed: int, count: int) -> None:
    training = training_problems(train_seed, 0, count, EVERYTHING)
    training += [training_problem(train_seed, i, EVERYTHING) for i in range(20)]
    held_out = held_out_problems(count, EVERYTHING, held_seed)
    assert {split_of(fact_of(p)) for p in training} == {"training"}
    assert {split_of(fact_of(p)) for p in held_out} == {"held_out"}
    assert not {str(fact_of(p)) for p in training} & {str(fact_of(p)) for p in held_out}


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from("+*"))
def test_swapped_operands_are_on_the_same_side(left: int, right: int, operator: str) -> None:
    assert split_of(Fact(left, operator, right)) == split_of(Fact(right, operator, left))  # type: ignore[arg-type]


def test_the_split_is_fixed_for_ever() -> None:
    """Agents trained by an older version must not have seen today's held-out problems."""
    facts = [Fact(a, "+", b) for a in range(10, 100) for b in range(a, 100)]
    held_out = [str(f) for f in facts if split_of(f) == "held_out"]
    assert len(held_out) / len(facts) == pytest.approx(HELD_OUT_SHARE, abs=0.02)
    assert held_out[:5] == ["10+13", "10+19", "10+20", "10+27", "10+28"]


def test_problems_of_an_iteration_are_distinct_and_repeatable() -> None:
    first = training_problems(3, 7, 200, EVERYTHING)
    assert len({p.problem_id for p in first}) == 200
    assert first == training_problems(3, 7, 200, EVERYTHING)
    assert first != training_problems(3, 8, 200, EVERYTHING)
    assert first != training_problems(4, 7, 200, EVERYTHING)


def test_equal_ids_mean_equal_problems() -> None:
    by_id = {}
    for index in range(3000):
        problem = training_problem(0, index, EVERYTHING)
        assert by_id.setdefault(problem.problem_id, problem) == problem


def test_a_thousand_held_out_problems_and_more_extend_fewer() -> None:
    thousand = held_out_problems(1000, ArithmeticConfig())
    assert len({p.problem_id for p in thousand}) == 1000
    assert thousand[:100] == held_out_problems(100, ArithmeticConfig())


def test_weights_are_kept_and_their_order_does_not_matter() -> None:
    config = ArithmeticConfig(kinds={"addition": 3, "story": 1}, levels={"hard": 1})
    problems = [training_problem(0, i, config) for i in range(2000)]
    assert {p.tags["level"] for p in problems} == {"hard"}
    assert np.mean([p.tags["kind"] == "addition" for p in problems]) == pytest.approx(0.75, abs=0.04)
    turned = ArithmeticConfig(kinds={"story": 1, "addition": 3}, levels={"hard": 1})
    assert problems[:50] == [training_problem(0, i, turned) for i in range(50)]


def test_asking_for_more_problems_than_exist_says_so() -> None:
    config = ArithmeticConfig(kinds={"addition": 1}, levels={"easy": 1})
    with pytest.raises(ConfigError, match="ask for fewer"):
        held_out_problems(500, config)
