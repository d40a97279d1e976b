r"""Decide whether two sympy expressions are equal: exactly, or within a relative tolerance where a decimal was written.

Rational differences are decided by arithmetic. Any other constant difference is evaluated with more digits than the
numbers in it can hide: a value with one certain digit is a difference, a value that stays zero at that precision is
none. Functions are compared at points of different regions, beyond every constant in them and beyond 1000; where an
absolute value, a rounding or a maximum bends them, on both sides of every bend that can be solved for.
"""

import itertools
from fractions import Fraction
from typing import Any

import sympy

from hacrl_core.verification.numbers import ROUNDING, is_finite_decimal

_MAX_DIGITS = 20_000
_SCALES = (
    "7/9", "-13/11", "29/13", "-31/17", "173/10", "-237/10", "3119/10", "-10093/10", "41/100", "-7/130",
    "12377/10", "-2953/7",
)  # fmt: skip
_NEEDED = 4
# A value is certain when so many of its 53 bits are; what cancellation leaves of a zero has a few.
_CERTAIN_BITS = 30
_BENT = (sympy.Abs, sympy.floor, sympy.ceiling, sympy.Max, sympy.Min, sympy.sign, sympy.Piecewise, sympy.Mod)
_STEPPED = (sympy.floor, sympy.ceiling, sympy.Mod)
_ZERO_AT_ONE = (sympy.log, sympy.acos)
_GROW_FAST = (sympy.sinh, sympy.cosh, sympy.tanh)
_UNBOUNDED = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
# Whole numbers of different remainders, with squares and powers among them.
_WHOLE = tuple(map(sympy.Integer, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 25, 27, 64)))
_LEVELS = tuple(sympy.Integer(level) for level in range(-2, 5))
_EXPAND_OPERATIONS = 120
_EXPAND_POWER = 30


def same_expression(gold: Any, answer: Any, tolerance: float) -> bool:
    """Return whether two expressions are equal; ``tolerance`` 0 asks for exact equality."""
    if gold == answer:
        return True
    if any(value.has(*_UNBOUNDED) for value in (gold, answer)):
        return False
    if tolerance <= ROUNDING and _is_written_exactly(gold):
        tolerance = 0.0
    difference = gold - answer
    if difference.is_Rational:
        return bool(difference == 0) or _near(gold, answer, {}, tolerance) is True
    symbols = sorted(difference.free_symbols, key=str)
    if not symbols:
        if gold.free_symbols or answer.free_symbols:
            return _same_function(gold, answer, tolerance)
        return not _is_nonzero(difference, {}, _digits(difference)) or _near(gold, answer, {}, tolerance) is True
    return _same_function(gold, answer, tolerance)


def _is_written_exactly(gold: Any) -> bool:
    """Return whether every number of a formula can be written as a decimal, so that none of it needs rounding."""
    if any(not power.exp.is_Integer for power in gold.atoms(sympy.Pow)):
        return False
    return all(
        atom.is_Symbol or (atom.is_Rational and is_finite_decimal(Fraction(int(atom.p), int(atom.q))))
        for atom in gold.atoms()
    )


def _same_function(gold: Any, answer: Any, tolerance: float) -> bool:
    difference = gold - answer
    if _expands_to_zero(difference):
        return True
    if _unknown_bends(answer) > _unknown_bends(gold):
        # Points cannot show that what the answer adds is zero everywhere.
        return bool(sympy.simplify(difference) == 0)
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    digits = _digits(difference)
    agreed = 0
    for point in _points(gold, answer, symbols):
        if not _defined(gold, point) or not _defined(answer, point):
            continue
        nonzero = _is_nonzero(difference, point, digits)
        if nonzero is None:
            continue
        if nonzero and _near(gold, answer, point, tolerance) is not True:
            return False
        agreed += 1
    return agreed >= _NEEDED or bool(sympy.simplify(difference) == 0)


def _expands_to_zero(difference: Any) -> bool:
    """Return whether multiplying out proves equality; not tried where the result could be huge."""
    powers = [power.exp for power in difference.atoms(sympy.Pow) if power.exp.is_Integer]
    if difference.count_ops() > _EXPAND_OPERATIONS or any(abs(power) > _EXPAND_POWER for power in powers):
        return False
    return bool(sympy.expand(difference) == 0)


def _digits(difference: Any) -> int:
    """Return a precision beyond what the numbers in an expression can hide, in decimal digits."""
    bits = sum(int(number.p).bit_length() + int(number.q).bit_length() for number in _rationals(difference))
    height = bits * 3 // 10 + 1
    roots = sum(1 for power in difference.atoms(sympy.Pow) if not power.exp.is_Integer)
    return int(min(_MAX_DIGITS, 60 + 2 * height * (1 + roots) + _hidden_size(difference)))


def _hidden_size(expression: Any) -> int:
    r"""Return how many digits powers that are no fractions may hide: ``e^{-100}`` is zero to 43 of them."""
    size = 0
    for power in expression.atoms(sympy.exp, sympy.Pow, *_GROW_FAST):
        base, exponent = (power.base, power.exp) if isinstance(power, sympy.Pow) else (sympy.E, power.args[0])
        if base.is_Rational and exponent.is_Integer:
            continue
        # Twice: what is hidden may be squared, as in a cosine near 1.
        value = _value(2 * exponent * sympy.log(sympy.Abs(base)), {}, 60)
        size += min(_MAX_DIGITS, int(abs(value))) if value is not None and value.is_real else 0
    return size


def _rationals(expression: Any) -> list[Any]:
    return [number for number in sympy.preorder_traversal(expression) if getattr(number, "is_Rational", False)]


