"""Code judged by running: tests of three forms, plain data, kinds of verdicts, fenced blocks."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl_core.verification import close_pool
from hacrl_core.verification.code import extract_program, read_tests, same_output
from hacrl_core.verification.jail import kernel, values
from hacrl_core.verification.jail.checks import simple
from tests.sandbox.judge import run_programs, write_verifier

linux = pytest.mark.skipif(not kernel.LINUX, reason="the sandbox exists on Linux only")
SQUARE = {"tests": [{"call": "square", "args": [3], "expected": 9}, "assert square(-2) == 4"]}
LINES = {"tests": [{"input": "3 4\n", "output": "7\n"}, {"input": "1 1", "output": "2"}]}
STACK = {
    "tests": [
        "s = Stack()\ns.push(1)\ns.push('a')\nassert s.pop() == 'a'\nassert s.items == [1]",
        "import math\nassert math.isclose(half(3), 1.5)\nassert sorted(map(half, [4, 2])) == [1, 2]",
        "try:\n    half('x')\n    assert False, 'no error'\nexcept TypeError:\n    pass",
        "def check(candidate):\n    for n in range(5):\n        assert candidate(n) * 2 == n\ncheck(half)",
    ]
}
METHOD = {"tests": [{"call": "Solution.f", "args": [[1]], "expected": [1]}]}
GOOD_STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
def half(n): return n / 2
"""
CASES: list[tuple[str, dict[str, Any], str, int]] = [
    ("def square(n): return n * n", SQUARE, "passed", 2),
    ("Here:\n```python\ndef square(n):\n    return n * n\n```\nDone.", SQUARE, "passed", 2),
    ("def square(n): return n + n", SQUARE, "wrong_answer", 0),
    ("def square(n): return abs(n) ** 2 if n > 0 else None", SQUARE, "wrong_answer", 1),
    ("def square(n) return n", SQUARE, "syntax_error", 0),
    ("def square(n): return n * m", SQUARE, "runtime_error", 0),
    ("def cube(n): return n", SQUARE, "runtime_error", 0),
    ("raise ValueError('no')", SQUARE, "runtime_error", 0),
    ("def square(n):\n    while True: pass", SQUARE, "timeout", 0),
    ("def square(n): return [0] * 10 ** 12", SQUARE, "memory", 0),
    ("import os\ndef square(n): return os.fork()", SQUARE, "forbidden", 0),
    ("   ", SQUARE, "no_program", 0),
    ("a, b = map(int, input().split())\nprint(a + b)", LINES, "passed", 2),
    ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit()", LINES, "passed", 2),
    ("print(7)", LINES, "wrong_answer", 1),
    ("print(7); import sys; sys.exit(1)", LINES, "runtime_error", 0),
    ("print('x' * 10 ** 7)", LINES, "output_limit", 0),
    (GOOD_STACK, STACK, "passed", 4),
    (GOOD_STACK.replace("n / 2", "n // 2"), STACK, "wrong_answer", 2),
    (GOOD_STACK.replace("self.items.pop()", "self.items[0]"), STACK, "wrong_answer", 3),
    ("class Solution:\n    def f(self, x): return x", METHOD, "passed", 1),
    (
        "import asyncio, threading, random, collections, heapq\nasync def g(): return 5\ndef square(n):\n"
        "    r = []\n    t = threading.Thread(target=lambda: r.append(n * n)); t.start(); t.join()\n"
        "    assert asyncio.run(g()) == 5\n    return r[0]",
        SQUARE,
        "passed",
        2,
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    verifier = write_verifier(tmp_path_factory.mktemp("code"))
    yield run_programs(verifier, [(program, problem) for program, problem, _, _ in CASES])
    close_pool()


@linux
@pytest.mark.parametrize("number", range(len(CASES)))
def test_kinds_of_verdicts(number: int, found: list[dict[str, Any]]) -> None:
    _, problem, kind, passed = CASES[number]
    result = found[number]
    assert (result["kind"], result["passed"], result["tests"]) == (kind, passed, len(problem["tests"])), result


@linux
def test_programs_do_not_see_each_other(tmp_path: Path) -> None:
    """What one program leaves in its process, its modules and its random numbers does not reach the next."""
    verifier = write_verifier(tmp_path)
    problem = {"tests": [{"call": "f", "args": [], "expected": "clean"}]}
    leaves = "import builtins, sys, json\nbuiltins.mark = json.mark = 1\ndef f(): return 'clean'"
    looks = "import builtins, json\ndef f(): return 'dirty' if {'mark'} & {*dir(builtins), *dir(json)} else 'clean'"
    results = run_programs(verifier, [(leaves, problem), (looks, problem)] * 3, workers=1)
    close_pool()
    assert [result["kind"] for result in results] == ["passed"] * 6


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\nthen\n```py\nx = 2\n```\nprints\n```text\n2\n```", "x = 2"),
        ("```text\nno\n```", "no"),
        ("```python\nunclosed = 1", "```python\nunclosed = 1"),
    ],
)
def test_extract_program(response: str, program: str) -> None:
    assert extract_program(response) == program


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(_PLAIN)
def test_plain_data_survives_the_way(value: Any) -> None:
    import json

    there = values.read(json.dumps(values.encode(value)).encode())
    assert there == value
    assert values.same(value, there)
    assert not values.same([value, 1], [there, 2])


