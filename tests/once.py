"""What one test process makes for all of them: pytest-xdist's workers have a folder in common."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def common_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the test processes of one run have in common."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextmanager
def once(place: Path) -> Iterator[bool]:
    """Whether this process is the first here; the others wait until it is done."""
    place.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield not (place / "ready").exists()
        (place / "ready").touch()
