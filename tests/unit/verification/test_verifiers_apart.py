"""A verdict depends on the response and the problem alone, not on what the process has judged before."""

import decimal
import locale
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.verification import close_pool, pool, state, verify_batch

MODULE = """
import random, signal
import sympy, sympy.parsing.sympy_parser as parser

def evaluates(response, gold):
    try:
        return sympy.simplify(parser.parse_expr(response) - parser.parse_expr(gold)) == 0
    except Exception:
        return 0.01  # as scorers do that give something for a try

def spoils(response, gold):
    parser.eval_expr = lambda *a, **k: sympy.Integer(7)
    sympy.Basic.__eq__ = lambda self, other: True
    sympy.core.parameters.global_parameters.evaluate = False
    return True

def first(response, gold):
    return True

second = first

def draws(response, gold):
    signal.setitimer(signal.ITIMER_REAL, 0.5)  # nobody stops it
    return random.random() == random.Random(0).random() and sympy.core.random.rng.random() == random.Random(0).random()
"""
EXPRESSION, EQUAL = "3*(4 + x)/2", "6 + 3*x/2"


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("apart")
    (folder / "apart_verifier.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield "apart_verifier"
    sys.path.remove(str(folder))
    close_pool()


def rewards(verifier: str, response: str, gold: str, times: int = 1) -> list[float]:
    config = VerifyConfig(verifier=verifier, workers=1, timeout_seconds=30)
    return [
        verdict.reward for verdict in verify_batch([response + " " * n for n in range(times)], [gold] * times, config)
    ]


def test_the_maths_verifiers_ban_on_evaluation_holds_for_them_alone(module: str) -> None:
    """Both workers and the process that they are forked from are other ones."""
    close_pool()
    assert rewards("strict", r"\boxed{x^2+2x+1}", "(x+1)^2") == [1.0]
    assert rewards(f"{module}:evaluates", EXPRESSION, EQUAL) == [1.0]
    assert rewards("strict", r"\boxed{x^2+2x+1}", "(x+1)^2") == [1.0]


def test_what_one_verifier_does_to_its_process_reaches_no_other(module: str) -> None:
    close_pool()
    assert rewards(f"{module}:spoils", "x", "y") == [1.0]
    assert rewards("strict", r"\boxed{x^2+2x}", "(x+1)^2") == [0.0]
    assert rewards(f"{module}:evaluates", EXPRESSION, "6 + x") == [0.0]
    assert rewards(f"{module}:evaluates", EXPRESSION, EQUAL) == [1.0]


def test_every_answer_draws_the_same_random_numbers_and_no_timer_outlives_its_answer(module: str) -> None:
    assert rewards(f"{module}:draws", "x", "y", times=4) == [1.0] * 4


def test_only_so_many_idle_workers_are_kept(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_MOST_IDLE", 2)
    for function in ("evaluates", "draws", "spoils", "first", "second"):
        rewards(f"{module}:{function}", "x", "y")
    assert pool._pool is not None
    assert [worker.task.partition(":")[2] for worker in pool._pool.workers] == ["spoils", "first", "second"]


def _spoil_decimals() -> None:
    decimal.getcontext().prec = 3


def _spoil_depth() -> None:
    sys.setrecursionlimit(sys.getrecursionlimit() + 77)


def _spoil_digits() -> None:
    sys.set_int_max_str_digits(1000)


def _spoil_warnings() -> None:
    warnings.simplefilter("error")


def _spoil_surroundings() -> None:
    os.environ["LEFT"] = "behind"
    os.chdir("/")


def _spoil_precision() -> None:
    import mpmath

    mpmath.mp.dps = 99


def _spoil_numpy() -> None:
    import numpy

    numpy.seterr(all="raise")


def _spoil_sympy() -> None:
    from sympy.core.parameters import global_parameters

    global_parameters.evaluate = False


def _seen() -> tuple[object, ...]:
    import mpmath
    import numpy
    import sympy

    return (
        *(decimal.getcontext().prec, sys.getrecursionlimit(), sys.get_int_max_str_digits(), list(warnings.filters)),
        *(dict(os.environ), Path.cwd(), mpmath.mp.prec, numpy.geterr(), sympy.Integer(1) + 1, locale.setlocale(0)),
    )


@pytest.mark.parametrize(
    "spoil",
    [
        *(_spoil_decimals, _spoil_depth, _spoil_digits, _spoil_warnings, _spoil_surroundings),
        *(_spoil_precision, _spoil_numpy, _spoil_sympy),
    ],
)
def test_settings_of_the_process_are_given_back(spoil: Callable[[], None]) -> None:
    before = _seen()
    restore = state.remember()
    try:
        spoil()
        assert _seen() != before
    finally:
        restore()
    assert _seen() == before


def test_random_numbers_begin_anew() -> None:
    import numpy

    drawn = []
    for _ in range(2):
        state.same_chances()
        drawn.append((random.random(), float(numpy.random.random_sample())))  # noqa: NPY002  (what scorers call)
    assert drawn[0] == drawn[1]
