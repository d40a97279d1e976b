"""Judge a program by its tests: find it in a response, run it in the sandbox, compare what comes back.

Tests have three forms, which may be mixed in one problem:

* ``{"input": "3\\n", "output": "9\\n"}``: the whole program reads its standard input and prints;
* ``{"call": "square", "args": [3], "expected": 9}``: a function, or a method as ``Solution.square``, is called;
* ``"assert square(3) == 9"``: Python, with as many statements as it needs.

What a test expects never is in the program's process (jail/program.py, jail/checks.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hacrl_core.verification.jail import checks, values
from hacrl_core.verification.jail.client import Call, Ending, ProgramLimits, Result, Run, run_calls, run_script

Kind = Literal[
    "passed",
    "wrong_answer",
    "no_program",
    "syntax_error",
    "runtime_error",
    "timeout",
    "memory",
    "forbidden",
    "output_limit",
]
KINDS: tuple[Kind, ...] = (
    *("passed", "wrong_answer", "no_program", "syntax_error", "runtime_error"),
    *("timeout", "memory", "forbidden", "output_limit"),
)
_KIND_OF: dict[Ending, Kind] = {
    "ok": "wrong_answer",
    "error": "runtime_error",
    "syntax": "syntax_error",
    "memory": "memory",
    "forbidden": "forbidden",
    "timeout": "timeout",
    "output": "output_limit",
    "killed": "runtime_error",
}
_FENCED = re.compile(r"```[ \t]*([A-Za-z0-9_+.-]*)[^\n]*\n(.*?)(?:\n[ \t]*)?```", re.DOTALL)
_PYTHON = ("python", "python3", "py")
# After so many runs that hit the time limit the rest of the tests count as failed.
_MOST_TIMEOUTS = 2


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of a problem, sorted by how they are run."""

    scripts: tuple[tuple[str, str], ...] = ()
    calls: tuple[checks.Expectation, ...] = ()
    checks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.scripts) + len(self.calls) + len(self.checks)


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What running a program showed."""

    kind: Kind
    passed: int
    tests: int
    program: str
    # Of the first test that failed.
    note: str = ""
    cpu_seconds: float = 0.0

    @property
    def share(self) -> float:
        """The share of tests that passed."""
        return self.passed / self.tests if self.tests else 0.0


@dataclass(slots=True)
class _Tally:
    passed: int = 0
    kind: Kind = "passed"
    note: str = ""
    cpu_seconds: float = 0.0
    timeouts: int = 0

    def fail(self, kind: Kind, note: str) -> None:
        if self.kind == "passed":
            self.kind, self.note = kind, note
        self.timeouts += kind == "timeout"

    def ran(self, run: Run) -> None:
        self.cpu_seconds += run.cpu_seconds


def extract_program(response: str) -> str:
    """Return the last fenced Python block, else the last fenced block, else the whole response."""
    blocks = _FENCED.findall(response)
    python = [body for language, body in blocks if language.lower() in _PYTHON]
    chosen = python or [body for _, body in blocks]
    return str(chosen[-1]) if chosen else response


def read_tests(tests: Iterable[Any], entry_point: str = "") -> Tests:
    """Sort the tests of a problem; raise ValueError for one of no known form."""
    scripts, calls, others = [], [], []
    for number, test in enumerate(tests):
        if isinstance(test, str):
            expectation = checks.simple(test)
            calls.append(expectation) if expectation else others.append(test)
        elif isinstance(test, Mapping) and "output" in test:
            scripts.append((str(test.get("input", "")), str(test["output"])))
        elif isinstance(test, Mapping) and "expected" in test and (test.get("call") or entry_point):
            call = Call(str(test.get("call") or entry_point), tuple(test.get("args", ())), test.get("kwargs") or {})
            calls.append(checks.Expectation(call, test["expected"]))
        else:
            raise ValueError(
                f"test {number} is {test!r}; write {{'input': …, 'output': …}}, {{'call': …, 'args': […], "
                "'expected': …}} or an assert statement"
            )
    if not scripts and not calls and not others:
        raise ValueError("the problem has no tests; give it a column 'tests'")
    return Tests(tuple(scripts), tuple(calls), tuple(others))


def judge_program(
    program: str,
    tests: Tests,
    limits: ProgramLimits,
    *,
    setup: str = "",
    tolerance: float = 0.0,
    stop_early: bool = False,
) -> CodeResult:
    """Run a program against its tests; with ``stop_early`` the first test that fails ends the work."""
    if not program.strip():
        return CodeResult("no_program", 0, len(tests), program)
    source = f"{setup}\n{program}" if setup else program
    tally = _Tally()
    _judge_calls(source, tests.calls, limits, tolerance, tally)
    if not (stop_early and tally.kind != "passed") and tests.checks and tally.kind != "syntax_error":
        _judge_checks(source, tests.checks, limits, tally)
    if not (stop_early and tally.kind != "passed") and tally.kind != "syntax_error":
        _judge_scripts(source, tests.scripts, limits, tolerance, tally, stop_early=stop_early)
    return CodeResult(tally.kind, tally.passed, len(tests), program, tally.note, tally.cpu_seconds)


def _judge_calls(
    source: str, expectations: Sequence[checks.Expectation], limits: ProgramLimits, tolerance: float, tally: _Tally
) -> None:
    if not expectations:
        return
    run, results = run_calls(source, [each.call for each in expectations], limits)
    tally.ran(run)
    for number, each in enumerate(expectations):
        result = results[number] if number < len(results) else None
        if result is None:
            ended: Kind = "runtime_error" if run.ending == "ok" else _KIND_OF[run.ending]
            tally.fail(ended, run.note or f"{each.call.name} was not reached")
        elif result.error:
            tally.fail("forbidden" if result.forbidden else "runtime_error", result.error)
        elif values.same(each.expected, result.value, tolerance):
            tally.passed += 1
        else:
            tally.fail("wrong_answer", _difference(each, result))


def _difference(each: checks.Expectation, result: Result) -> str:
    try:
        return f"{each.call.name}{each.call.args!r} gave {result.value!r}, expected {each.expected!r}"[:300]
    except (ValueError, RecursionError):
        # Integers of thousands of digits have no decimal form.
        return f"{each.call.name} gave another value than expected"


def _judge_checks(source: str, tests: Sequence[str], limits: ProgramLimits, tally: _Tally) -> None:
    run, failures = checks.run_checks(source, tests, limits)
    tally.ran(run)
    for failure in failures:
        if not failure:
            tally.passed += 1
        elif run.ending in ("ok", "killed"):
            tally.fail("wrong_answer" if failure.startswith("assertion") else "runtime_error", failure)
        else:
            tally.fail(_KIND_OF[run.ending], run.note or failure)


def _judge_scripts(
    source: str,
    tests: Sequence[tuple[str, str]],
    limits: ProgramLimits,
    tolerance: float,
    tally: _Tally,
    *,
    stop_early: bool,
) -> None:
    runs = run_script(source, [given for given, _ in tests], limits)
    for (_, expected), run in zip(tests, runs, strict=True):
        tally.ran(run)
        if run.ending != "ok":
            tally.fail(_KIND_OF[run.ending], run.note)
        elif same_output(expected, run.output, tolerance):
            tally.passed += 1
        else:
            tally.fail("wrong_answer", f"printed {run.output[:120]!r}, expected {expected[:120]!r}")
        if tally.kind == "syntax_error" or tally.timeouts >= _MOST_TIMEOUTS or (stop_early and tally.kind != "passed"):
            return


def same_output(expected: str, output: str, tolerance: float = 0.0) -> bool:
    """Compare what was printed: line by line without spaces at the ends, numbers within the tolerance."""
    wanted = [line.rstrip() for line in expected.rstrip().splitlines()]
    found = [line.rstrip() for line in output.rstrip().splitlines()]
    if wanted == found:
        return True
    if not tolerance or len(wanted) != len(found):
        return False
    return all(_same_line(*pair, tolerance) for pair in zip(wanted, found, strict=True))


def _same_line(wanted: str, found: str, tolerance: float) -> bool:
    left, right = wanted.split(), found.split()
    return len(left) == len(right) and all(_same_word(*pair, tolerance) for pair in zip(left, right, strict=True))


def _same_word(wanted: str, found: str, tolerance: float) -> bool:
    if wanted == found:
        return True
    try:
        return values.same(float(wanted), float(found), tolerance)
    except ValueError:
        return False
