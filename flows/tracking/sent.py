"""What MLflow has of a campaign, so that a run that goes on sends it the rest only.

The campaign's folder has a list of all that was sent, and a tag of the campaign's run in MLflow says how many of them
that database has. A database that was lost has no such run, and one that was brought back from a copy has a lower
number: both get what they miss.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flows.record.record import Entry

NAME = "mlflow-sent.txt"
TAG = "hacrl.sent"
# Characters of a line that stands for an entry.
_WIDTH = 16


class Sent:
    """The list of what one run in MLflow was sent by all processes so far."""

    def __init__(self, client: Any, run: str, folder: Path, version: int) -> None:
        """``version``: what was sent by a projection that showed less does not count."""
        self._client = client
        self._run = run
        self._path = folder / NAME
        self._head = f"{version} {run}"
        lines = self._read()
        self._count = len(lines)
        # Only of earlier processes: nothing grows while a campaign runs.
        self._before = frozenset(lines)

    def has(self, entry: Entry) -> bool:
        """Return whether MLflow had an entry before this process."""
        return _line(entry) in self._before

    def add(self, entries: Iterable[Entry]) -> None:
        """Note entries that MLflow has taken."""
        lines = [_line(entry) for entry in entries]
        if not lines:
            return
        with self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        self._count += len(lines)
        self._client.set_tag(self._run, TAG, str(self._count))

    def _read(self) -> list[str]:
        """Return the lines that MLflow confirms; the file is left with those."""
        tag = self._client.get_run(self._run).data.tags.get(TAG, "0")
        confirmed = int(tag) if tag.isdecimal() else 0
        try:
            head, *lines = self._path.read_text().split("\n")
        except (OSError, UnicodeDecodeError, ValueError):
            head, lines = "", []
        known = [line for line in lines if len(line) == _WIDTH][:confirmed] if head == self._head else []
        self._path.write_text("\n".join([self._head, *known, ""]))
        return known


def _line(entry: Entry) -> str:
    return hashlib.sha256(f"{entry.label}\0{entry.key}".encode()).hexdigest()[:_WIDTH]
