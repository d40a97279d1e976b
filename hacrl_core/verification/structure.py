r"""The shape of an answer, read from its text: list, set, tuple, interval, union, relation, matrix or formula."""

import re
from dataclasses import dataclass
from functools import lru_cache

_OPENING = re.compile(r"\\begin\s*\{\w+\*?\}|\\\{|\\langle|\\lfloor|\\lceil|[({\[]")
_CLOSING = re.compile(r"\\end\s*\{\w+\*?\}|\\\}|\\rangle|\\rfloor|\\rceil|[)}\]]")
_COMMA = re.compile(r"[,;]")
_RELATION = re.compile(r"\\(?:leq?|geq?|lt|gt|neq?|approx|equiv|in|to|subset(?:eq)?|sim)(?![A-Za-z])|[<>!]=|[=<>]")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_MINUS = re.compile(r"\\(?:setminus|backslash)(?![A-Za-z])")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_RATIO = re.compile(":")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_MATRIX = re.compile(r"\\begin\s*\{([pbvBV]?matrix|array)\}(?:\s*\{[clr| ]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_SPELLING = {
    "\\leq": "\\le", "\\geq": "\\ge", "\\lt": "<", "\\gt": ">", "\\neq": "\\ne", "<=": "\\le", ">=": "\\ge",
    "!=": "\\ne",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """One level of an answer's shape. ``kind`` says what the parts are; a formula has its text and no parts."""

    kind: str
    text: str
    parts: tuple["Node", ...] = ()
    signs: tuple[str, ...] = ()
    """Relations between the parts of a chain, or the brackets of a group."""


@lru_cache(maxsize=4096)
def read_shape(text: str, bracketed: bool = False) -> Node:
    """Read the shape of an answer; between brackets a comma is never part of a number."""
    text = text.strip()
    items = _split(text, _COMMA, keep=() if bracketed else _THOUSANDS.finditer(text))[0]
    if len(items) > 1 and all(item.strip() for item in items):
        return Node("list", text, tuple(read_shape(item, bracketed) for item in items))
    members, signs = _split(text, _RELATION)
    if len(members) > 1:
        return Node(
            "chain", text, tuple(read_shape(m, bracketed) for m in members), tuple(_SPELLING.get(s, s) for s in signs)
        )
    for kind, separator in (("union", _UNION), ("minus", _MINUS), ("ratio", _RATIO)):
        parts = _split(text, separator)[0]
        if len(parts) > 1:
            return Node(kind, text, tuple(read_shape(part, bracketed) for part in parts))
    if len(_split(text, _PLUS_MINUS)[0]) == 2:
        both = [_PLUS_MINUS.sub(sign, text).replace("\\mp", other) for sign, other in (("+", "-"), ("-", "+"))]
        return Node("list", text, tuple(read_shape(one, bracketed) for one in both))
    return _read_group(text) or Node("formula", text)


def _read_group(text: str) -> Node | None:
    """Return a matrix, or what stands in one pair of brackets with commas or in braces; None for a formula."""
    if match := _MATRIX.fullmatch(text):
        rows = [row for row in re.split(r"\\\\", match[2]) if row.strip()]
        parts = tuple(
            Node("row", row, tuple(read_shape(cell, True) for cell in re.split(r"(?<!\\)&", row))) for row in rows
        )
        return Node("matrix", text, parts, ("|" if match[1] in ("vmatrix", "Vmatrix") else "",))
    for left, kind in (("\\{", "set"), ("\\langle", "vector"), ("(", "tuple"), ("[", "tuple"), ("{", "set")):
        if not text.startswith(left):
            continue
        right = _matching(text)
        if right is None:
            return None
        start, end = right
        if end != len(text):
            return None
        inner = read_shape(text[len(left) : start], True)
        if inner.kind == "matrix":
            return inner
        if inner.kind == "list":
            return Node(kind, text, inner.parts, (left, text[start:end]))
        return Node("set", text, (inner,), (left, text[start:end])) if left == "\\{" and inner.text else None
    return None


def _matching(text: str) -> tuple[int, int] | None:
    """Return where the first bracket of ``text`` is closed; brackets of different kinds close each other."""
    for start, end, depth in _brackets(text):
        if depth == 0:
            return start, end
    return None


def _brackets(text: str) -> list[tuple[int, int, int]]:
    """Return (start, end, depth after it) of every bracket."""
    found, depth = [], 0
    tokens = sorted(
        [(m.start(), m.end(), 1) for m in _OPENING.finditer(text)]
        + [(m.start(), m.end(), -1) for m in _CLOSING.finditer(text)]
    )
    last = 0
    for start, end, step in tokens:
        if start < last:
            # The brace of "\{" or "\begin{" again.
            continue
        depth += step
        last = end
        found.append((start, end, depth))
    return found


def _split(text: str, separator: re.Pattern[str], keep: object = ()) -> tuple[list[str], list[str]]:
    """Split at separators outside all brackets, but for those within the matches of ``keep``."""
    kept = [match.span() for match in keep]  # type: ignore[attr-defined]
    brackets = _brackets(text)
    parts, found = [], []
    begin = place = depth = 0
    for match in separator.finditer(text):
        while place < len(brackets) and brackets[place][0] <= match.start():
            depth = brackets[place][2]
            place += 1
        inside = any(start <= match.start() < end for start, end in kept)
        if depth == 0 and not inside:
            parts.append(text[begin : match.start()])
            found.append(match.group())
            begin = match.end()
    parts.append(text[begin:])
    return parts, found
