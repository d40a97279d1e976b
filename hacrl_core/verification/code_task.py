"""Code tasks: ``verify`` runs a response's program against the problem's tests, in the sandbox.

``problems: code`` is the built-in task for tiny agents: a chain of steps in words, to be written as one Python
expression. For a dataset of one's own, ``verify: {verifier: code}`` reads these columns of each problem:

===============  =======================================================================================
``tests``        a list of tests, of the forms that hacrl_core/verification/code.py describes; or ``test_list``
``entry_point``  the function that tests without a name call
``setup``        code that runs before the program, such as imports
``wrap``         a text with ``{}`` in which the program is put, such as ``f = lambda x: {}``
``reward``       ``share`` of the tests that pass (default), or ``all``: 1 if all pass, else 0
``time_limit``   CPU seconds of one run (default 2)
``memory_mb``    memory of one run (default 256)
``tolerance``    relative tolerance of floats (default 0)
===============  =======================================================================================
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from hacrl_core.tasks.api import Example, Problem, Verdict
from hacrl_core.verification.code import CodeResult, extract_program, judge_program, read_tests
from hacrl_core.verification.jail.client import ProgramLimits

Kind = Literal["numbers", "lists"]
# A step: what it is called, the expression around the one before, and what it computes.
Step = tuple[str, str, Callable[[Any], Any]]
_TESTS = 4


def verify(response: str, problem: Problem) -> Verdict:
    """Run the response's program; the parts and metrics say how many tests passed and how it ended."""
    program = extract_program(response).strip()
    tests = read_tests(problem.get("tests") or problem.get("test_list") or (), str(problem.get("entry_point") or ""))
    limits = ProgramLimits(float(problem.get("time_limit") or 2.0), memory_mb=int(problem.get("memory_mb") or 256))
    all_or_nothing = problem.get("reward") == "all"
    result = judge_program(
        str(problem.get("wrap") or "{}").replace("{}", program) if program else "",
        tests,
        limits,
        setup=str(problem.get("setup") or ""),
        tolerance=float(problem.get("tolerance") or 0.0),
        stop_early=all_or_nothing,
    )
    return _verdict(result, program, all_or_nothing=all_or_nothing)


def _verdict(result: CodeResult, program: str, *, all_or_nothing: bool) -> Verdict:
    if result.kind in ("no_program", "syntax_error"):
        return Verdict(None, metrics={result.kind: 1.0}, answer=program)
    passed = result.kind == "passed"
    return Verdict(
        float(passed) if all_or_nothing else result.share,
        correct=passed,
        parts={"tests": result.share},
        metrics={result.kind: 1.0},
        answer=program,
    )


def problems(seed: int, kinds: Sequence[Kind] = ("numbers", "lists"), steps: int = 3) -> Iterator[Problem]:
    """Yield chains of steps to be written as one expression, without end: ``x add 7 times 3`` → ``(x+7)*3``."""
    rng = random.Random(seed)
    while True:
        yield _draw(rng, rng.choice(list(kinds)), steps)


def _draw(rng: random.Random, kind: Kind, steps: int) -> Problem:
    """Return a problem that has an answer and that no constant solves."""
    while True:
        try:
            problem = _numbers(rng, steps) if kind == "numbers" else _lists(rng, steps)
        except (ValueError, IndexError):
            # Nothing is left of a list.
            continue
        if len({test["expected"] for test in problem.tests}) > 1:
            return problem


def _numbers(rng: random.Random, steps: int) -> Problem:
    n = [rng.randint(2, 9) for _ in range(steps)]
    offered: list[Callable[[int], Step]] = [
        lambda n: (f"add {n}", f"({{}}+{n})", lambda x: x + n),
        lambda n: (f"minus {n}", f"({{}}-{n})", lambda x: x - n),
        lambda n: (f"times {n}", f"{{}}*{n}", lambda x: x * n),
        lambda n: (f"mod {n}", f"{{}}%{n}", lambda x: x % n),
    ]
    chosen = [rng.choice(offered)(each) for each in n]
    return _problem("numbers", "x", chosen, [rng.randint(-20, 50) for _ in range(_TESTS)])


def _lists(rng: random.Random, steps: int) -> Problem:
    offered: list[Callable[[int], Step]] = [
        lambda n: ("sort", "sorted({})", sorted),
        lambda n: ("flip", "{}[::-1]", lambda x: x[::-1]),
        lambda n: (f"drop {n}", f"{{}}[{n}:]", lambda x: x[n:]),
        lambda n: (f"take {n + 3}", f"{{}}[:{n + 3}]", lambda x: x[: n + 3]),
    ]
    ends: list[Step] = [("sum", "sum({})", sum), ("max", "max({})", max), ("last", "{}[-1]", lambda x: x[-1])]
    chosen = [rng.choice(offered)(rng.randint(1, 3)) for _ in range(steps)]
    inputs = [[rng.randint(0, 30) for _ in range(rng.randint(8, 10))] for _ in range(_TESTS)]
    return _problem("lists", "x", [*chosen, rng.choice(ends)], inputs)


def _problem(kind: Kind, name: str, steps: Sequence[Step], inputs: Sequence[Any]) -> Problem:
    expression, tests = name, []
    for _, template, _ in steps:
        expression = template.format(expression)
    for given in inputs:
        value = given
        for _, _, compute in steps:
            value = compute(value)
        tests.append({"call": "f", "args": [given], "expected": value})
    words = " ".join([name, *(word for word, _, _ in steps)])
    columns: dict[str, Any] = {
        "tests": tests,
        "wrap": f"f = lambda {name}: {{}}",
        "reward": "all",
        "solution": expression,
    }
    return Problem(words, expression, tags={"kind": kind}, **columns)


def examples() -> list[Example]:
    """Return responses whose verdicts are known."""
    rng = random.Random(0)
    made = [_draw(rng, "numbers", 3), _draw(rng, "lists", 3)]
    hostile = ("__import__('os')._exit(0)", "type('L', (int,), {'__eq__': lambda s, o: True})()", "[0]*10**12")
    return [Example(each, right=(each.solution,), wrong=("0", "x", ""), hostile=hostile) for each in made]
