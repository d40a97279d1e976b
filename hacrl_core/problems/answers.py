"""The answer inside a dataset's answer column."""

import re
from typing import Any

from hacrl_core.config.problems import AnswerFormat

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def extract_answer(value: Any, answer_format: AnswerFormat) -> str:
    """The answer as text; empty where there is none (the row is then left out)."""
    text = _as_text(value)
    if answer_format == "boxed":
        text = last_boxed(text) or ""
    elif answer_format == "after_hashes":
        _, mark, text = text.rpartition("####")
        text = text.strip().replace(",", "") if mark else ""  # GSM8K writes 1,000 here and there
    return _without_dollars(text.strip())


def last_boxed(text: str) -> str | None:
    """Content of the last complete ``\\boxed{…}`` or ``\\fbox{…}``, or the word after a bare ``\\boxed``."""
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if text[start : start + 1] != "{":
            word = re.match(r"[^\s$]+", text[start:])
            if word:
                return word.group()
            continue
        end = _closing_brace(text, start)
        if end is not None:
            return text[start + 1 : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth, position = 0, start
    while position < len(text):
        if text[position] == "\\":
            position += 2  # an escaped brace opens and closes nothing
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
        position += 1
    return None


def _as_text(value: Any) -> str:
    """Numbers as people write them, a list as its members (OlympiadBench keeps answers in lists)."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ", ".join(_as_text(part) for part in value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _without_dollars(text: str) -> str:
    inner = text[1:-1]
    wrapped = len(text) > 2 and text[0] == text[-1] == "$" and "$" not in inner
    return inner.strip() if wrapped else text
