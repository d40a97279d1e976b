r"""What the ``strict`` verifier decides by text and exact numbers alone: numbers with their unit, percent and base."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from hacrl_core.verification.normalise import clean, text_key
from hacrl_core.verification.numbers import ROUNDING, Number, agree, comma_decimal, is_finite_decimal, parse_number
from hacrl_core.verification.units import split_known_unit

_CURRENCIES = (
    ("usd", re.compile(r"\\\$|\\text\s*\{\s*\$")),
    ("eur", re.compile("€")),
    ("gbp", re.compile(r"£|\\pounds")),
)
_DOLLAR_FIRST = re.compile(r"^\s*-?\s*\$\s*\d[\d,.]*\s*$")
_BASE = re.compile(r"(-?)\s*(?:\\text\s*\{\s*)?([0-9A-Za-z]{1,60})\s*\}?\s*_\s*(?:\{\s*(\d{1,2})\s*\}|(\d{1,2})\b)")
_BASE_WORD = re.compile(r"_\s*\{\s*(?:\\text\s*\{\s*)?(two|eight|ten|sixteen)\s*\}?\s*\}")
_WORD_BASES = {"two": 2, "eight": 8, "ten": 10, "sixteen": 16}
_NAMED = re.compile(
    r"^((?:[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|angle\s*[A-Z]{1,3}))"
    r"(?:\s*_\s*(?:\{[^{}]*\}|\w))?'*(?:\s*\([A-Za-z]\))?)\s*(?:=|\\approx)(?![=<>])([^=<>]+)$",
    re.DOTALL,
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ|°|\\degree|\bdegrees?\b")
_PI = re.compile(r"\\pi(?![A-Za-z])|π")
# Words in a name or a subscript that say that it is not the answer.
_DENIAL = re.compile(r"not|wrong|false|fake|incorrect|guess|bad|error|never|twice|half", re.IGNORECASE)
_IMPROPER_MIXED = re.compile(r"\d\s*\\frac\{(\d+)\}\{(\d+)\}|\d (\d+)/(\d+)")
_WORD = re.compile(r"[A-Za-z][A-Za-z' -]+")
_REAL_WORD = re.compile(r"[A-Za-z]{3}")
_LABELS = frozenset(["yes", "no", "true", "false", "even", "odd", "none", "both"])
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?\s*(?:\\text\s*\{\s*)?([AaPp])?\.?\s*(?:[Mm])?\.?\s*\}?")


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer as a number with its unit, base and name; ``number`` is None where it is no number."""

    number: Number | None
    unit: str
    base: int
    name: str


def currency(text: str) -> str:
    r"""Return the currency that the text names by a sign: ``\$5`` is ``usd``; empty when there is none."""
    if _DOLLAR_FIRST.match(text):
        return "usd"
    return next((name for name, sign in _CURRENCIES if sign.search(text)), "")


@lru_cache(maxsize=65536)
def read_quantity(text: str, trusted: bool = False, gold_unit: str = "") -> Reading:
    r"""Read an answer as a number with its unit, base and name: ``x = 5\text{ cm}``, ``42_8``, ``\$5``."""
    body = clean(text.replace("€", "").replace("£", "").replace("\\pounds", ""))
    name, unit = "", currency(text)
    if (named := _NAMED.match(body)) and not denies(named[1]):
        name, body = named[1].replace(" ", ""), named[2].strip()
    if not unit:
        body, unit = split_known_unit(body, trusted=trusted, gold_unit=gold_unit)
    based = _in_base(body)
    if based is not None:
        return Reading(Number(Fraction(based[0]), True), unit, based[1], name)
    number = None if _ambiguous(body) else parse_number(body)
    return Reading(number, unit, 0, name)


def denies(name: str) -> bool:
    """Return whether a name says that its value is not the answer: ``x_{wrong}``."""
    return bool(_DENIAL.search(name))


