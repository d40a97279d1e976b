"""Garbage collection: ``hacrl store gc``. ``running.py`` has what a running campaign collects.

To *collect* a version is to delete its files and keep its manifest: the campaign still counts as complete and is not
run again. Garbage, which no record names, is deleted altogether.
"""

import contextlib
import json
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.home import Home
from flows.record.record import is_running, read_campaign
from flows.store.survey import recorded_campaigns, running_sweeps, survey
from flows.views.text import size_text
from hacrl_core.artifacts import Store, open_store
from hacrl_core.artifacts.disk import is_disk_full
from hacrl_core.artifacts.locks import exclusive, release, try_exclusive
from hacrl_core.artifacts.manifests import MANIFEST
from hacrl_core.artifacts.removal import collect, last_used, remove, size_of
from hacrl_core.artifacts.store import COLLECTED
from hacrl_core.config.operation import KeepConfig
from hacrl_core.errors import ArtifactError, NewerArtifactError

LEFTOVERS = {
    "damaged": "was set aside as damaged",
    "partial": "unfinished work of a stage that has been published since",
}


@dataclass(frozen=True)
class Candidate:
    """Something that may be deleted."""

    # version: its files; garbage: all of it; damaged, partial: leftovers.
    kind: str
    # A version's name, or the stage.
    owner: str
    stage: str
    key: str
    bytes: int
    why: str
    path: Path


# -- hacrl store gc ----------------------------------------------------------------------------------------------------


def collect_garbage(
    console: Console, home: Home, policy: KeepConfig | None, campaign: str | None, grace: float, *, really: bool
) -> None:
    """Show what may be deleted, and delete it if ``really``."""
    if campaign is not None:
        # Refuses a name that does not exist.
        read_campaign(home.campaign(campaign))
    store = open_store(home.store)
    if not really:
        candidates = plan(home, store, policy, campaign, grace)
        _show(console, candidates)
        if candidates:
            console.print("dry run, nothing was deleted; add --yes to delete", highlight=False)
        return
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(exclusive(store.root / "gc.lock"))
        except OSError as problem:
            # A full disk has no room for the lock's file; every artifact has its own lock besides.
            if not is_disk_full(problem):
                raise
        candidates = plan(home, store, policy, campaign, grace)
        _show(console, candidates)
        freed = carry_out(home, store, candidates, grace)
    console.print(f"freed {size_text(freed)}", highlight=False)


def plan(home: Home, store: Store, override: KeepConfig | None, only: str | None, grace: float) -> list[Candidate]:
    """Return all that may be deleted.

    These are versions that no policy keeps, artifacts that no record names and that are older than ``grace`` seconds,
    and leftovers. While a record has lines that cannot be read, what no record names may still be somebody's and stays.
    """
    # Comes first: a campaign that ends during the survey recorded its last artifacts too late for it.
    before = cutoff(home, grace)
    seen = survey(home, store, override, only)
    names = {v.key: f"{c.name}/{v.agent}@{v.number}" for c in seen.campaigns for v in c.versions}
    found = []
    for folder in sorted((store.root / "objects").glob("*/*")):
        stage = folder.parent.name
        key = folder.name
        if key in seen.needed:
            continue
        if key in seen.known:
            if _has_files(folder):
                found.append(_candidate("version", names.get(key, stage), folder, "no keep policy wants it"))
        elif only is None and seen.whole and last_used(folder) < before and not _is_newer(store, stage, key):
            found.append(_candidate("garbage", stage, folder, "superseded or in no campaign's record"))
    return found + (_leftovers(store, grace) if only is None else [])


def cutoff(home: Home, grace: float) -> float:
    """Return the time before which garbage must have been used last.

    It lies ``grace`` seconds back, and before the start of every campaign and sweep that runs: these may have found or
    made what no record names yet.
    """
    started = [time.time() - grace]
    for folder in [*filter(is_running, recorded_campaigns(home)), *running_sweeps(home)]:
        try:
            started.append(float(json.loads((folder / "running.lock").read_text())["since"]))
        except (OSError, ValueError, KeyError, TypeError):
            # The lock's file is just being written, or is damaged.
            started.append(0.0)
    return min(started)


