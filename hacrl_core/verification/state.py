"""What one answer must not leave behind for the next: the settings that a process has only once.

A worker judges many answers of one verifier. A scorer that draws random numbers, raises a precision or changes the
folder would otherwise decide later verdicts, and they would depend on how answers were spread over workers.
"""

import contextlib
import decimal
import importlib
import locale
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

_SEED = 0
Restore = Callable[[], None]


def same_chances() -> None:
    """Give the generators of random numbers fixed seeds and cancel a timer that was left running."""
    random.seed(_SEED)
    for name in ("numpy.random", "sympy.core.random"):
        if name in sys.modules:
            sys.modules[name].seed(_SEED)
    signal.setitimer(signal.ITIMER_REAL, 0)


def remember() -> Restore:
    """Return a function that gives this process the settings that it has now."""
    restores = [_decimal(), _interpreter(), _locale(), _surroundings()]
    restores += [keep(sys.modules[name]) for name, keep in _LIBRARIES if name in sys.modules]

    def restore() -> None:
        for each in restores:
            each()

    return restore


def _decimal() -> Restore:
    context = decimal.getcontext().copy()
    return lambda: decimal.setcontext(context.copy())


def _interpreter() -> Restore:
    depth, digits, filters = sys.getrecursionlimit(), sys.get_int_max_str_digits(), list(warnings.filters)

    def restore() -> None:
        sys.setrecursionlimit(depth)
        sys.set_int_max_str_digits(digits)
        if warnings.filters != filters:
            warnings.filters[:] = filters  # type: ignore[index]

    return restore


def _locale() -> Restore:
    name = locale.setlocale(locale.LC_ALL)

    def restore() -> None:
        if locale.setlocale(locale.LC_ALL) != name:
            locale.setlocale(locale.LC_ALL, name)

    return restore


def _surroundings() -> Restore:
    variables, folder = dict(os.environ), ""
    with contextlib.suppress(OSError):  # the jail need not show the folder
        folder = os.getcwd()

    def restore() -> None:
        if folder:
            os.chdir(folder)
        if os.environ != variables:
            os.environ.clear()
            os.environ.update(variables)

    return restore


def _numpy(numpy: Any) -> Restore:
    errors = numpy.geterr()
    return lambda: numpy.seterr(**errors)


def _mpmath(mpmath: Any) -> Restore:
    precision = mpmath.mp.prec
    return lambda: setattr(mpmath.mp, "prec", precision)


def _sympy(_: Any) -> Restore:
    parameters = importlib.import_module("sympy.core.parameters").global_parameters
    values = {name: getattr(parameters, name) for name in ("evaluate", "distribute", "exp_is_pow")}

    def restore() -> None:
        for name, value in values.items():
            if getattr(parameters, name) != value:
                setattr(parameters, name, value)

    return restore


_LIBRARIES: tuple[tuple[str, Callable[[Any], Restore]], ...] = (
    ("numpy", _numpy),
    ("mpmath", _mpmath),
    ("sympy", _sympy),
)
