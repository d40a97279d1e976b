"""The built-in task: arithmetic with worked answers, made by code from a seed, nothing stored.

A worked answer goes digit by digit from the right, writes the carry or borrow into the next step, and ends in the boxed
result: ``47+38=?`` → ``7+8=15, 4+3+1=8, \\boxed{85}``; ``52-38=?`` → ``12-8=4, 5-1-3=1, \\boxed{14}``; ``47*6=?`` →
``7*6=42, 4*6+4=28, \\boxed{282}``.

The split is a property of the arithmetic fact (operation and operands, in any order where order does not matter) and is
decided by its hash: no seed, size or mixture can put one fact on both sides, and the story about 47 and 38 lies on the
same side as 38+47.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from hacrl_core.config.problems import ArithmeticConfig, Kind, Level
from hacrl_core.errors import ConfigError
from hacrl_core.problems.problem import Problem
from hacrl_core.seeding import derive_rng

SOURCE = "arithmetic"
HELD_OUT_SHARE = 0.2
_DIGITS: dict[Level, int] = {"easy": 1, "medium": 2, "hard": 3}
# Consecutive repeats after which the space of problems counts as exhausted.
_PATIENCE = 2000

Operator = Literal["+", "-", "*"]
Split = Literal["training", "held_out"]
_OPERATORS: tuple[Operator, ...] = ("+", "-", "*")
_SYMBOLS: dict[Kind, Operator] = {"addition": "+", "subtraction": "-", "multiplication": "*"}
_Name = TypeVar("_Name", bound=str)

_STORIES: tuple[tuple[Operator, str], ...] = (
    ("+", "Ann has {a} nuts and finds {b}. How many now?"),
    ("+", "A bus of {a} picks up {b}. How many are in it?"),
    ("+", "Two bags hold {a} and {b}. How many in all?"),
    ("-", "Ben had {a} nuts and ate {b}. How many now?"),
    ("-", "A bus of {a} drops off {b}. How many are in it?"),
    ("-", "Of {a} eggs {b} broke. How many are whole?"),
)


@dataclass(frozen=True)
class Fact:
    """An operation on two numbers."""

    left: int
    operator: Operator
    right: int

    @property
    def result(self) -> int:
        """The number that solves the problem."""
        if self.operator == "+":
            return self.left + self.right
        return self.left - self.right if self.operator == "-" else self.left * self.right

    def __str__(self) -> str:
        return f"{self.left}{self.operator}{self.right}"


def split_of(fact: Fact) -> Split:
    """Return the fact's side, which never changes; 47+38 and 38+47 are one fact and share it."""
    left, right = (fact.left, fact.right) if fact.operator == "-" else sorted((fact.left, fact.right))
    digest = hashlib.sha256(f"{left}{fact.operator}{right}".encode()).digest()
    return "held_out" if int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64 else "training"


def make_problem(kind: Kind, level: Level, rng: np.random.Generator) -> Problem:
    """Draw a random problem of either split."""
    story = int(rng.integers(len(_STORIES))) if kind == "story" else None
    operator = _operator(kind, story)
    fact = _draw_fact(operator, _DIGITS[level], rng)
    question = f"{fact}=?" if story is None else _STORIES[story][1].format(a=fact.left, b=fact.right)
    tags = {"kind": kind, "level": level, "fact": str(fact)}
    label = kind if story is None else f"{kind}{story}"
    return Problem(f"{label}-{fact}", ({"role": "user", "content": question},), str(fact.result), SOURCE, tags)


def training_problem(seed: int, index: int, config: ArithmeticConfig) -> Problem:
    """Return the ``index``-th training problem of a seed; two indices may give the same problem."""
    return next(_draws(config, "training", derive_rng(seed, SOURCE, "training", index)))


def training_problems(seed: int, iteration: int, count: int, config: ArithmeticConfig) -> list[Problem]:
    """Return the problems of one iteration, no two alike."""
    rng = derive_rng(seed, SOURCE, "training", "iteration", iteration)
    return _distinct(_draws(config, "training", rng), count, config)


