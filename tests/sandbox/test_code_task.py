"""The built-in code task: its problems are right, its verdicts say what happened, its own examples hold."""

from itertools import islice

import pytest

from hacrl_core.config.problems import TaskProblems
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.problems import Problem, load_problems
from hacrl_core.verification import Verdict, close_pool, verify_batch
from hacrl_core.verification.code_task import examples, problems
from hacrl_core.verification.jail import kernel

linux = pytest.mark.skipif(not kernel.LINUX, reason="the sandbox exists on Linux only")
CODE = VerifyConfig(verifier="code")


def judge(responses: list[str], rows: list[Problem]) -> list[Verdict]:
    try:
        return verify_batch(responses, [row.answer for row in rows], CODE, problems=rows)
    finally:
        close_pool()


@linux
def test_every_solution_passes_and_another_problems_solution_does_not() -> None:
    rows = list(load_problems(TaskProblems(task="code", split="held_out", size=40)).problems)
    verdicts = judge([str(row.columns["solution"]) for row in rows], rows)
    assert {verdict.reward for verdict in verdicts} == {1.0}
    others = judge([str(row.columns["solution"]) for row in [*rows[1:], rows[0]]], rows)
    # Different words may mean the same function: max after sort or flip.
    assert sum(verdict.reward for verdict in others) <= 4


def test_splits_share_no_question() -> None:
    held_out = load_problems(TaskProblems(task="code", split="held_out", size=300)).problems
    training = load_problems(TaskProblems(task="code", split="training", size=1000)).problems
    asked = [{problem.messages[0]["content"] for problem in side} for side in (held_out, training)]
    assert not asked[0] & asked[1]
    assert {problem.tags["kind"] for problem in held_out} == {"numbers", "lists"}


@linux
def test_verdicts_say_how_a_program_ended() -> None:
    task = TaskProblems(task="code", split="training", size=1)
    row = load_problems(task).problems[0]
    responses = ["0", "x +", "1/0", "[0]*10**12", "open('/etc/passwd')", "(lambda f: f(f))(lambda f: f(f))", ""]
    verdicts = judge(responses, [row] * len(responses))
    kinds = [next(iter(verdict.metrics)) for verdict in verdicts]
    expected = [
        "wrong_answer",
        "syntax_error",
        "runtime_error",
        "memory",
        "runtime_error",
        "runtime_error",
        "no_program",
    ]
    assert kinds == expected
    assert {verdict.reward for verdict in verdicts} == {0.0}


@linux
def test_its_own_examples() -> None:
    for example in examples():
        row = next(p for p in islice(_as_rows(), 500) if p.messages[0]["content"] != example.problem.prompt)
        made = Problem("x", row.messages, "x", "code", {}, dict(example.problem.columns))
        responses = [*example.right, *example.wrong, *example.hostile]
        rewards = [verdict.reward for verdict in judge(responses, [made] * len(responses))]
        assert rewards == [1.0] * len(example.right) + [0.0] * (len(responses) - len(example.right))


def _as_rows() -> list[Problem]:
    return list(load_problems(TaskProblems(task="code", size=2)).problems)


def test_problems_follow_the_seed() -> None:
    first, again, other = ([p.prompt for p in islice(problems(seed), 20)] for seed in (1, 1, 2))
    assert first == again != other
