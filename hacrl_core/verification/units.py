r"""Units from a known list. Letters that may be variables are never a unit by themselves: ``3 i``, ``2 x``, ``10m``."""

import re
from functools import lru_cache

_LENGTHS = {
    "cm": "cm", "centimeter": "cm", "centimetre": "cm", "m": "m", "meter": "m", "metre": "m", "km": "km",
    "kilometer": "km", "kilometre": "km", "mm": "mm", "millimeter": "mm", "millimetre": "mm", "in": "in", "inch": "in",
    "inche": "in", "ft": "ft", "feet": "ft", "foot": "ft", "yd": "yd", "yard": "yd", "mi": "mi", "mile": "mi",
    "unit": "unit", "Km": "km",
}  # fmt: skip
_OTHERS = {
    "s": "s", "sec": "s", "second": "s", "min": "min", "minute": "min", "h": "h", "hr": "h", "hour": "h", "g": "g",
    "gram": "g", "kg": "kg", "kilogram": "kg", "mg": "mg", "milligram": "mg", "lb": "lb", "pound": "lb", "oz": "oz",
    "ounce": "oz", "l": "l", "L": "l", "liter": "l", "litre": "l", "ml": "ml", "mL": "ml", "milliliter": "ml",
    "millilitre": "ml", "gal": "gal", "gallon": "gal", "degree": "deg", "radian": "rad", "rad": "rad",
    "dollar": "usd", "USD": "usd", "usd": "usd", "cent": "cent", "euro": "eur", "EUR": "eur", "GBP": "gbp",
    "day": "day", "week": "week", "month": "month", "year": "year", "yr": "year", "acre": "acre", "N": "N",
    "newton": "N", "J": "J", "joule": "J", "W": "W", "watt": "W", "Hz": "Hz", "hertz": "Hz", "K": "K", "kelvin": "K",
    "ton": "ton", "tonne": "ton", "dozen": "dozen", "quart": "quart", "pint": "pint", "cup": "cup", "ways": "ways",
    "mph": "mi/h", "kph": "km/h", "Kg": "kg",
}  # fmt: skip
_COUNTED = (
    "apple ball book box boy candy car card cat chair chicken child children coin color cookie cow cube customer "
    "digit dog egg employee face factor flower friend game girl hat integer item kid line marble member men mile "
    "number orange page pair parent passenger pen pencil people person piece player plant point problem question round "
    "sheep shirt side solution square step student subset tile time toy tree triangle trip value vertex vertices "
    "way win women word worker zero"
)  # fmt: skip
# Plain letters that nobody writes as a product of variables; other short names need \text{} or a gold with that unit.
_PLAIN_SHORT = frozenset(["cm", "mm", "km", "kg", "mg", "ml", "mL", "ft", "lb", "oz", "mph", "kph", "Hz"])
# Names that also say how many: 5 dozen are 60, 5 K may be 5000. They count only where the gold has them.
_SAY_HOW_MANY = frozenset(["dozen", "K"])
# Unlike "5 squares" these may be powers.
_MAY_BE_POWERS = frozenset(["square", "cube"])
_QUALIFIES = re.compile(
    r"\b(?:or|and|not|no|more|less|fewer|than|at|least|most|about|over|under|up|to)\b", re.IGNORECASE
)
_POWER = re.compile(r"\s*\^\s*\{?\s*([23])\s*\}?$")
_PREFIX = re.compile(r"(square|sq\.?|cubic|cu\.?)\s+", re.IGNORECASE)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_TRAILING_TEXT = re.compile(
    r"^(?P<head>.*?[\d})\]!.a-z])\s*(?P<unit>\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?\s*\d\s*\}?)?"
    r"(?:\s*/\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?\s*\d\s*\}?)?)?)\s*$",
    re.DOTALL,
)
_TRAILING_WORDS = re.compile(
    r"^(?P<head>.*?[\d})!])\s*"
    r"(?P<unit>[A-Za-z][A-Za-z./ ]*(?:\^\s*\{?[23]\}?)?(?:/[A-Za-z]+(?:\^\s*\{?[23]\}?)?)?)\s*$",
    re.DOTALL,
)
_DEGREE = re.compile(r"^(?P<head>.*?[\d})])\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*$", re.DOTALL)
_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")


@lru_cache(maxsize=8192)
def unit_name(text: str) -> str:
    r"""Return the canonical name of a known unit (``square feet`` is ``ft^2``); empty when it is none."""
    text = _TEXT.sub(r"\1", text).strip()
    parts = re.split(r"\s*/\s*|\s+per\s+|\s+an?\s+(?=hour|minute|second|day|week|month|year)", text)
    if not 1 <= len(parts) <= 2:
        return ""
    names = [_simple(part) for part in parts]
    return "/".join(names) if all(names) else ""


def _simple(text: str) -> str:
    text = text.strip().strip(".").strip()
    power = ""
    if match := _POWER.search(text):
        text, power = text[: match.start()].strip(), match[1]
    if match := _PREFIX.match(text):
        if power:
            return ""
        text, power = text[match.end() :].strip(), "2" if match[1][0].lower() == "s" else "3"
    text = text.strip(".")
    for form in (text, text.casefold() if len(text) > 2 else text):
        for name in _singular(form):
            if name in _LENGTHS:
                return _LENGTHS[name] + (f"^{power}" if power else "")
            if not power and name in _OTHERS:
                return _OTHERS[name]
            if not power and len(name) > 2 and name in _COUNTED.split() and form not in _MAY_BE_POWERS:
                return name
    return ""


def _singular(word: str) -> list[str]:
    """Return a word and what it may be the plural of: ``ms`` are milliseconds and no metres."""
    return [word, *(word.removesuffix(end) for end in ("s", "es") if len(word) > len(end) + 1)]


def _own_name(words: str) -> str:
    """Return the name of a unit that the list does not know; in short ones case matters, ``mW`` is not ``MW``."""
    return words if len(words) <= 3 and words.casefold() not in ("am", "pm") else words.casefold()


def split_known_unit(text: str, *, trusted: bool = False, gold_unit: str = "") -> tuple[str, str]:
    r"""Split ``15\text{ cm}^2`` into ``("15", "cm^2")``; the unit is empty where none is written.

    A gold is ``trusted``: what stands in ``\text{}`` behind its value is its unit even if the list does not know it.
    Plain letters count only as a word or as a name that nobody uses for variables, or when they are ``gold_unit``.
    """
    if (match := _DEGREE.match(text)) and not _TRIG.search(text):
        return match["head"].strip(), "deg"
    if match := _TRAILING_TEXT.match(text):
        name = unit_name(match["unit"])
        words = _TEXT.sub(r"\1", match["unit"]).strip()
        if not name and re.fullmatch(r"[A-Za-z. -]+", words) and (trusted or _own_name(words) == gold_unit):
            name = "" if _QUALIFIES.search(words) else _own_name(words)
        known = name and (trusted or name == gold_unit or name not in _SAY_HOW_MANY)
        return (match["head"].strip().rstrip(","), name) if known else (text, "")
    if match := _TRAILING_WORDS.match(text):
        name, words = unit_name(match["unit"]), match["unit"].strip()
        first = re.match(r"[A-Za-z]+", words)
        counts = first and (len(first[0]) > 3 or first[0] in _PLAIN_SHORT) and (trusted or name not in _SAY_HOW_MANY)
        if name and (counts or name == gold_unit):
            return match["head"].strip().rstrip(","), name
    return text, ""
