r"""Compare two answers by their shapes, and formulas in them exactly: the ``strict`` verifier in a worker."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from hacrl_core.verification.exact import same_expression
from hacrl_core.verification.latex import GREEK, Formula, read_formula
from hacrl_core.verification.numbers import ROUNDING, Number, is_rounded
from hacrl_core.verification.reading import decide, denies, read_quantity
from hacrl_core.verification.structure import Node, read_shape
from hacrl_core.verification.sympy_reader import read
from hacrl_core.verification.units import split_known_unit

_LETTER = rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(GREEK))})(?![A-Za-z]))"
_TWO_LETTERS = r"(?!(?P<twice>[A-Za-z])(?P=twice))[A-Za-z]{2}"
_NAME = re.compile(
    rf"(?:(?:\\Delta\s*)?(?:{_LETTER}|{_TWO_LETTERS}|[A-Z]{{3,5}})"
    r"|(?P<words>\\text\{[A-Za-z ]+\}|[A-Za-z]{3,})|\\(?:angle|triangle)\s*[A-Z]{1,3})(?:_\{[^{}]*\}|_\w)?'*"
    r"(?:\s*\([A-Za-z](?:\s*,\s*[A-Za-z])*\))?"
)
# Words that name a value. Any other word may say that it is not the answer.
_NAMING = (
    "the of a an to in total final answer ans result value number sum product difference quotient remainder area "
    "volume perimeter surface length width height depth distance time speed rate cost price profit loss average mean "
    "median mode range ratio radius diameter circumference slope degree probability expected maximum minimum max min "
    "angle mass weight age amount side base solution solutions ways power energy force work velocity acceleration"
)
# A quantity that a gold names by its points: |AB|, \\angle ABC, \\frac{NO}{BO}, V_1:V_2.
_POINTS = re.compile(r"(?:[A-Z](?:_\{?\w+\}?)?|\\(?:angle|triangle|overline|frac|odot|cdot)|[{}|:/ ()])+")
_CALLED_AT = re.compile(r"[fghFGHP]\s*\(\s*(?:-?\d+|[A-Z])\s*\)")
_CALL = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*\(\s*[A-Za-z]\s*\)")
_VARIABLE = re.compile(rf"{_LETTER}(?:_\{{?\w+\}}?)?(?:\s*\([A-Za-z]\))?")
_NUMBERED = re.compile(r"([A-Za-z])_\{?(\d+)\}?")
# Letters in an order: of points, of choices, of a word.
_SPELLED = re.compile(r"[A-Z]{3,}|[a-z]{4,}|yes|no|odd|one|two|six|ten")
_LIMITS = re.compile(r"\\(?:sum|prod|int|lim)(?![A-Za-z])")
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_BRACKETS = {"<": ("(", ")"), "\\le": ("[", "]")}


_UNFINISHED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, AppliedUndef)


class Unreadable(Exception):
    """A formula of the answer has no reading."""


def compare_shapes(gold: str, answer: str, tolerance: float) -> bool:
    """Return whether two answers are the same; raise `Unreadable` when the answer is no mathematics."""
    return _same(read_shape(gold), read_shape(answer), tolerance)


def _same(gold: Node, answer: Node, tolerance: float) -> bool:
    gold, answer = _without_membership(gold, answer)
    if "chain" in (gold.kind, answer.kind):
        return _same_chains(gold, answer, tolerance)
    kinds = gold.kind, answer.kind
    if kinds == ("formula", "formula"):
        return _same_formula(gold.text, answer.text, tolerance)
    if kinds in (("list", "list"), ("set", "set"), ("list", "set"), ("set", "list"), ("union", "union")):
        if kinds == ("list", "list") and _is_named_apart(gold) and all(part.kind != "chain" for part in answer.parts):
            # Names of the gold give its values an order.
            return _same_sequence(gold.parts, answer.parts, tolerance)
        if kinds == ("list", "list") and _named_otherwise(gold, answer):
            return False
        return _same_collection(gold.parts, answer.parts, tolerance)
    if kinds == ("list", "tuple") or gold.kind != answer.kind or gold.signs != answer.signs:
        return False
    return _same_sequence(gold.parts, answer.parts, tolerance)


def _without_membership(gold: Node, answer: Node) -> tuple[Node, Node]:
    r"""Drop ``x \in`` before a set; two different variables stay different."""
    sides = [gold, answer]
    names = []
    for place, side in enumerate(sides):
        if side.kind == "chain" and side.signs == ("\\in",) and _NAME.fullmatch(side.parts[0].text):
            names.append(side.parts[0].text)
            sides[place] = side.parts[1]
    return (gold, answer) if len(set(names)) > 1 else (sides[0], sides[1])


def _names(node: Node) -> list[str]:
    return [part.parts[0].text.strip() for part in node.parts if part.kind == "chain" and part.signs[0] == "="]


def _is_named_apart(node: Node) -> bool:
    names = _names(node)
    return len(names) == len(set(names)) == len(node.parts)


def _named_otherwise(gold: Node, answer: Node) -> bool:
    """Return whether a name stands for several values on one side only: ``x=1,2`` is not ``x=1, y=2``."""
    names = [_names(gold), _names(answer)]
    for_several = any(len(own) < len(side.parts) for own, side in zip(names, (gold, answer), strict=True))
    return all(names) and for_several and set(names[0]) != set(names[1])


def _same_sequence(gold: Sequence[Node], answer: Sequence[Node], tolerance: float) -> bool:
    return len(gold) == len(answer) and all(_same(a, b, tolerance) for a, b in zip(gold, answer, strict=True))


def _same_collection(gold: Sequence[Node], answer: Sequence[Node], tolerance: float) -> bool:
    """Compare without order: every part has exactly one partner."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for part in gold:
        partner = next((other for other in left if _same(part, other, tolerance)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _same_chains(gold: Node, answer: Node, tolerance: float) -> bool:
    """Compare when at least one side is a chain of relations."""
    if gold.kind == answer.kind == "chain":
        if set(gold.signs + answer.signs) <= {"=", "\\approx"}:
            return _same_equations(gold, answer, tolerance)
        return _same_inequalities(gold, answer, tolerance)
    chain, other = (gold, answer) if gold.kind == "chain" else (answer, gold)
    if chain is answer and _names_out_of_order(chain.parts[0]):
        return False
    if set(chain.signs) <= {"=", "\\approx"}:
        values = _values_of(chain, trusted=chain is gold, rounded=_is_decimal(other))
        return any(
            _same(value, other, tolerance) if chain is gold else _same(other, value, tolerance) for value in values
        )
    if other.kind == "tuple" and (interval := _interval(chain)) is not None:
        return not _is_empty(interval[1]) and _same_interval(interval, (other.signs, other.parts), tolerance)
    return False


def _names_out_of_order(names: Node) -> bool:
    """Return whether an answer names its values in an order that a gold without names does not mean: ``(y, x)``."""
    letters = [part.text.strip() for part in names.parts] if names.kind in ("tuple", "ratio") else []
    if letters and set(letters) <= {"x", "y", "z"}:
        return letters != sorted(letters)
    numbered = [_NUMBERED.fullmatch(letter) for letter in letters]
    indices = [int(match[2]) for match in numbered if match]
    return len(indices) == len(letters) and len({m[1] for m in numbered if m}) == 1 and indices != sorted(indices)


def _is_empty(ends: tuple[Node, ...]) -> bool:
    """Return whether the ends of an interval stand the wrong way round: ``1 < x < -2`` is no point ``(1, -2)``."""
    low, high = (_formula(end.text) for end in ends)
    width = high.value - low.value if low is not None and high is not None else None
    return width is not None and bool(width.is_number) and bool(width.is_nonpositive)


def _values_of(chain: Node, *, trusted: bool = False, rounded: bool = False) -> list[Node]:
    r"""Return what a chain says: the value of ``name = value`` or of members that are all equal; else nothing.

    Before ``\approx`` stands the exact value and behind it a rounded one. A gold means both; of an answer the second
    counts only where the gold is ``rounded``.
    """
    members, signs = list(chain.parts), list(chain.signs)
    if _is_name(members[0], trusted) or (signs[0] == "=" and not members[0].text.strip()):
        members, signs = members[1:], signs[1:]
    for one, sign, following in zip(members, signs, members[1:], strict=False):
        if not (_same(one, following, 0.0) or (sign == "\\approx" and _rounds_to(one, following))):
            return []
    if "\\approx" in signs:
        return [members[0], members[-1]] if trusted or rounded else members[:1]
    return members[-1:]


def _is_decimal(node: Node) -> bool:
    return bool(re.search(r"\d\.\d", node.text))


def _is_name(node: Node, trusted: bool) -> bool:
    if node.kind in ("tuple", "ratio"):
        return all(_is_name(part, trusted) for part in node.parts)
    text = node.text.strip()
    if node.kind != "formula":
        return False
    if _CALLED_AT.fullmatch(text):
        return True
    if trusted and (not text or _POINTS.fullmatch(text)):
        return True
    name = _NAME.fullmatch(text)
    if name is None or trusted:
        return name is not None
    words = re.findall("[a-z]+", (name["words"] or "").removeprefix("\\text").casefold())
    return not denies(text) and all(word in _NAMING.split() for word in words)


def _rounds_to(exact: Node, rounded: Node) -> bool:
    """Return whether a decimal is a value rounded to its last place, or cut off there."""
    known, number = _formula(exact.text), read_quantity(rounded.text).number
    return known is not None and number is not None and _is_figure_of(known.value, number)


def _is_figure_of(value: Any, number: Number) -> bool:
    """Return whether the digits of a number are those of a constant, rounded or cut off."""
    if value.free_symbols or number.step is None:
        return False
    digits = value.evalf(60)
    return bool(digits.is_Float or digits.is_Rational) and is_rounded(
        Fraction(str(sympy.Rational(digits))), number.step, number.value
    )


def _same_equations(gold: Node, answer: Node, tolerance: float) -> bool:
    names = [side.parts[0].text.replace(" ", "") for side in (gold, answer)]
    defines = [bool(_CALL.fullmatch(name)) or name == "y" for name in names]
    if names[0] == names[1] or all(defines):
        values = _values_of(answer, rounded=_is_decimal(gold))
        if any(_same(known, value, tolerance) for known in _values_of(gold, trusted=True) for value in values):
            return True
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return False
    return _proportional(gold, answer, tolerance) is not None


def _proportional(gold: Node, answer: Node, tolerance: float) -> Any:
    """Return the constant by which two relations ``left − right`` differ; None when there is none."""
    sides = [_formula(part.text, trusted=side is gold) for side in (gold, answer) for part in side.parts]
    if any(side is None for side in sides):
        return None
    known, other = sides[0].value - sides[1].value, sides[2].value - sides[3].value  # type: ignore[union-attr]
    if not known.free_symbols or known.free_symbols != other.free_symbols:
        return None
    symbols = sorted(known.free_symbols, key=str)
    point = {symbol: sympy.Rational(37 + 11 * place, 10) for place, symbol in enumerate(symbols)}
    above, below = known.subs(point), other.subs(point)
    if above == 0 or below == 0 or not (above.is_finite and below.is_finite):
        return None
    factor = above / below
    rounded = any(side.rounded for side in sides)  # type: ignore[union-attr]
    return factor if same_expression(known, factor * other, tolerance if rounded else 0.0) else None


def _same_inequalities(gold: Node, answer: Node, tolerance: float) -> bool:
    if gold.signs == answer.signs and _same_sequence(gold.parts, answer.parts, tolerance):
        return True
    sides = _interval(gold), _interval(answer)
    if sides[0] is not None and sides[1] is not None and _variable(gold) == _variable(answer):
        return _same_interval(sides[0], sides[1], tolerance)
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return False
    factor = _proportional(gold, answer, tolerance)
    if factor is None or not factor.is_real:
        return False
    sign = answer.signs[0] if factor > 0 else _FLIPPED.get(answer.signs[0], answer.signs[0])
    return bool(sign == gold.signs[0])


def _variable(chain: Node) -> str:
    return next((part.text.strip() for part in chain.parts if _VARIABLE.fullmatch(part.text.strip())), "")


def _interval(chain: Node) -> tuple[tuple[str, ...], tuple[Node, ...]] | None:
    """Return brackets and ends of ``a < x \\le b`` or of a one-sided bound on a variable; None for anything else."""
    parts, signs = list(chain.parts), list(chain.signs)
    if signs and signs[0] in (">", "\\ge"):
        parts, signs = parts[::-1], [_FLIPPED.get(sign, sign) for sign in reversed(signs)]
    if any(sign not in _BRACKETS for sign in signs) or not 2 <= len(parts) <= 3:
        return None
    places = [place for place, part in enumerate(parts) if _VARIABLE.fullmatch(part.text.strip())]
    if len(parts) == 3:
        if places != [1]:
            return None
        return (_BRACKETS[signs[0]][0], _BRACKETS[signs[1]][1]), (parts[0], parts[2])
    if places == [0]:
        return ("(", _BRACKETS[signs[0]][1]), (Node("formula", "-\\infty"), parts[1])
    if places == [1]:
        return (_BRACKETS[signs[0]][0], ")"), (parts[0], Node("formula", "\\infty"))
    return None


def _same_interval(
    gold: tuple[tuple[str, ...], tuple[Node, ...]], answer: tuple[tuple[str, ...], tuple[Node, ...]], tolerance: float
) -> bool:
    return gold[0] == answer[0] and _same_sequence(gold[1], answer[1], tolerance)


def _same_formula(gold: str, answer: str, tolerance: float) -> bool:
    decision = decide(gold, answer, tolerance)
    if decision is not None:
        return decision
    known_unit = read_quantity(gold, True).unit
    known, other = _formula(gold, trusted=True), _formula(answer, gold_unit=known_unit)
    if other is None:
        raise Unreadable(answer)
    if known is None or _SPELLED.fullmatch(gold.strip()):
        return False
    unit = read_quantity(answer, False, known_unit).unit
    if (known_unit and unit and known_unit != unit) or (known_unit and "%" in answer and "%" not in gold):
        return False
    if _LIMITS.search(gold + answer) and (known.value.has(*_UNFINISHED) or other.value.has(*_UNFINISHED)):
        # math-verify's reader has one case for letters, and values of these are approximations: only the same form.
        capitals = [sorted(filter(str.isupper, text)) for text in (gold, answer)]
        return bool(known.value == other.value) and capitals[0] == capitals[1]
    if not (known.rounded or other.rounded):
        tolerance = 0.0
    return same_expression(known.value, other.value, tolerance) and (
        not 0 < tolerance <= ROUNDING or _digits_fit(known.value, other.value, gold, answer)
    )


def _digits_fit(known: Any, other: Any, gold: str, answer: str) -> bool:
    """Return whether a plain decimal on one side has the digits of the constant on the other."""
    if known == other:
        return True
    for value, text in ((known, answer), (other, gold)):
        number = read_quantity(text, text is gold).number
        if number is not None and number.step is not None and not number.exact and not value.free_symbols:
            return _is_figure_of(
                value, replace(number, step=number.step / 100, value=number.value / 100) if number.percent else number
            )
    return True


def _formula(text: str, *, trusted: bool = False, gold_unit: str = "") -> Formula | None:
    """Read a formula behind which a unit may stand; sums, products, limits and integrals are read by math-verify."""
    body = split_known_unit(text, trusted=trusted, gold_unit=gold_unit)[0]
    formula = read_formula(body)
    if formula is None and _LIMITS.search(body):
        value = read(body)
        if isinstance(value, sympy.Expr):
            value = value.doit()
            return Formula(value, value.has(sympy.Float))
    return formula