@pytest.mark.parametrize(
    ("expected", "value", "tolerance", "same"),
    [
        (1, 1.0, 0.0, True),
        (1, True, 0.0, False),
        (True, 1, 0.0, False),
        (0.3, 0.1 + 0.2, 0.0, False),
        (0.3, 0.1 + 0.2, 1e-9, True),
        (10**30, 10**30 + 1, 1e-9, False),
        ([1, 2], (1, 2), 0.0, True),
        ((1, 2), [1, 2], 0.0, False),
        ([1, [2.0]], [1, [2.0000000001]], 1e-6, True),
        ({"a": 1}, {"a": 1.0}, 0.0, True),
        ({"a": 1}, {"a": 1, "b": 2}, 0.0, False),
        ({1, 2}, {2, 1}, 0.0, True),
        ("1", 1, 0.0, False),
        (math.nan, math.nan, 0.0, True),
        (math.inf, -math.inf, 1e-6, False),
        (None, 0, 0.0, False),
    ],
)
def test_same(expected: Any, value: Any, tolerance: float, same: bool) -> None:
    assert values.same(expected, value, tolerance) is same


def test_only_exactly_the_builtin_types_travel() -> None:
    for value in (type("L", (int,), {})(1), type("L", (list,), {})(), object(), print, [object()], {1: object()}):
        with pytest.raises(values.NotPlainError):
            values.encode(value)


def test_simple_tests_become_calls_and_others_do_not() -> None:
    found = simple("assert f(1, [2], k='x') == {'a': (1, 2)}")
    assert found is not None
    assert (found.call.name, found.call.args, found.call.kwargs) == ("f", (1, [2]), {"k": "x"})
    assert found.expected == {"a": (1, 2)}
    others = ("assert f(1)", "assert f(x) == 1", "assert len(f) == 1", "assert f(1) == 1\nassert 1", "f(1) == 1")
    for test in (*others, "assert f(*a) == 1", "assert f(1) != 2", "x ="):
        assert simple(test) is None, test


def test_tests_of_no_known_form_are_named() -> None:
    with pytest.raises(ValueError, match="test 1 is"):
        read_tests([{"input": "", "output": ""}, {"result": 1}])
    with pytest.raises(ValueError, match="no tests"):
        read_tests([])


def test_outputs() -> None:
    assert same_output("1 2 \n3\n\n", "1 2\n3")
    assert not same_output("1 2\n3", "1 2 3")
    assert same_output("0.333333", "0.3333333", 1e-5)
    assert not same_output("0.333333", "0.3333333")
    assert not same_output("a 1.0", "b 1.0", 1e-5)
