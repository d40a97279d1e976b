"""The text of a task of one's own and of its test: short words whose letters are to be sorted or reversed."""

TASK = '''"""The task of the campaign {name}: sort the letters of a short word, or reverse them.

Replace problems() and verify() by your own. Look at them with:   hacrl task try {file}
Check them with:   hacrl task check {file}   (right answers must pass, wrong ones must fail, hostile ones must not hang)
"""

import random
from collections.abc import Iterator

from hacrl import Example, Problem, Verdict

LETTERS = "abcdef"


def problems(seed: int) -> Iterator[Problem]:
    """Yield problems without end. Every iteration gets a seed of its own, so it gets new problems."""
    chance = random.Random(seed)
    while True:
        yield make_problem(chance.choice(["sort", "reverse"]), "".join(chance.choices(LETTERS, k=3)))


def make_problem(kind: str, word: str) -> Problem:
    """Return one problem. Results are broken down by its tag; tiny agents are first taught its answer."""
    answer = "".join(sorted(word)) if kind == "sort" else word[::-1]
    return Problem(f"{{kind}} {{word}}", answer=answer, tags={{"kind": kind}}, word=word)


def verify(response: str, problem: Problem) -> Verdict:
    """Judge one response. The reward is what agents learn from; it may be any number between 0 and 1."""
    found = response.strip()
    letters = float(sorted(found) == sorted(problem.word))
    return Verdict(
        reward=1.0 if found == problem.answer else 0.0,
        parts={{"right letters": letters}},  # a chart of its own in the report; it changes no reward
        answer=found,
    )


examples = [
    Example(make_problem("sort", "cab"), right=["abc", " abc\\n"], wrong=["cab", "ab", "The answer is abc"]),
    Example(make_problem("reverse", "cab"), right=["bac"], wrong=["cab", ""]),
]
'''

TEST = '''"""Tests of {file}. Run them with:   pytest {test}"""

import itertools
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from {module} import examples, make_problem, problems, verify


def test_right_answers_are_rewarded_and_wrong_ones_are_not():
    for example in examples:
        for response in example.right:
            assert verify(response, example.problem).reward == 1.0, response
        for response in example.wrong:
            assert verify(response, example.problem).reward < 1.0, response


def test_the_answer_of_every_problem_passes_its_own_verifier():
    for problem in itertools.islice(problems(seed=0), 200):
        assert verify(problem.answer, problem).reward == 1.0, problem


def test_a_response_with_the_right_letters_in_another_order_is_wrong():
    verdict = verify("acb", make_problem("sort", "cab"))
    assert verdict.reward == 0.0
    assert verdict.parts["right letters"] == 1.0
'''


def task_text(name: str, file: str) -> str:
    """Return the task's file."""
    return TASK.format(name=name, file=file)


def test_text(file: str, test: str) -> str:
    """Return the file of the task's test."""
    return TEST.format(file=file, test=test, module=file.removesuffix(".py"))
