r"""Numbers as exact fractions: integers, decimals, thousands, fractions, mixed numbers, powers of ten, percentages."""

import math
import re
from dataclasses import dataclass, field, replace
from fractions import Fraction

_MAX_EXPONENT = 400
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:\ \d{3})+(?!\d)|\d{1,60})"
_PLAIN = re.compile(rf"(?P<int>{_DIGITS})?(?P<frac>\.\d{{0,60}})?(?P<exp>[eE][+-]?\d{{1,3}})?")
_POWER = re.compile(
    r"(?:(?P<mantissa>-?[\d.,]{1,60})\s*(?:\\times|\\cdot|\*|×|·)\s*)?10\s*\^\s*(?:\{\s*(?P<e1>[+-]?\d{1,3})\s*\}|\(?(?P<e2>[+-]?\d{1,3})\)?)"
)
_FRACTION = re.compile(r"(?:\\frac\{(?P<a>[^{}]{1,60})\}\{(?P<b>[^{}]{1,60})\}|(?P<c>[^/]{1,60})/(?P<d>[^/]{1,60}))")
_MIXED = re.compile(
    r"(?P<whole>\d{1,20})\s*(?P<rest>\\frac\{\d{1,20}\}\{\d{1,20}\})|(?P<w2>\d{1,20}) (?P<r2>\d{1,20}/\d{1,20})"
)
_PERCENT = re.compile(r"\s*(?:\\?%|\b(?:percent(?:age)?|pct)\b)\s*$")
_COMMA_DECIMAL = re.compile(r"-?(?:\d+,\d{1,2}|\d+,\d{4,}|0,\d+)")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as an exact fraction."""

    value: Fraction
    exact: bool
    """False for a decimal: it may stand for a value that was rounded."""
    percent: bool = False
    step: Fraction | None = field(default=None, compare=False)
    """One unit of the last place that is written; None where the digits do not say."""


def parse_number(text: str) -> Number | None:
    """Read one number; None when the text is anything else."""
    text = text.strip()
    if not text or len(text) > 200:
        return None
    percent = _PERCENT.search(text)
    if percent:
        number = parse_number(text[: percent.start()])
        return None if number is None or number.percent else replace(number, percent=True)
    if text[0] in "+-":
        rest = text[1:].lstrip()
        if rest[:1] in ("+", "-", ""):
            return None
        number = _unsigned(rest)
        return number if number is None or text[0] == "+" else replace(number, value=-number.value, percent=False)
    return _unsigned(text)


def _unsigned(text: str) -> Number | None:
    while text[:1] in ("(", "{") and text[-1:] == {"(": ")", "{": "}"}[text[0]]:
        inner = text[1:-1].strip()
        if not inner or inner[0] in "({" or not set("(){}").isdisjoint(inner):
            break
        return parse_number(inner)
    match = _PLAIN.fullmatch(text)
    if match and (match["int"] or (match["frac"] and len(match["frac"]) > 1)):
        return _plain(match)
    match = _POWER.fullmatch(text)
    if match:
        return _power(match)
    match = _MIXED.fullmatch(text)
    if match:
        part = _unsigned(match["rest"] or match["r2"])
        return part and Number(part.value + int(match["whole"] or match["w2"]), True)
    match = _FRACTION.fullmatch(text)
    if match:
        above, below = parse_number(match["a"] or match["c"]), parse_number(match["b"] or match["d"])
        if above and below and below.value and not above.percent and not below.percent:
            return Number(above.value / below.value, above.exact and below.exact)
    return None


def _plain(match: re.Match[str]) -> Number | None:
    digits = (match["int"] or "0").replace(",", "").replace(" ", "")
    fraction = match["frac"] or ""
    exponent = match["exp"] or ""
    if exponent and abs(int(exponent[1:])) > _MAX_EXPONENT:
        return None
    value = Fraction(digits + (fraction if len(fraction) > 1 else "") + exponent)
    places = int(exponent[1:] or 0) - max(0, len(fraction) - 1)
    return Number(value, exact=not exponent and not fraction.strip(".0"), step=Fraction(10) ** places)


def _power(match: re.Match[str]) -> Number | None:
    mantissa = parse_number(match["mantissa"]) if match["mantissa"] else Number(Fraction(1), True)
    exponent = int(match["e1"] or match["e2"])
    if mantissa is None or abs(exponent) > _MAX_EXPONENT:
        return None
    scale = Fraction(10) ** exponent
    return Number(mantissa.value * scale, mantissa.exact, step=mantissa.step and mantissa.step * scale)


# What rounding in the last digits of a decimal may differ by. A larger tolerance is the user's word that values may be
# rounded.
ROUNDING = 1e-6


def close(a: Fraction, b: Fraction, tolerance: float) -> bool:
    """Return whether two values differ by at most the relative tolerance."""
    # Over one denominator in integers: fractions would be reduced after every operation.
    left, right = a.numerator * b.denominator, b.numerator * a.denominator
    share, whole = tolerance.as_integer_ratio()
    return abs(left - right) * whole <= share * max(abs(left), abs(right))


def is_rounded(value: Fraction, step: Fraction, figure: Fraction) -> bool:
    """Return whether ``figure`` is ``value`` rounded to multiples of ``step``, or cut off there."""
    steps = abs(value) / step
    nearest = {math.floor(steps), math.floor(steps + Fraction(1, 2)), round(steps)}
    return abs(figure) / step in nearest and value * figure >= 0


def agree(gold: Number, answer: Number, tolerance: float) -> bool:
    """Return whether two numbers differ by rounding alone; a larger tolerance than that of rounding decides itself."""
    if not close(gold.value, answer.value, tolerance):
        return False
    if gold.value == answer.value or tolerance > ROUNDING:
        return True
    if any(not number.exact and number.step is None for number in (gold, answer)):
        return True
    written = [number for number in (gold, answer) if not number.exact and number.step is not None]
    coarse = max(written, key=lambda number: number.step or 0)
    fine = answer if coarse is gold else gold
    return coarse.step is not None and is_rounded(fine.value, coarse.step, coarse.value)


def same_number(gold: Number, answer: Number, tolerance: float) -> bool:
    """Compare values; a percentage also matches its bare figure and its fraction, ``10%`` both 10 and 0.1."""
    if gold.exact and answer.exact:
        tolerance = 0.0
    if gold.percent == answer.percent:
        return close(gold.value, answer.value, tolerance)
    percent, plain = (gold, answer) if gold.percent else (answer, gold)
    return close(percent.value, plain.value, tolerance) or close(percent.value / 100, plain.value, tolerance)


def comma_decimal(text: str) -> str | None:
    """Return ``1000,99`` with its comma read as a decimal point; None when it cannot be one."""
    return text.replace(",", ".") if _COMMA_DECIMAL.fullmatch(text) else None


def is_finite_decimal(value: Fraction) -> bool:
    """Return whether the decimal expansion of a number ends, so that it can be written down exactly."""
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1