def carry_out(home: Home, store: Store, candidates: list[Candidate], grace: float) -> int:
    """Delete the candidates that nobody uses by now; return the bytes freed."""
    freed = 0
    for one in candidates:
        if one.kind == "version":
            freed += collect(store, one.stage, one.key, one.why)
        elif one.kind == "garbage":
            freed += _remove(store, one, cutoff(home, grace))
        else:
            shutil.rmtree(one.path, ignore_errors=True)
            freed += one.bytes
    try:
        store.remove_stale_staging()
    except OSError as problem:
        # A full disk has no room for a lock's file; the next clean-up removes the rest.
        if not is_disk_full(problem):
            raise
    return freed


def _has_files(folder: Path) -> bool:
    """Whether the artifact was not collected yet, or not completely."""
    return any(path.is_file() and path.name not in (MANIFEST, COLLECTED) for path in folder.rglob("*"))


def _candidate(kind: str, owner: str, folder: Path, why: str) -> Candidate:
    return Candidate(kind, owner, folder.parent.name, folder.name, size_of(folder), why, folder)


def _is_newer(store: Store, stage: str, key: str) -> bool:
    """Whether a newer version of hacrl made the artifact."""
    try:
        store.check(store.folder(stage, key), store.manifest(stage, key), digests="none")
    except NewerArtifactError:
        return True
    except ArtifactError:
        return False
    return False


def _leftovers(store: Store, grace: float) -> list[Candidate]:
    found = []
    for kind, why in LEFTOVERS.items():
        for folder in sorted((store.root / kind).glob("*")):
            # A running stage removes its own partial work when it is published.
            with contextlib.suppress(FileNotFoundError):
                published = any((store.root / "objects").glob(f"*/{folder.name}"))
                old = _left_at(folder) < time.time() - grace
                if old and (kind == "damaged" or published):
                    found.append(_candidate(kind, kind, folder, why))
    return found


def _left_at(folder: Path) -> float:
    """When the folder was last written to or set aside.

    The name of a damaged one holds that moment, since renaming keeps a folder's time.
    """
    parts = folder.name.rsplit("-", 2)
    named = float(parts[1]) if len(parts) == 3 and parts[1].isdigit() else 0.0
    return max(named, folder.stat().st_mtime)


def _remove(store: Store, one: Candidate, not_since: float) -> int:
    """Remove an artifact under its key's lock, so that nobody computes it at the same time."""
    lock = store.root / "locks" / f"{one.key}.lock"
    try:
        handle = try_exclusive(lock)
    except OSError as problem:
        if not is_disk_full(problem):
            raise
        # No room to create the lock's file: it does not exist, so nobody holds it.
        return remove(store, one.stage, one.key, not_since)
    if handle is None:
        return 0
    try:
        return remove(store, one.stage, one.key, not_since)
    finally:
        release(lock, handle)


def _show(console: Console, candidates: list[Candidate]) -> None:
    if not candidates:
        console.print("nothing to delete: every file belongs to a version or an artifact that some campaign keeps")
        return
    rows: dict[tuple[str, str, str], list[Candidate]] = defaultdict(list)
    for one in candidates:
        rows[one.kind, one.owner.partition("@")[0], one.why].append(one)
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("what", "of", "number", "size", "why"):
        table.add_column(title, justify="right" if title in ("number", "size") else "left")
    words = {"version": "files of versions", "garbage": "artifacts"}
    for (kind, owner, why), members in rows.items():
        numbers = [one.owner.partition("@")[2] for one in members]
        which = f"{owner} @{_ranges(numbers)}" if kind == "version" and all(numbers) else owner
        table.add_row(words.get(kind, kind), which, str(len(members)), size_text(sum(m.bytes for m in members)), why)
    console.print(table)
    console.print(f"together {size_text(sum(one.bytes for one in candidates))}", highlight=False)


def _ranges(numbers: list[str]) -> str:
    """Write 1, 2, 3, 7 as 1–3,7."""
    found: list[list[int]] = []
    for number in sorted(int(text) for text in numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}–{b}" for a, b in found)
