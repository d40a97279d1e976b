"""Kills inside system calls, and power loss.

A small library (``preload/systemcalls.c``) stands between a process and the C library: it logs what is written, synced,
renamed, removed and made below a home folder, and kills the process group before, after or in the middle of a chosen
call. From the log follows what a power cut may take: whatever was written and not synced.
"""

import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("preload") / "systemcalls.c"
MOMENTS = {
    "write": ("before", "half", "after"),
    "fsync": ("before", "after"),
    "rename": ("before", "after"),
    "unlink": ("before", "after"),
    "mkdir": ("before", "after"),
}
SOON = 0.3  # of a campaign's artifacts
_CALLS = {"write": "write", "sync": "fsync", "rename": "rename", "unlink": "unlink", "mkdir": "mkdir"}
# Names that differ from run to run: keys with what follows them, ids of runs, the trash, numbers.
_VARIABLE = re.compile(r"[0-9a-f]{64}[^/]*|[0-9a-f]{32}|[0-9a-f]{12}-[0-9a-f]{6}|\d+")


class Unavailable(Exception):
    """The library cannot be built here."""


def build(place: Path) -> Path:
    """Compile the library with the machine's compiler; raise `Unavailable` with the reason where that fails."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if sys.platform != "linux" or compiler is None:
        raise Unavailable("kills inside system calls and power loss need Linux and a C compiler (cc, gcc or clang)")
    library = place / "systemcalls.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"{SOURCE.name} was not compiled: {done.stderr.strip().splitlines()[:1]}")
    return library


@dataclass(frozen=True, slots=True)
class Call:
    """One line of the log: what was done to which file below the home."""

    what: str
    inode: int
    size: int  # before a write, at a sync; of what a rename replaced, −1 for nothing
    path: str
    old: str = ""  # of a rename

    @property
    def pattern(self) -> str:
        """The path with what differs from run to run replaced."""
        return _VARIABLE.sub("*", self.path)


def read_log(path: Path) -> list[Call]:
    """Read the library's log; a line that a kill cut short is left out."""
    found = []
    for line in path.read_text(errors="replace").split("\n")[:-1] if path.exists() else ():
        parts = line.split("\t")
        if len(parts) >= 4:
            found.append(Call(parts[0], int(parts[1]), int(parts[2]), parts[3], *parts[4:5]))
    return found


@dataclass(frozen=True)
class Place:
    """A kind of call that an undisturbed campaign makes, and when: as shares of its artifacts published by then."""

    call: str
    pattern: str
    when: tuple[float, ...]


def places(calls: Sequence[Call], artifacts: int) -> list[Place]:
    """Return where a campaign can be killed, from the log of one that was not."""
    published, when = 0, dict[tuple[str, str], list[float]]()
    for call in calls:
        if call.what in _CALLS:
            when.setdefault((_CALLS[call.what], call.pattern), []).append(published / artifacts)
        published += call.what == "rename" and call.path.startswith("store/objects/") and call.size < 0
    return [Place(name, pattern, tuple(moments)) for (name, pattern), moments in when.items()]


def choose(known: Sequence[Place], progress: float, hit: Counter[str], rng: random.Random) -> str | None:
    """Return a plan for the library: one of the calls that come soon and were hit least; None without any.

    Soon, so that a campaign is killed often and a kill costs little work.
    """
    choices = [
        (f"{place.call} {moment} N {place.pattern}", soon)
        for place in known
        if (soon := sum(progress < when < progress + SOON for when in place.when))
        for moment in MOMENTS[place.call]
    ]
    if not choices:
        return None
    least = min(hit[plan] for plan, _ in choices)
    plan, times = rng.choice([choice for choice in choices if hit[choice[0]] == least])
    hit[plan] += 1  # also where it is not reached: others should have their turn
    return plan.replace(" N ", f" {rng.randint(1, min(3, times))} ")


# -- power loss --------------------------------------------------------------------------------------------------------


def unsynced(calls: Sequence[Call]) -> tuple[dict[int, int], list[Call]]:
    """Return the files that were written and not synced, with how much of each is safe, and the renames that were not.

    A file is synced by itself, a name by its folder.
    """
    safe: dict[int, int] = {}
    written: dict[int, int] = {}
    names: list[Call] = []
    for call in calls:
        if call.what == "write":
            if call.size == 0:  # new, or emptied; the number may be that of a file that is gone
                safe[call.inode] = written[call.inode] = 0
            written.setdefault(call.inode, safe.get(call.inode, call.size))
        elif call.what == "sync":
            safe[call.inode] = call.size
            written.pop(call.inode, None)
            names = [name for name in names if os.path.dirname(name.path) != call.path]
        elif call.what == "rename":
            names.append(call)
    return written, names


def lose_power(home: Path, calls: Sequence[Call], rng: random.Random) -> tuple[Counter[str], set[str]]:
    """Do to a home what a power cut may do; return how often what was done, and the paths that lost their names.

    What was written since the last sync of a file is kept, cut off, cut in half or zeroed; a file that never was synced
    may be gone. A new name that its folder did not sync may be the old one again. What a file had before it was
    written over in place is not known here, so that such bytes stay.
    """
    written, names = unsynced(calls)
    done: Counter[str] = Counter()
    taken_back = set()
    for path in sorted(home.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        found = path.stat()
        if found.st_ino in written and found.st_size > written[found.st_ino]:
            done[_damage(path, written[found.st_ino], found.st_size, rng)] += 1
    for name in reversed(names):
        old, new = home / name.old, home / name.path
        if name.size < 0 and rng.random() < 0.5 and new.exists() and not old.exists() and old.parent.is_dir():
            os.rename(new, old)
            taken_back.add(name.path)
            done["name taken back"] += 1
    return done, taken_back


def _damage(path: Path, safe: int, size: int, rng: random.Random) -> str:
    how = rng.choice(("kept", "cut off", "halved", "zeroed", "deleted" if safe == 0 else "cut off"))
    if how == "deleted":
        path.unlink()
    elif how == "zeroed":
        with path.open("r+b") as file:
            file.seek(safe)
            file.write(bytes(size - safe))
    elif how != "kept":
        os.truncate(path, safe if how == "cut off" else safe + (size - safe) // 2)
    return how
