r"""Find the answer in a response: the last complete ``\boxed{}`` after the last ``</think>``, then the fallbacks.

Everything here is linear in the length of the text, so it may run in the parent process on hostile input.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# The look-behind keeps a long run of backslashes from being searched from each of its places.
_BOX = re.compile(r"(?<!\\)\\+(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_FLAT_BOX = re.compile(_BOX.pattern + r"\{([^{}\\]*)\}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MAX_JOINED = 64
# An answer outside a box is looked for at the end only, which also bounds the search.
_FALLBACK_CHARS = 4000
_BARE_TOKEN = re.compile(r"-?[\w.]+")
PHRASE = re.compile(
    r"(?:final\s+answer|answer)(?:\s+to\s+[^.\n:]{1,80}?)?(?:\s*\*\*)?(?:\s+is(?:\s*:)?|\s*:|\s+should\s+be|\s*=)(?:\s*\*\*)?\s*",
    re.IGNORECASE,
)
HASHES = re.compile(r"####[ \t]*([^\n]{1,200})")
_MATH = re.compile(
    r"(?<!\\)\$\$(?P<dd>(?:[^$]|\\\$){1,1000}?)(?<!\\)\$\$"
    r"|\\\[(?P<br>.{1,1000}?)\\\]"
    r"|(?<![\\\d])\$(?P<d>(?:\\\$|[^$\n]){1,500}?)(?<!\\)\$"
    r"|\\\((?P<pa>[^\n]{1,500}?)\\\)",
    re.DOTALL,
)
_CONNECTIVE = re.compile(
    r"(?:\s|,|;|\$|\\[,;!()\[\]\s]|\\q?quad|\\text\{[^{}]{0,40}?\b(?:and|or)\s*\}|\band\b|\bor\b|[A-Za-z](?:_\{?\w{1,3}\}?)?\s*=)*",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?<![\w.])[$€£]?-?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|[1-9]\d{0,2}(?: \d{3})+(?!\d)|\d+(?:[.,]\d+)?(?:e-?\d+)?|\.\d+)"
    r"(?:/\d+)?(?:\s*(?:%|percent|pct))?"
)
_SEPARATOR = re.compile(r"[,;]|\band\b|\bor\b")
_WORD = re.compile(r"(?<![\\{A-Za-z_])[A-Za-z]{3,}(?:'[a-z]+)?")
_MATH_WORDS = frozenset(
    [
        "sqrt",
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "log",
        "exp",
        "inf",
        "infinity",
        "and",
        "pct",
        "percent",
        "frac",
        "cdot",
        "times",
        "circ",
    ]
)
_SENTENCE_END = re.compile(r"[.;!?](?:\s|$)|\n|\s+I hope\b|<\|")


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer found in a response."""

    answer: str
    """Empty when there is none."""
    joined: str
    """Adjacent boxes as one list, for a gold of several parts; otherwise the same as ``answer``."""
    boxed: bool
    """Whether the answer stood in a complete box."""
    place: str = "box"
    """Where it stood: in a box, or the fallback that found it."""


def after_thinking(text: str) -> str:
    """Return the part that the user sees; empty when the thinking never ended."""
    head, tag, tail = text.rpartition("</think>")
    if tag:
        return tail
    return "" if "<think>" in head + tail else text


def extract_answer(response: str, fallbacks: Sequence[str], *, join: bool = True) -> Extraction:
    """Extract the answer; ``join=False`` skips the search for neighbours of the last box."""
    text = after_thinking(response)
    if not join and (contents := _flat_boxes(text)):
        last = _inner(contents[-1])
        return Extraction(last, last, True)
    boxes = find_boxes(text)
    complete = [box for box in boxes if box[2]]
    if complete:
        last = _inner(text[complete[-1][0] : complete[-1][1]])
        return Extraction(last, _join(text, complete) if join else last, True)
    for fallback in fallbacks:
        if fallback == "unclosed_box":
            answer = _inner(text[boxes[-1][0] : boxes[-1][1]].rstrip(" $.\n")) if boxes else ""
        elif boxes and boxes[-1][1] >= len(text):
            # The response broke off inside its box: what stands before it is not the answer.
            answer = ""
        else:
            answer = _FALLBACKS[fallback](text[-_FALLBACK_CHARS:])
        if answer:
            return Extraction(answer, answer, False, fallback)
    return Extraction("", "", False, "")


def find_boxes(text: str) -> list[tuple[int, int, bool]]:
    """Return (start, end, complete) of the contents of every outermost box, in order."""
    if _flat_boxes(text) is None:
        return _find_nested_boxes(text)
    return [(match.start(1), match.end(1), True) for match in _FLAT_BOX.finditer(text)]


def _flat_boxes(text: str) -> list[str] | None:
    """Return the contents of the boxes where every brace is a box's and nothing inside could be one; otherwise None.

    So are most responses, and the search is the regular expression's alone.
    """
    found = _FLAT_BOX.findall(text)
    flat = text.count("{") == text.count("}") == len(found) == len(_BOX.findall(text))
    return found if flat else None


