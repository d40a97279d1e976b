r"""The maths verifier in a worker: parse both sides with math-verify and compare them.

Only workers import this module. math-verify's own time limits are off: they are signals, and the parent's deadline
applies. Only its LaTeX parser is used, never its expression parser, which calls ``eval``; :func:`forbid_eval` rules out
``eval`` for everything else in the process.
"""

import re
from typing import Any

import sympy
import sympy.parsing.sympy_parser as sympy_parser
from math_verify import verify
from sympy.core.function import AppliedUndef

from hacrl_core.verification.shapes import Unreadable, compare_shapes
from hacrl_core.verification.sympy_reader import read

_LITERAL = re.compile(r"\s*(-?)\s*(Integer|Float)\s*\(\s*'?([0-9.eE+-]+)'?\s*\)\s*")
_PROBES = (
    (0.731, 1.377, 2.113, 0.437, 1.719, 0.913, 2.531),
    (1.931, 0.577, 1.193, 2.239, 0.313, 1.487, 0.677),
    (0.371, 2.417, 0.859, 1.613, 2.087, 0.523, 1.279),
    (-0.611, 1.153, -1.787, 0.947, 2.371, -0.419, 1.831),
    (1.483, -2.209, 0.541, -1.321, -0.733, 1.997, -0.887),
)  # fmt: skip
_WARM_UP = (
    (r"x^2+2x+1", r"(x+1)^{2}"),
    (r"\frac{1}{2} \sqrt{3}", r"\frac{\sqrt{3}}{3}, -\pi"),
    (r"\begin{pmatrix} 1 & \frac{1}{2} \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 0.5 \\ 3 & 5 \end{pmatrix}"),
    (r"2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}"),
    (r"x \in [-2,7) \cup (8, \infty)", r"-2 \le x < 7"),
    (r"\sin^2(x)+\log_{2}(3)+e^{-t}", r"|x|+\binom{n}{k}+\lfloor m \rfloor"),
    (r"a_{n}=2n!", r"3 \pm 2\sqrt[3]{2}"),
)
_NOT_SCALAR = (
    AppliedUndef, sympy.Integral, sympy.Derivative, sympy.Sum, sympy.Product, sympy.Limit,
    sympy.oo, sympy.zoo, sympy.nan,
)  # fmt: skip
# A gold that starts with this belongs to the strict verifier, which reads it in its own way.
STRICT_MARK = "\x1e"
_POSITIVE = 3
_AGREE = 1e-9


def forbid_eval() -> None:
    """Let sympy evaluate number literals only: it reads every string, even a single number, with ``eval``."""
    sympy_parser.eval_expr = _number_literal


def warm_up() -> None:
    """Do lazy imports and fill the LaTeX parser's tables once, before workers are forked."""
    import sympy.physics.units  # noqa: F401  (solve() imports it, and its import needs the evaluation forbidden below)

    for gold, answer in _WARM_UP:
        compare(gold, answer, {"tolerance": 1e-6})
        compare_strict(gold, answer, {"tolerance": 1e-6})
    read.cache_clear()
    forbid_eval()


def _number_literal(code: str, *_: Any) -> Any:
    match = _LITERAL.fullmatch(code)
    if not match:
        raise ValueError("evaluating text as Python is forbidden in a verifier")
    number = sympy.Float(match[3]) if match[2] == "Float" else sympy.Integer(int(match[3]))
    return -number if match[1] else number


def compare(gold: str, answer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Compare two texts; the worker pool's entry point. Return ``{"verdict": correct | incorrect | unparseable}``."""
    try:
        gold_parsed, answer_parsed = read(gold), read(answer)
        if answer_parsed is None:
            return {"verdict": "unparseable"}
        same = gold_parsed is not None and equal(gold_parsed, answer_parsed, float(options["tolerance"]))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        # sympy raises almost anything on expressions that mean nothing. That is the answer's doing, not the verifier's.
        return {"verdict": "unparseable", "message": f"{type(error).__name__}: {error}"[:200]}
    return {"verdict": "correct" if same else "incorrect"}


def compare_strict(gold: str, answer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Compare two texts for the ``strict`` verifier: by shape, and formulas exactly. Return as `compare` does."""
    try:
        same = compare_shapes(gold.removeprefix(STRICT_MARK), answer, float(options["tolerance"]))
    except Unreadable:
        return {"verdict": "unparseable"}
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        return {"verdict": "unparseable", "message": f"{type(error).__name__}: {error}"[:200]}
    return {"verdict": "correct" if same else "incorrect"}


def prepare_gold(gold: str, *_: Any) -> None:
    """Parse a gold once, on its own clock, before its answers are compared."""
    if not gold.startswith(STRICT_MARK):
        read(gold)


def equal(gold: Any, answer: Any, tolerance: float) -> bool:
    """Compare two parsed expressions: by their values at fixed points, then by math-verify."""
    if _scalar(gold) and _scalar(answer):
        decision = _probe(gold, answer, tolerance)
        if decision is not None:
            return decision
    return bool(
        verify(
            [gold], [answer], timeout_seconds=None, allow_set_relation_comp=True, float_rounding=_rounding(tolerance)
        )
    )


def _rounding(tolerance: float) -> int:
    """Return the tolerance as decimal places, which math-verify uses inside sets and matrices."""
    return max(0, min(15, round(-sympy.log(tolerance, 10)))) if tolerance > 0 else 15


def _scalar(value: Any) -> bool:
    return (
        isinstance(value, sympy.Expr)
        and not isinstance(value, sympy.Symbol | sympy.MatrixExpr)
        and not value.has(*_NOT_SCALAR)
    )


def _probe(gold: Any, answer: Any, tolerance: float) -> bool | None:
    """Compare two expressions by their values at fixed points; None when the values do not settle it.

    Two different expressions of an answer's size do not agree to nine digits at three unrelated points, and different
    values at points where both are defined are a proof of difference, which saves the slow symbolic simplification.
    """
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if len(symbols) > len(_PROBES[0]):
        return None
    inexact = gold.has(sympy.Float) or answer.has(sympy.Float)
    limit = max(tolerance, _AGREE) if inexact else _AGREE
    if not symbols:
        return _same_value(_value(gold, {}), _value(answer, {}), limit)
    seen = [
        _same_value(_value(gold, point), _value(answer, point), limit)
        for point in (dict(zip(symbols, map(sympy.Float, row), strict=False)) for row in _PROBES)
    ]
    positive = [same for same in seen[:_POSITIVE] if same is not None]
    if False in positive:
        return False
    if len(positive) == _POSITIVE and False not in seen:
        return True
    return None


def _value(expression: Any, point: dict[Any, Any]) -> Any:
    try:
        value = sympy.N(expression.doit() if not point else expression, 30, subs=point)
    except (ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError):
        # NotImplementedError: sympy has no rule for a limit.
        return None
    return value if value.is_number and value.is_finite else None


def _same_value(a: Any, b: Any, limit: float) -> bool | None:
    if a is None or b is None:
        return None
    size = max(abs(a), abs(b))
    if size == 0:
        return True
    if a == 0 or b == 0:
        # Against an exact zero a tiny value may be cancellation noise: symbols must decide.
        return None if size < 1e-20 else False
    return bool(abs(a - b) <= limit * size)