def _is_nonzero(difference: Any, point: dict[Any, Any], digits: int) -> bool | None:
    """Return whether a value has a certain digit other than zero; None where it is not defined."""
    value = _value(difference, point, digits)
    if value is None:
        return None
    if value == 0 and difference.has(*_ZERO_AT_ONE):
        # The argument was rounded to 1 first: 1 + 10^{-30} needs all digits.
        full = _value(difference, point, digits, digits)
        return full is None or bool(abs(full) > sympy.Float(10) ** (-digits // 2))
    return any(part != 0 and (not part.is_Float or part._prec >= _CERTAIN_BITS) for part in value.as_real_imag())


def _value(expression: Any, point: dict[Any, Any], digits: int, shown: int = 15) -> Any:
    try:
        if point and expression.has(*_STEPPED):
            # At a step an approximation may fall on either side.
            expression, point = expression.subs(point), {}
        value = expression.evalf(shown, subs=point, maxn=digits) if point else expression.evalf(shown, maxn=digits)
    except (ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError):
        return None
    return value if value.is_number and value.is_finite else None


def _near(gold: Any, answer: Any, point: dict[Any, Any], tolerance: float) -> bool | None:
    """Return whether values differ by at most the relative tolerance; None where one is not defined."""
    if tolerance == 0:
        return False
    a, b = _value(gold, point, 100), _value(answer, point, 100)
    if a is None or b is None:
        return None
    return bool(abs(a - b) <= sympy.Rational(Fraction(tolerance)) * max(abs(a), abs(b)))


def _defined(expression: Any, point: dict[Any, Any]) -> bool:
    """Return whether every root and logarithm has a non-negative argument here: the real domain of a formula."""
    arguments = [power.base for power in expression.atoms(sympy.Pow) if not power.exp.is_Integer]
    arguments += [logarithm.args[0] for logarithm in expression.atoms(sympy.log)]
    for argument in arguments:
        if argument.free_symbols:
            value = _value(argument, point, 60)
            if value is None or value.as_real_imag()[1] != 0 or value.as_real_imag()[0] < 0:
                return False
    return True


def _points(gold: Any, answer: Any, symbols: list[Any]) -> list[dict[Any, Any]]:
    """Return points of different sizes and signs, beyond every constant, and around every bend."""
    largest = max([abs(number) for number in _rationals(gold) + _rationals(answer)], default=sympy.Integer(1))
    scales = [sympy.Rational(text) for text in _SCALES]
    beyond = 2 * max(largest, sympy.Integer(1000))
    scales += [beyond + sympy.Rational(71, 10), -beyond - sympy.Rational(33, 10)]
    # The positive points come first: most formulas are defined there.
    scales.sort(key=lambda scale: bool(scale < 0))
    points = []
    for row, scale in enumerate(scales):
        point = {symbols[0]: scale}
        for column, symbol in enumerate(symbols[1:], 1):
            step = scales[(row + 3 * column) % 7] if row < 5 else scales[(row * 5 + 3 * column) % len(scales)]
            point[symbol] = step * (1 + sympy.Rational(column, 19))
        points.append(point)
    if gold.has(*_BENT) or answer.has(*_BENT):
        points += _around_bends(gold, answer, symbols, scales)
    if gold.has(*_STEPPED) or answer.has(*_STEPPED):
        points += [
            {symbol: _WHOLE[(row + 5 * column) % len(_WHOLE)] for column, symbol in enumerate(symbols)}
            for row in range(len(_WHOLE))
        ]
    return points


def _around_bends(gold: Any, answer: Any, symbols: list[Any], scales: list[Any]) -> list[dict[Any, Any]]:
    """Return points between and beside the bends: per variable, where a bent function's linear argument is zero."""
    rows = range(0, len(scales), 3)
    points = []
    for place, symbol in enumerate(symbols):
        for row in rows if len(symbols) > 1 else (0,):
            others = {
                other: scales[(row + 2 * column) % len(scales)]
                for column, other in enumerate(symbols)
                if column != place
            }
            bends = sorted(_bends(gold, symbol, others) | _bends(answer, symbol, others))[:40]
            points += [{**others, symbol: bend} for bend in bends]
            for left, right in zip([None, *bends], [*bends, None], strict=True):
                if left is None and right is None:
                    continue
                middle = (left + right) / 2 if left is not None and right is not None else None
                value = middle if middle is not None else (right - 1 if left is None else left + 1)
                points.append({**others, symbol: value})
    return points


def _unknown_bends(expression: Any) -> int:
    """Return how many bent functions bend where nobody looks: steps of no line, bends of no polynomial."""
    return sum(not all(_is_searched(bent, argument) for argument in bent.args) for bent in expression.atoms(*_BENT))


def _is_searched(bent: Any, argument: Any) -> bool:
    symbols = argument.free_symbols
    if not isinstance(argument, sympy.Expr) or not argument.is_polynomial(*symbols):
        return not symbols
    return not isinstance(bent, _STEPPED) or all(sympy.diff(argument, symbol).is_number for symbol in symbols)


def _bends(expression: Any, symbol: Any, others: dict[Any, Any]) -> set[Any]:
    found = set()
    for bent in expression.atoms(*_BENT):
        arguments = list(bent.args)
        pairs = [(arguments[0], sympy.Integer(0))]
        if isinstance(bent, sympy.Max | sympy.Min):
            pairs = list(itertools.combinations(arguments, 2))
        for a, b in pairs:
            if not isinstance(a, sympy.Expr) or a.has(*_BENT) or b.has(*_BENT):
                continue
            line = (a - b).subs(others)
            slope = sympy.diff(line, symbol)
            start = line.subs(symbol, 0)
            if slope.is_Rational and slope != 0 and start.is_Rational:
                # A rounding has a step at every integer.
                found |= {(level - start) / slope for level in (_LEVELS if isinstance(bent, _STEPPED) else (0,))}
    return found
