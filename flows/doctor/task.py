"""Checks of a task before anything is trained: right answers pass, wrong ones fail, hostile ones cost nobody else."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hacrl_core.config.problems import TaskProblems
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.errors import ConfigError
from hacrl_core.problems import Problem, load_problems
from hacrl_core.problems.tasks import as_problem
from hacrl_core.tasks.api import Example
from hacrl_core.tasks.loading import load_task
from hacrl_core.verification import Verdict, VerdictKind, check_verifier, verify_batch

# Problems whose own solution must pass, where a task gives no examples.
PROBLEMS = 10
# What agents may write when training goes wrong, or when a reward is worth cheating for.
HOSTILE = (
    "",
    " ",
    "\x00",
    "a" * 200_000,
    "(" * 20_000,
    "[" * 20_000 + "]" * 20_000,
    "9**9**9**9",
    "\\boxed{" * 5_000,
    "<answer>" * 5_000,
    "{}" * 10_000,
    "%s%n{0}{problem}",
    "__import__('os').system('true')",
    "\ud7ff\u202e\ufeff",
    "nan",
    "1e999999999",
)


@dataclass(frozen=True)
class Checked:
    """One response with what it had to be and what it was judged."""

    kind: str
    problem: Problem
    response: str
    verdict: Verdict
    fault: str


def task_examples(name: str, options: dict[str, Any]) -> Iterator[tuple[str, Problem, str]]:
    """Yield (right, wrong or hostile; the problem; a response): the task's own examples, else some of its problems."""
    given = load_task(name).examples
    examples = list(given() if callable(given) else given)
    for number, example in enumerate(examples, start=1):
        if not isinstance(example, Example):
            raise ConfigError(f"task {name}: example {number} is a {type(example).__name__}; use hacrl.Example")
        problem = as_problem(example.problem, name, number)
        for kind in ("right", "wrong", "hostile"):
            yield from ((kind, problem, text) for text in getattr(example, kind))
    problems = [as_problem(example.problem, name, 1) for example in examples] or first_problems(name, options, PROBLEMS)
    if not examples:
        for problem in problems:
            solution = str(problem.columns.get("solution") or problem.answer)
            if solution:
                yield "right", problem, solution
    yield from (("wrong", problem, "no answer at all") for problem in problems)
    yield from (("hostile", problems[0], text) for text in HOSTILE)


def first_problems(name: str, options: dict[str, Any], count: int, split: str = "all") -> list[Problem]:
    """Return a few problems of a task: the first of a fixed set, or of its first iteration."""
    found = load_problems(TaskProblems.model_validate({"task": name, "split": split, "options": options}))
    if found.generator is not None:
        return found.generator(0, 0, count)
    return list(found.problems[:count])


def check_task(name: str, options: dict[str, Any], verify: VerifyConfig) -> tuple[list[Checked], float]:
    """Run a task's examples and return each with its fault, empty where there is none, and the seconds it took."""
    check_verifier(verify)
    examples = list(task_examples(name, options))
    started = time.monotonic()
    problems = [problem for _, problem, _ in examples]
    responses = [response for _, _, response in examples]
    verdicts = verify_batch(responses, [p.answer for p in problems], verify, problems=problems)
    seconds = time.monotonic() - started
    checked = [
        Checked(kind, problem, response, verdict, _fault(kind, verdict))
        for (kind, problem, response), verdict in zip(examples, verdicts, strict=True)
    ]
    return checked, seconds


def _fault(kind: str, verdict: Verdict) -> str:
    correct = verdict.verdict is VerdictKind.CORRECT
    if kind == "right":
        return "" if correct else f"a right answer is judged {verdict.verdict.value}{_because(verdict)}"
    if kind == "wrong":
        if verdict.verdict in (VerdictKind.ERROR, VerdictKind.TIMEOUT):
            return f"the verifier ends in {verdict.verdict.value}{_because(verdict)}"
        return "a wrong answer is judged correct" if correct else ""
    return "a hostile response is judged correct" if correct else ""


def _because(verdict: Verdict) -> str:
    return f" ({verdict.message})" if verdict.message else ""


def faults_of(checked: Sequence[Checked]) -> list[Checked]:
    """Return what went wrong."""
    return [each for each in checked if each.fault]
