"""The lines of a record: one JSON object each, with a digest of itself, so that an altered line is noticed.

Lines of earlier versions have no digest. They are read as they are, if their fields make sense.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hacrl_core.contracts.manifest import digest_of

_DIGEST = "sha256"
# Stage and key become the names of folders.
_STAGE = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_KEY = re.compile(r"[0-9a-f]{64}")
# Files that this process has reported: once each, however often they are read.
_reported: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the record: a finished stage call and the key of its artifact."""

    label: str
    stage: str
    key: str
    agent: str
    iteration: int | None
    variant: str
    cached: bool
    seconds: float
    at: float


def sealed_line(row: Mapping[str, Any]) -> str:
    """Return the line of a row, with its digest and its end."""
    return json.dumps({**row, _DIGEST: digest_of(dict(row))}) + "\n"


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the file's rows, of whatever version of hacrl, and the number of damaged lines.

    A last line that a crash cut off counts as absent: it was never written.
    """
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    # The brace comes last.
    if b"}" in last:
        lines.append(last)
    rows = [parsed[0] if (parsed := _parse(line)) else None for line in lines if line.strip()]
    return [row for row in rows if row is not None], sum(row is None for row in rows)


def entry_of(row: Mapping[str, Any]) -> Entry | None:
    """Return the row as an entry; None if its fields are not those of an entry, or have values that no entry has."""
    try:
        entry = Entry(**row)
    except TypeError:
        return None
    texts = (entry.label, entry.stage, entry.key, entry.agent, entry.variant)
    numbers = (entry.seconds, entry.at)
    fits = (
        all(isinstance(text, str) for text in texts)
        and _STAGE.fullmatch(entry.stage)
        and _KEY.fullmatch(entry.key)
        and (entry.iteration is None or type(entry.iteration) is int)
        and isinstance(entry.cached, bool)
        and all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    )
    return entry if fits else None


def keep_readable(text: bytes) -> bytes:
    """Return the file's text without the lines that cannot be read.

    A row that no entry can be made of stays if its digest fits: a newer version wrote it.
    """
    kept = []
    for line in text.split(b"\n"):
        parsed = _parse(line)
        if parsed is not None and (parsed[1] or entry_of(parsed[0]) is not None):
            kept.append(line + b"\n")
    return b"".join(kept)


def report_unreadable(path: Path, number: int, remedy: str) -> None:
    """Tell the user, once, that lines of a file were skipped."""
    lines = "1 line" if number == 1 else f"{number} lines"
    _tell_once(path, f"skipped {lines} that cannot be read (damaged, or of another version of hacrl); {remedy}")


def report_missing(path: Path) -> None:
    """Tell the user, once, that a campaign's record is gone."""
    remedy = f"the campaign's next run writes it anew without computing anything; or delete {path.parent}"
    _tell_once(path, f"missing, so that nothing counts as garbage; {remedy}")


def report_no_config(path: Path) -> None:
    """Tell the user, once, that a campaign's config is gone or of another version, so that its versions stay."""
    state = "cannot be read (another version of hacrl?)" if path.exists() else "missing"
    remedy = "the campaign's next run writes it anew without computing anything"
    _tell_once(path, f"{state}, so that all that the campaign recorded stays; {remedy}")


def _tell_once(path: Path, message: str) -> None:
    if path not in _reported:
        _reported.add(path)
        Console(stderr=True).print(Text(f"! {path}: {message}", style="yellow"), soft_wrap=True)


def _parse(line: bytes) -> tuple[dict[str, Any], bool] | None:
    """Return the row and whether it has a digest; None if it is no row or its digest does not fit."""
    try:
        row = json.loads(line.decode())
        if not isinstance(row, dict) or not isinstance(row.get("key"), str):
            return None
        seal = row.pop(_DIGEST, None)
        return (row, seal is not None) if seal in (None, digest_of(row)) else None
    except (ValueError, RecursionError):
        return None