def _ambiguous(body: str) -> bool:
    """Return whether brackets hold a comma or a percentage, or a whole number stands before an improper fraction."""
    if ("," in body and body[:1] in ("(", "[", "{")) or re.search(r"%\s*[)}]", body):
        return True
    mixed = _IMPROPER_MIXED.search(body)
    return bool(mixed) and int(mixed[1] or mixed[3]) >= int(mixed[2] or mixed[4])  # type: ignore[index]


def _in_base(body: str) -> tuple[int, int] | None:
    """Return value and base of ``42_8``; None when there is no subscript of a base or a digit does not fit."""
    body = _BASE_WORD.sub(lambda match: f"_{{{_WORD_BASES[match[1]]}}}", body)
    match = _BASE.fullmatch(body.strip())
    if not match or (not match[2][0].isdigit() and not match[2].isupper()):
        return None
    base = int(match[3] or match[4])
    if not 2 <= base <= 36:
        return None
    try:
        value = int(match[2], base)
    except ValueError:
        return None
    return (-value if match[1] else value), base


def decide(gold: str, answer: str, tolerance: float) -> bool | None:
    """Return True or False when text or exact arithmetic settles it, None when structure or symbols must."""
    money = currency(gold), currency(answer)
    if all(money) and money[0] != money[1]:
        return False
    if _PI.search(gold) and _DEGREES.search(answer) and not _DEGREES.search(gold):
        # Where a gold has pi its angle is in radians.
        return False
    if strict_key(gold) == strict_key(answer):
        return True
    known = read_quantity(gold, True)
    other = read_quantity(answer, False, known.unit)
    if known.number is None or other.number is None:
        if (clock := _clock(gold)) is not None and clock == _clock(answer):
            return True
        return _comma_decimals(gold, answer, tolerance) or None
    if known.name and other.name and known.name != other.name:
        return None
    if known.unit and other.unit and known.unit != other.unit:
        return False
    if (known.base or 10) != (other.base or 10) and (known.base or 10) != 10:
        # The gold names the base that was asked for.
        return False
    return _same_value(known, other, tolerance) or _comma_decimals(gold, answer, tolerance)


def _comma_decimals(gold: str, answer: str, tolerance: float) -> bool:
    """Return whether an answer with a decimal comma equals a gold with a point; a comma in a gold makes a list."""
    comma = comma_decimal(answer.strip(" $"))
    known = parse_number(gold.strip(" $")) if comma and "." in gold else None
    value = parse_number(comma) if comma and known else None
    return bool(known and value and agree(known, value, tolerance))


def _same_value(gold: Reading, answer: Reading, tolerance: float) -> bool:
    """Compare values; the percent sign of a gold may be left out, one that the gold has not divides by 100."""
    known, other = gold.number, answer.number
    assert known is not None
    assert other is not None
    if known.exact and (other.exact or (tolerance <= ROUNDING and is_finite_decimal(known.value))):
        tolerance = 0.0
    if known.percent == other.percent:
        return agree(known, other, tolerance)
    if other.percent:
        return not gold.unit and agree(known, _hundredth(other), tolerance)
    if answer.unit:
        return False
    return agree(known, other, tolerance) or agree(_hundredth(known), other, tolerance)


def _hundredth(number: Number) -> Number:
    return replace(number, value=number.value / 100, step=number.step and number.step / 100)


@lru_cache(maxsize=8192)
def strict_key(text: str) -> str:
    """Return a key that equal texts share; case counts for names and variables, not for words."""
    key = text_key(text)
    plain = clean(text)
    if not _WORD.fullmatch(key):
        return key
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", plain).strip()
    is_word = _REAL_WORD.search(words) and ("\\text" in plain or len(words) > 4)
    is_word = is_word or words.casefold() in _LABELS
    return words.casefold() if is_word else words


def _clock(text: str) -> int | None:
    match = _CLOCK.fullmatch(clean(text))
    if not match or int(match[1]) > 24 or int(match[2]) > 59 or not (match[4] or int(match[1]) > 12):
        # Without a.m. or p.m. a small hour may be a ratio.
        return None
    hour = int(match[1]) % 12 + (12 if match[4] in "Pp" else 0) if match[4] else int(match[1])
    return hour * 3600 + int(match[2]) * 60 + int(match[3] or 0)