def held_out_problems(count: int, config: ArithmeticConfig, seed: int = 0) -> list[Problem]:
    """Return held-out problems, no two alike; a larger count only adds to a smaller one.

    No training problem of any seed shares a fact with them.
    """
    return _distinct(_draws(config, "held_out", derive_rng(seed, SOURCE, "held_out")), count, config)


def fact_of(problem: Problem) -> Fact:
    """Return the fact that a problem asks for."""
    text = problem.tags["fact"]
    operator = next(operator for operator in _OPERATORS if operator in text)
    left, right = text.split(operator)
    return Fact(int(left), operator, int(right))


def worked_answer(problem: Problem) -> str:
    """Return the text that the warm start teaches: a step per digit, then the boxed result."""
    fact = fact_of(problem)
    left = [int(digit) for digit in reversed(str(fact.left))]
    if fact.operator == "*":
        steps = _multiplication_steps(left, fact.right)
    else:
        right = [int(digit) for digit in reversed(str(fact.right).zfill(len(left)))]
        left += [0] * (len(right) - len(left))
        steps = _addition_steps(left, right) if fact.operator == "+" else _subtraction_steps(left, right)
    return ", ".join([*steps, f"\\boxed{{{fact.result}}}"])


def _addition_steps(left: list[int], right: list[int]) -> list[str]:
    steps, carry = [], 0
    for a, b in zip(left, right, strict=True):
        total = a + b + carry
        steps.append(f"{a}+{b}{'+1' if carry else ''}={total}")
        carry = total // 10
    return steps


def _subtraction_steps(left: list[int], right: list[int]) -> list[str]:
    steps, borrow = [], 0
    for a, b in zip(left, right, strict=True):
        lent = 10 if a - borrow < b else 0
        steps.append(f"{a + lent}{'-1' if borrow else ''}-{b}={a + lent - borrow - b}")
        borrow = lent // 10
    return steps


def _multiplication_steps(left: list[int], factor: int) -> list[str]:
    steps, carry = [], 0
    for a in left:
        total = a * factor + carry
        steps.append(f"{a}*{factor}{f'+{carry}' if carry else ''}={total}")
        carry = total // 10
    return steps


def _operator(kind: Kind, story: int | None) -> Operator:
    if story is not None:
        return _STORIES[story][0]
    return _SYMBOLS[kind]


def _draw_fact(operator: Operator, digits: int, rng: np.random.Generator) -> Fact:
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits
    left, right = (int(number) for number in rng.integers(low, high, size=2))
    if operator == "*":
        return Fact(left, "*", int(rng.integers(2, 10)))
    if operator == "-":
        # Results stay at or above zero.
        left, right = max(left, right), min(left, right)
    return Fact(left, operator, right)


def _draws(config: ArithmeticConfig, split: Split, rng: np.random.Generator) -> Iterator[Problem]:
    while True:
        problem = make_problem(_choose(config.kinds, rng), _choose(config.levels, rng), rng)
        if split_of(fact_of(problem)) == split:
            yield problem


def _choose(weights: Mapping[_Name, float], rng: np.random.Generator) -> _Name:
    # The order in which a config file lists them must not matter.
    names = sorted(weights)
    point = rng.random() * sum(weights[name] for name in names)
    for name in names:
        point -= weights[name]
        if point < 0:
            return name
    return names[-1]


def _distinct(draws: Iterator[Problem], count: int, config: ArithmeticConfig) -> list[Problem]:
    found: dict[str, Problem] = {}
    repeats = 0
    while len(found) < count:
        problem = next(draws)
        repeats = repeats + 1 if problem.problem_id in found else 0
        found.setdefault(problem.problem_id, problem)
        if repeats > _PATIENCE:
            raise ConfigError(
                f"arithmetic: kinds {sorted(config.kinds)} with levels {sorted(config.levels)} have only about "
                f"{len(found)} problems in this split, {count} were asked for; ask for fewer or add a kind or a level"
            )
    return list(found.values())
