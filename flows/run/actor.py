"""What every actor on a node of a cluster has: the store of its node, its device, and its printed lines forwarded."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.run.placement import Placement
from flows.run.worker import prepare_torch
from hacrl_core.artifacts import Store, open_store
from hacrl_core.config.operation import StoreConfig


@dataclass(frozen=True)
class NodeStore:
    """Which store an actor opens on its node."""

    folder: str  # {node} becomes the node's id
    bucket: StoreConfig | None = None

    def open(self, node: str, on_problem: Callable[[str], None]) -> Store:
        """Open the store of this node; what is published there is uploaded behind the next stages."""
        store = open_store(self._place(node), on_problem, self.bucket)
        if (uploads := uploads_of(store)) is not None:
            uploads.start()
        return store

    def open_to_read(self, node: str, on_problem: Callable[[str], None]) -> Store:
        """Open the store of this node for a process that publishes nothing."""
        return open_store(self._place(node), on_problem, self.bucket)

    def _place(self, node: str) -> Path:
        return Path(self.folder.replace("{node}", node))


def uploads_of(store: Store) -> Any:
    """Return the uploads of a store in front of a bucket, else None. Needs no obstore to tell."""
    return getattr(store, "uploads", None)


def prepare(place: Placement) -> str:
    """Import torch if the placement needs it, and return the device to use."""
    return prepare_torch(place) if place.needs_torch else "cpu"


def forward_output(say: Callable[[str], None]) -> None:
    """Send what this process and its children print to ``say``, line by line."""
    ours, theirs = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(theirs, number)
    os.close(theirs)

    def read() -> None:
        with open(ours, errors="replace") as lines:
            for line in lines:
                say(line.rstrip("\n"))

    threading.Thread(target=read, name="output", daemon=True).start()