def _find_nested_boxes(text: str) -> list[tuple[int, int, bool]]:
    closing = _closing_braces(text)
    found: list[tuple[int, int, bool]] = []
    position = 0
    while match := _BOX.search(text, position):
        start = position = match.end()
        if text[start : start + 1] != "{":
            token = _BARE_TOKEN.match(text, start)
            if token:
                found.append((start, token.end(), True))
                position = token.end()
        elif start in closing:
            found.append((start + 1, closing[start], True))
            position = closing[start] + 1
        else:
            found.append((start + 1, len(text), False))
    if found and not found[-1][2]:
        # An escaped brace closes the last box where no other does: "\boxed{185\}".
        start, _, _ = found[-1]
        escaped = text.find("\\}", start)
        if escaped >= 0 and "{" not in text[start:escaped]:
            found[-1] = (start, escaped, True)
    return found


def _closing_braces(text: str) -> dict[int, int]:
    """Map every opening brace to its closing one, in one pass, because hostile text may open thousands."""
    closing: dict[int, int] = {}
    open_braces: list[int] = []
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(match.start())
        elif token == "}" and open_braces:
            closing[open_braces.pop()] = match.start()
    return closing


def _inner(content: str) -> str:
    """Strip boxes around a box."""
    content = content.strip()
    for _ in range(3):
        match = _BOX.match(content)
        if not match or content[match.end() : match.end() + 1] != "{":
            break
        end = _closing_braces(content).get(match.end())
        if end is not None and end != len(content) - 1:
            break
        content = content[match.end() + 1 : end].strip()
    return content


def _join(text: str, boxes: list[tuple[int, int, bool]], *, trusted: bool = False) -> str:
    """Join the last box with those before it that only a comma or an 'and' separates.

    A gold is ``trusted``: its author may put a few words between the boxes.
    """
    boxes = boxes[-_MAX_JOINED:]
    parts = [_inner(text[boxes[-1][0] : boxes[-1][1]])]
    for (start, end, _), (following, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = _BOX.sub("", text[end + 1 : following - 1])
        near = trusted and (len(between) < 10 or (len(between) < 40 and _SEPARATOR.search(between)))
        if not near and not connected(between):
            break
        part = _inner(text[start:end])
        if part not in parts:
            parts.append(part)
    return ", ".join(reversed(parts))


def _from_phrase(text: str) -> str:
    hashes = HASHES.findall(text)
    if hashes:
        return str(hashes[-1]).strip()
    for match in reversed(list(PHRASE.finditer(text))):
        rest = text[match.end() : match.end() + 600].lstrip(' "*\n')
        segments = list(_MATH.finditer(rest))
        if segments and segments[0].start() == 0:
            return _joined_math(rest, segments)
        ended = _SENTENCE_END.search(_MATH.sub(lambda m: "m" * len(m.group()), rest))
        sentence = rest[: ended.start() if ended else len(rest)].strip().rstrip("*").strip()
        answer = sentence if sentence and not has_prose(sentence) else _last(sentence)
        if answer:
            return answer
    return ""


def _joined_math(text: str, segments: list[re.Match[str]]) -> str:
    """Return the first segment and those joined to it by 'and', 'or' or a comma."""
    parts = [_content(segments[0])]
    for previous, following in itertools.pairwise(segments):
        if not connected(text[previous.end() : following.start()]):
            break
        parts.append(_content(following))
    last = segments[len(parts) - 1]
    percent = re.compile(r"\s*(?:%|\\%|percent(?:age)?\b|pct\b)").match(text, last.end())
    return ", ".join(parts) + ("\\%" if percent else "")


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _last(text: str) -> str:
    """Return the last formula, or the number that comes after it."""
    segments = list(_MATH.finditer(text))
    after = segments[-1].end() if segments else 0
    numbers = [match.group() for match in _NUMBER.finditer(text, after)]
    if numbers and (segments or has_prose(text)):
        return numbers[-1]
    if not segments:
        return ""
    first = len(segments) - 1
    while first and connected(text[segments[first - 1].end() : segments[first].start()]):
        first -= 1
    return _joined_math(text, segments[first:])


def _whole(text: str) -> str:
    text = text.strip()
    return text if 0 < len(text) <= 200 and not has_prose(text) else ""


_FALLBACKS = {"phrase": _from_phrase, "last": _last, "whole": _whole}


def has_prose(text: str) -> bool:
    """Return whether the text holds words of a sentence, not only names of functions."""
    return any(word.casefold() not in _MATH_WORDS for word in _WORD.findall(text))


def connected(between: str) -> bool:
    """Return whether only a comma, an 'and' or an 'or' stands between two answers, so that they are one list."""
    return len(between) <= 60 and _CONNECTIVE.fullmatch(between) is not None


@lru_cache(maxsize=65536)
def extract_gold(gold: str) -> str:
    r"""Return the answer of a gold: of a solution its boxes or what it calls the final answer, else the text itself."""
    boxes = find_boxes(gold)
    if boxes:
        return _join(gold, [box for box in boxes if box[2]] or boxes[-1:], trusted=True)
    stripped = gold.strip()
    match = _MATH.fullmatch(stripped)
    if match:
        return _content(match)
    if len(stripped) > 40 and "final answer" in stripped.casefold():
        return _from_phrase(stripped[-_FALLBACK_CHARS:]) or stripped
    return stripped
