"""Which files are a verifier's own: its folder, as far as that is code and data, never a home, a store or a secret."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hacrl_core.place import OURS
from hacrl_core.tasks.environments import module_of

_MOST_ENTRIES = 200
# What a folder that holds artifacts has inside.
_STORE = Path("store") / "objects"


def readable(tasks: Sequence[str], further: Sequence[str]) -> tuple[str, ...]:
    """Return what workers that run these verifiers may read: their own files and what the settings add."""
    added = [str(Path(path).expanduser().resolve()) for path in further]
    return (*added, *(path for task in dict.fromkeys(tasks) for path in own_files(task)))


def own_files(task: str) -> list[str]:
    """Return the paths that a verifier's worker may read: its module or package and what lies beside it.

    Hidden files, HACRL homes, and in a crowded folder everything but Python modules are left out. An installed module
    needs nothing.
    """
    place = _place(task)
    if place is None or any(part in ("site-packages", "dist-packages") for part in place.parts):
        return []
    folder = place.parent.parent if place.name == "__init__.py" else place.parent
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        entries = []
    if place.name == "__init__.py" or len(entries) > _MOST_ENTRIES:
        entries = [entry for entry in entries if entry.suffix == ".py" or (entry / "__init__.py").is_file()]
    home = os.environ.get("HACRL_HOME")
    homes = {Path(home).resolve()} if home else set()
    return [str(entry) for entry in entries if entry.resolve() not in homes and not (entry / _STORE).is_dir()]


def _place(task: str) -> Path | None:
    """Return the file that a verifier's name means; None where it is ours or cannot be found."""
    path, _, function = task.rpartition(":")
    if not path or not function.isidentifier():
        path = task
    if "/" in path or path.endswith(".py"):
        found = Path(path).expanduser().resolve()
        return found / "__init__.py" if found.is_dir() else found
    first, _, rest = task.partition(":")
    module = rest if first == "module" else module_of(rest) if first == "verifiers" else first
    top = module.partition(".")[0]
    if top in OURS or top in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve() if spec and spec.origin and os.path.exists(spec.origin) else None
