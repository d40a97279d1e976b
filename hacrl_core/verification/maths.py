r"""The maths verifier in this process: decide what text and exact numbers can decide, leave the rest to a worker."""

import re
from dataclasses import dataclass
from functools import lru_cache

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.place import module
from hacrl_core.verification.extraction import extract_answer, extract_gold, has_prose
from hacrl_core.verification.gates import gate
from hacrl_core.verification.normalise import clean, list_words, split_unit, text_key, unit_key, without_degree
from hacrl_core.verification.numbers import Number, close, comma_decimal, parse_number, same_number
from hacrl_core.verification.verdict import Judgement, VerdictKind

_SEVERAL = re.compile(r"[,;]|\\pm|\band\b|\bor\b|\\text\{\s*(?:and|or)\s*\}")
_WORDS = re.compile(r"(?:\\text\{)?[A-Za-z][A-Za-z '.-]*\}?")
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?\s*(?:\\text\s*\{\s*)?([AaPp])?\.?\s*(?:[Mm])?\.?\s*\}?")
_FUNCTION = re.compile(
    r"^[A-Za-z](?:_\{?\w+\}?)?\s*\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\)\s*=(?![=<>])(.+)$", re.DOTALL
)
_NAMED = re.compile(
    r"^((?:[A-Za-z]|\\(?!(?:sin|cos|tan|cot|sec|csc|arc\w+|ln|log|exp|frac|sqrt|text)\b)[A-Za-z]+)"
    r"(?:\s*_\s*(?:\{[^{}]*\}|\w))?'*(?:\s*\([A-Za-z, ]{1,9}\))?)\s*(?:=|\\approx)(?![=<>])([^=<>]+)$",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """An answer read as a number with its unit and name; ``number`` is None where it is no number."""

    number: Number | None
    unit: str
    name: str


@lru_cache(maxsize=65536)
def quantity(text: str) -> Quantity:
    """Read an answer as a number with the name and the unit it carries: ``x = 5\\text{ cm}``."""
    body = without_degree(clean(text))
    named = _NAMED.match(body)
    name = ""
    if named:
        name, body = named[1].replace(" ", ""), named[2].strip()
    number = parse_number(body)
    if number is not None:
        return Quantity(number, "", name)
    head, unit = split_unit(body)
    return Quantity(parse_number(head) if unit else None, unit, name)


def quick_decision(gold: str, answer: str, tolerance: float) -> bool | None:
    """Return True or False when text or exact arithmetic settles it, None when only a symbolic comparison can."""
    if text_key(gold) == text_key(answer):
        return True
    known, other = quantity(gold), quantity(answer)
    if known.number is not None and other.number is None and known.unit:
        # The gold names its unit, so the same letters glued to the answer's number are that unit and no variables.
        other = quantity(re.sub(rf"\s*{re.escape(known.unit)}\s*$", "", clean(answer)))
    if known.number is not None and other.number is not None:
        if known.name and other.name and known.name != other.name:
            return None
        units = unit_key(known.unit), unit_key(other.unit)
        if all(units) and units[0] != units[1]:
            return False
        return same_number(known.number, other.number, tolerance) or _comma_decimals(gold, answer, tolerance)
    if _comma_decimals(gold, answer, tolerance) or ((clock := _clock(gold)) is not None and clock == _clock(answer)):
        return True
    if known.number is not None and _WORDS.fullmatch(clean(answer)):
        return False
    return None


def _comma_decimals(gold: str, answer: str, tolerance: float) -> bool:
    """Return whether a decimal comma on one side equals a decimal point on the other.

    This is evidence for equality only: ``1,2`` may be a list.
    """
    for one, other in ((gold, answer), (answer, gold)):
        comma = comma_decimal(one.strip(" $"))
        number = parse_number(other.strip(" $")) if comma and "." in other else None
        value = parse_number(comma) if comma and number else None
        if number and value and close(number.value, value.value, tolerance):
            return True
    return False


def _clock(text: str) -> int | None:
    match = _CLOCK.fullmatch(clean(text))
    if not match or int(match[1]) > 24 or int(match[2]) > 59:
        return None
    hour = int(match[1])
    if match[4]:
        hour = hour % 12 + (12 if match[4] in "Pp" else 0)
    return hour * 3600 + int(match[2]) * 60 + int(match[3] or 0)


def symbolic_pair(gold: str, answer: str) -> tuple[str, str]:
    """Return what the worker compares.

    Left-hand names are dropped where the gold's form allows it, units where the gold names one.
    """
    gold, answer = (without_degree(list_words(clean(text))) for text in (gold, answer))
    function, named = _FUNCTION.match(gold), _NAMED.match(gold)
    if function and ((other := _NAMED.match(answer)) or "=" not in answer):
        gold, answer = function[1].strip(), other[2].strip() if other else answer
    elif named and "=" not in answer and not _SEVERAL.search(gold):
        gold = named[2].strip()
    gold_head, gold_unit = split_unit(gold)
    head, unit = split_unit(answer)
    if gold_unit and unit and unit_key(gold_unit) and unit_key(unit) and unit_key(gold_unit) != unit_key(unit):
        return gold, answer
    keeps_letters = not gold_unit and re.search(r"(?<!\\)[A-Za-z]", gold)
    return gold_head if gold_unit else gold, head if unit and not keeps_letters else answer


class MathsVerifier:
    """Accept mathematically equal answers; symbolic comparison happens in a worker."""

    name = "math"
    task: str | None = f"{module('hacrl_core.verification.symbolic')}:compare"

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        """Decide by text and exact numbers, or ask for a worker."""
        found = extract_answer(response, config.places)
        if not found.answer:
            return Judgement(VerdictKind.UNPARSEABLE, "")
        target = extract_gold(gold)
        answer = found.joined if _has_parts(target) else found.answer
        if len(answer) > config.max_answer_chars:
            # The comparisons below are for answers of an answer's size; beyond it only the very same text is right.
            same = "".join(answer.split()) == "".join(target.split())
            return Judgement(VerdictKind.CORRECT if same else VerdictKind.UNPARSEABLE, answer)
        decision = quick_decision(target, answer, config.tolerance)
        if decision is None and answer != found.answer and quick_decision(target, found.answer, config.tolerance):
            decision, answer = True, found.answer
        if decision is not None:
            return Judgement(VerdictKind.CORRECT if decision else VerdictKind.INCORRECT, answer)
        if gate(answer, config.max_answer_chars):
            return Judgement(VerdictKind.UNPARSEABLE, answer)
        if gate(target, config.max_answer_chars) or has_prose(clean(target)):
            # Such a gold has no mathematical reading: only its own text is right.
            return Judgement(VerdictKind.INCORRECT, answer)
        return Judgement(None, answer)

    def payload(self, gold: str, answer: str) -> tuple[str, str]:
        """Return the pair of texts to send to a worker."""
        return symbolic_pair(extract_gold(gold), answer)


def _has_parts(gold: str) -> bool:
    return bool(_SEVERAL.search(clean(gold)))


def response_is_boxed(response: str) -> bool:
    """Return whether the response holds an answer in a complete box."""
    found = extract_answer(response, (), join=False)
    if found.boxed and not found.answer:  # the last box is empty: those before it may be part of the answer
        found = extract_answer(response, ())
    return found.boxed and bool(found.answer)
