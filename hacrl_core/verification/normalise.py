r"""One spelling for answers that are the same text: LaTeX variants, spacing, currency, units, thousands.

Nothing here changes what an answer means to a reader. Every step is linear in the text.
"""

import re
from functools import lru_cache

# The comma of 14{,}916 with spaces around it.
_LOOSE_THOUSANDS = re.compile(r"(\d) ?\{ ?, ?\} ?(?=\d{3}(?!\d))")
_SIMPLE = (
    ("\u2212", "-"), ("\u2013", "-"), ("\u00d7", r"\times "), ("\u00b7", r"\cdot "), ("\u00f7", "/"),
    ("\u03c0", r"\pi "), ("\u221e", r"\infty "),
    ("\u2264", r"\le "), ("\u2265", r"\ge "), ("\u00b0", r"^\circ "), ("\u00a0", " "),
    ("\u00b2", "^2"), ("\u00b3", "^3"),
    (r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\cfrac", r"\frac"), (r"\rac{", r"\frac{"),
    (r"\leqslant", r"\le "), (r"\geqslant", r"\ge "), (r"\displaystyle", ""), (r"\limits", ""),
    (r"\textrm", r"\text"), (r"\textnormal", r"\text"), (r"\mbox", r"\text"), (r"\textbf", r"\text"),
    (r"\textit", r"\text"), (r"\bf ", ""), (r"\degree", r"^\circ"), ("{,}", ","),
)  # fmt: skip
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")
_LEFT_RIGHT = re.compile(r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big)(?![a-z])\s*\.?")
_THIN = re.compile(r"(?<!\\)\\!\s*|(?<!\\)\\[,:;>]|~|\\(?:q?quad|hspace\{[^{}]*\}|phantom\{[^{}]*\})|(?<!\\)\\(?=\s|$)")
_FRACTION_DIGITS = re.compile(r"\\frac\s*(\d)\s*(\d)")
_FRACTION_HALF = re.compile(r"\\frac\s*(\d)\s*\{")
_FRACTION_TAIL = re.compile(r"\\frac\s*\{([^{}]*)\}\s*(\d)")
_SQRT_DIGIT = re.compile(r"\\sqrt\s*(\d)")
_CONSTANT = re.compile(r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}")
# After a digit a letter in roman type is a unit, elsewhere a variable or a choice.
_ONE_LETTER = re.compile(r"(?<!\d)(?<!\d )\\(?:mathrm|mathit|mathbf|text|operatorname)\s*\{\s*([A-Za-z])\s*\}")
_FONT = re.compile(r"\\(?:mathrm|mathit|mathbf|mathsf)\s*\{")
_LIST_WORD = re.compile(r"\s*,?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![a-z]))\s*")
_CURRENCY = re.compile(r"^\s*(-?)\s*(?:\\?\$|€|£|\\text\s*\{\s*\\?\$\s*\})\s*(?=[\d.])")
_DEGREE = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*")
_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_TRAILING_TEXT = re.compile(r"^(?P<head>.*?)\\text\s*\{(?P<unit>[^{}]*)\}\s*(?P<power>\^\s*\{?\d\}?)?\s*$", re.DOTALL)
_TRAILING_WORDS = re.compile(
    r"^(?P<head>.*?[\d}).!])(?P<unit>\s+[A-Za-z][A-Za-z./ ]*|\s*[A-Za-z]{3,}[A-Za-z ]*)(?P<power>\^\s*\{?\d\}?)?\s*$",
    re.DOTALL,
)
_SPACE = re.compile(r"\s+")
_LOOSE_SPACE = re.compile(r"(?<!\d) | (?!\d)")
_ZERO_POINT = re.compile(r"(?<![\d.])\.(?=\d)")
_WRAPPED_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_BRACED_ATOM = re.compile(r"([\^_])\{(\w)\}")


@lru_cache(maxsize=8192)
def clean(text: str) -> str:
    """Rewrite LaTeX in one dialect, which the number parser and the symbolic parser read."""
    if "\\\\begin" in text:
        text = text.replace("\\\\", "\\")
    for old, new in _SIMPLE:
        if old in text:
            text = text.replace(old, new)
    if "\\begin" not in text:
        text = _DOUBLED.sub("\\\\", text)
    text = _LOOSE_THOUSANDS.sub(r"\1,", text.strip().strip("$").strip())
    if text.startswith(("\\(", "\\[")) and text.endswith(("\\)", "\\]")):
        text = text[2:-2].strip()
    text = _CURRENCY.sub(r"\1", text).replace("\\$", "").replace("$", "")
    text = _LEFT_RIGHT.sub("", text)
    text = _THIN.sub(lambda match: "" if match.group()[:2] == "\\!" else " ", text)
    text = _ONE_LETTER.sub(r"\1", _CONSTANT.sub(r"\1", text))
    text = _FONT.sub(r"\\text{", text)
    text = _FRACTION_DIGITS.sub(r"\\frac{\1}{\2}", text)
    text = _FRACTION_HALF.sub(r"\\frac{\1}{", text)
    text = _FRACTION_TAIL.sub(r"\\frac{\1}{\2}", text)
    text = _SQRT_DIGIT.sub(r"\\sqrt{\1}", text)
    text = _ZERO_POINT.sub("0.", text)
    text = text.replace("**", "^")
    text = _SPACE.sub(" ", text).strip()
    return text.rstrip(" .,;") if not text.endswith("\\,") else text


def without_degree(text: str) -> str:
    """Read ``90^\\circ`` as 90; beside a trigonometric function the degree is a factor."""
    if "circ" not in text or "\\circ" not in text:
        return text
    return _DEGREE.sub(r" \\cdot \\frac{\\pi}{180} ", text) if _TRIG.search(text) else _DEGREE.sub(" ", text).strip()


def split_unit(text: str) -> tuple[str, str]:
    """Split ``15\\text{ cm}^2`` into ``("15", "cm^2")``.

    Letters glued to a number are a product of variables unless they are a word.
    """
    match = _TRAILING_TEXT.match(text) or _TRAILING_WORDS.match(text)
    if not match or not match["head"].strip() or not any(char.isdigit() for char in match["head"]):
        return text, ""
    power = re.sub(r"[\s^{}]", "", match["power"] or "")
    unit = match["unit"].strip() + (f"^{power}" if power else "")
    if re.fullmatch(r",?\s*(?:and|or)\b.*", unit):
        return text, ""
    return match["head"].strip().rstrip(","), unit


def list_words(text: str) -> str:
    """Turn ``6 \\text{ and } 8`` into ``6, 8``."""
    return _LIST_WORD.sub(", ", text).strip(", ")


@lru_cache(maxsize=8192)
def text_key(text: str) -> str:
    """Return a key that equal texts share. A space between digits stays: ``1 1/2`` is not ``11/2``."""
    text = list_words(without_degree(clean(text)))
    text = _WRAPPED_TEXT.sub(r"\1", text)
    text = _LOOSE_SPACE.sub("", _SPACE.sub(" ", text)).strip()
    text = _BRACED_ATOM.sub(r"\1\2", text)
    text = text.replace("\\leq", "\\le").replace("\\geq", "\\ge").replace("\\%", "%")
    if re.fullmatch(r"\([A-Za-z]\)", text):
        text = text[1:-1]
    return text.casefold() if len(text) > 1 and re.fullmatch(r"[A-Za-z][A-Za-z' -]+", text) else text


_UNIT_ALIASES = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "millimetre": "mm", "inche": "in", "inch": "in", "feet": "ft", "foot": "ft", "yard": "yd",
    "mile": "mi", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "gram": "g", "kilogram": "kg",
    "pound": "lb", "ounce": "oz", "liter": "l", "litre": "l", "degree": "deg", "dollar": "usd", "cent": "cent",
    "day": "day", "week": "week", "month": "month", "year": "year", "yr": "year", "gallon": "gal", "mph": "mi/h",
    "miles per hour": "mi/h",
}  # fmt: skip
_KNOWN_UNITS = frozenset(_UNIT_ALIASES.values()) | {
    "cm^2",
    "cm^3",
    "m^2",
    "m^3",
    "ft^2",
    "in^2",
    "km^2",
    "mi^2",
    "in^3",
    "ft^3",
}


def unit_key(unit: str) -> str:
    """Return the canonical name of a unit, empty when it is unknown; known units that differ are different answers."""
    unit = unit.replace(".", "").strip()
    for word, power in (("square ", "^2"), ("sq ", "^2"), ("cubic ", "^3"), ("cu ", "^3")):
        if unit.casefold().startswith(word):
            unit = unit[len(word) :] + power
    base, caret, power = unit.partition("^")
    base = base.strip()
    name = base if len(base) <= 2 else base.casefold()
    name = _UNIT_ALIASES.get(name) or _UNIT_ALIASES.get(name.removesuffix("s")) or name
    key = name + caret + power
    return key if key in _KNOWN_UNITS else ""
