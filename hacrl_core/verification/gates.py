r"""Decide what may be compared symbolically.

A gate only saves the time until a worker's deadline; safety comes from the deadline and the memory limit. An answer
that a gate stops was already compared as text and as a number. Its verdict is ``unparseable``.
"""

import re

MAX_NESTING = 24
MAX_DIGITS = 300
MAX_TOWER = 1000
MAX_EXPONENT_DIGITS = 5

_POWER = re.compile(r"\^\s*(\{|\(|-?[\d.]+)")
_FACTORIAL = re.compile(r"(\d{5,}|[!)}\]])\s*!")
_HUGE_CHOICE = re.compile(r"\\binom\s*\{[^{}]*\d{6,}|\d{6,}\s*\\choose")
_LONG_LOOP = re.compile(r"\\(?:sum|prod)[^A-Za-z].{0,60}?(?:\d{6,}|10\s*\^)")
_CHAINED = re.compile(r"\d\s*\^\s*(?:\{\d+\}|\d+)\s*\^")
_LONG_EXPONENT = re.compile(rf"\d{{{MAX_EXPONENT_DIGITS + 1},}}")
_NUMERIC_POWER = re.compile(r"(\d+(?:\.\d+)?)\s*\)*\^\s*[{(]*\s*(\d+)")


def gate(text: str, max_chars: int) -> str:
    """Return why ``text`` must not be compared symbolically, or an empty text if it may."""
    if len(text) > max_chars:
        return f"longer than {max_chars} characters"
    if _nesting(text) > MAX_NESTING:
        return f"nested deeper than {MAX_NESTING}"
    if re.search(rf"\d{{{MAX_DIGITS},}}", text):
        return f"a number of {MAX_DIGITS} digits"
    if _HUGE_CHOICE.search(text) or _LONG_LOOP.search(text):
        return "a sum, product or binomial over a huge range"
    return _factorials(text) or _exponents(text)


def _nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        if char in "({[":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")}]":
            depth -= 1
    return deepest


def _factorials(text: str) -> str:
    for match in _FACTORIAL.finditer(text):
        last = match[1][-1]
        group = _group_before(text, match.start()) if last in ")}]" else ""
        if last == "!" or last.isdigit() or "!" in group or "^" in group or re.search(r"\d{5}", group):
            return "a factorial of a factorial or of a huge number"
    return ""


def _group_before(text: str, closing: int) -> str:
    depth = 0
    for position in range(closing, -1, -1):
        if text[position] in ")}]":
            depth += 1
        elif text[position] in "({[":
            depth -= 1
            if depth == 0:
                return text[position:closing]
    return text[:closing]


def _exponents(text: str) -> str:
    if _CHAINED.search(text):
        return "a tower of powers"
    chain = 1
    for match in _POWER.finditer(text):
        exponent = _group(text, match.end() - 1) if match[1] in "{(" else match[1]
        if _LONG_EXPONENT.search(exponent):
            return f"an exponent of more than {MAX_EXPONENT_DIGITS} digits"
        if exponent.count("^") > 1 and not re.search("[A-Za-z]", exponent):
            return "a tower of powers"
        for base, power in _NUMERIC_POWER.findall(exponent):
            if (float(base) > 1 and len(power) > 3) or _tower(float(base), int(power[:4])) > MAX_TOWER:
                return "a tower of powers"
        if text[: match.start()].rstrip().endswith((")", "}")) and exponent.strip("{}() ").isdigit():
            chain *= max(1, int(exponent.strip("{}() ")[:9]))
            if chain > 10**6:
                return "a chain of powers"
    return ""


def _tower(base: float, power: int) -> float:
    try:
        return base**power
    except OverflowError:
        return float("inf")


def _group(text: str, opening: int) -> str:
    depth = 0
    for position in range(opening, len(text)):
        if text[position] in "{(":
            depth += 1
        elif text[position] in "})":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : position]
    return text[opening + 1 :]
