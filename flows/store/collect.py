"""Garbage collection: what would go, and letting it go. Also what a running campaign collects by itself, after each iteration."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flows.home import Home
from flows.record.history import History
from flows.record.record import Entry, Record, is_running
from flows.store.pins import read_pins
from flows.store.survey import campaign_places, read_place, read_versions, running_sweeps, survey
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.disk import is_disk_full
from hacrl_core.artifacts.locks import release, try_exclusive
from hacrl_core.artifacts.removal import collect, last_used, remove, size_of
from hacrl_core.artifacts.store import COLLECTED, MANIFEST
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.keeping import KeepConfig
from hacrl_core.errors import ArtifactError, HacrlError, NewerArtifactError


@dataclass(frozen=True)
class Candidate:
    """Something that may go."""

    kind: str  # version: its files; garbage: all of it; damaged, partial: leftovers
    who: str  # a version's name, or the stage
    stage: str
    key: str
    bytes: int
    why: str
    path: Path


def plan(home: Home, store: Store, override: KeepConfig | None, only: str | None, grace: float) -> list[Candidate]:
    """All that may go: versions that no policy keeps, artifacts that no record names (older than ``grace`` seconds), leftovers."""
    before = cutoff(
        home, grace
    )  # first: a campaign that ends during the survey recorded its last artifacts too late for it
    seen = survey(home, store, override, only)
    names = {v.key: f"{c.name}/{v.agent}@{v.number}" for c in seen.campaigns for v in c.versions}
    found = []
    for folder in sorted((store.root / "objects").glob("*/*")):
        stage, key = folder.parent.name, folder.name
        if key in seen.needed:
            continue
        if key in seen.known:
            if _has_files(folder):
                found.append(_candidate("version", names.get(key, stage), folder, "no keep policy wants it"))
        elif only is None and last_used(folder) < before and not _newer(store, stage, key):
            found.append(_candidate("garbage", stage, folder, "superseded or in no campaign's record"))
    return found + (_leftovers(store, grace) if only is None else [])


def cutoff(home: Home, grace: float) -> float:
    """Garbage is older than this: than the grace, and than the start of every campaign and sweep that runs, which may have found or made
    what no record names yet."""
    started = [time.time() - grace]
    for folder in [*filter(is_running, campaign_places(home)), *running_sweeps(home)]:
        try:
            started.append(float(json.loads((folder / "running.lock").read_text())["since"]))
        except (OSError, ValueError, KeyError):
            started.append(0.0)  # just being written
    return min(started)


def _has_files(folder: Path) -> bool:
    """Not collected yet, or collected by somebody who died over it."""
    return any(path.is_file() and path.name not in (MANIFEST, COLLECTED) for path in folder.rglob("*"))


def _candidate(kind: str, who: str, folder: Path, why: str) -> Candidate:
    return Candidate(kind, who, folder.parent.name, folder.name, size_of(folder), why, folder)


def _newer(store: Store, stage: str, key: str) -> bool:
    try:
        store.check(store.folder(stage, key), store.manifest(stage, key), digests=False)
    except NewerArtifactError:
        return True
    except ArtifactError:
        return False
    return False


def _leftovers(store: Store, grace: float) -> list[Candidate]:
    found = []
    for kind, why in (
        ("damaged", "was set aside as damaged"),
        ("partial", "half-done work of a stage that was published since"),
    ):
        for folder in sorted((store.root / kind).glob("*")):
            with contextlib.suppress(FileNotFoundError):  # a stage that runs takes its own away when it is published
                published = any((store.root / "objects").glob(f"*/{folder.name}"))
                old = _left_at(folder) < time.time() - grace
                if old and (kind == "damaged" or published):
                    found.append(_candidate(kind, kind, folder, why))
    return found


def _left_at(folder: Path) -> float:
    """When it was last written to, or set aside: that moment is in a damaged one's name, since renaming keeps a folder's time."""
    parts = folder.name.rsplit("-", 2)
    named = float(parts[1]) if len(parts) == 3 and parts[1].isdigit() else 0.0
    return max(named, folder.stat().st_mtime)


def carry_out(home: Home, store: Store, candidates: list[Candidate], grace: float) -> int:
    """Let them go; returns the bytes freed. What somebody uses by now stays."""
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
        if not is_disk_full(problem):  # else there was no room for a lock's file; the next clean-up removes them
            raise
    return freed


def _remove(store: Store, one: Candidate, not_since: float) -> int:
    """With the key's lock: nobody is computing it just now."""
    lock = store.root / "locks" / f"{one.key}.lock"
    try:
        handle = try_exclusive(lock)
    except OSError as problem:
        if not is_disk_full(problem):
            raise
        # No room to make the lock's file: it is not there, so nobody holds it.
        return remove(store, one.stage, one.key, not_since)
    if handle is None:
        return 0
    try:
        return remove(store, one.stage, one.key, not_since)
    finally:
        release(lock, handle)


def collector(home: Home, store: Store, record: Record, warn: Callable[[str], None]) -> Callable[[int], None]:
    """To be called after each iteration. A campaign never ends because an old version could not be let go; it says so once."""
    warned = False

    def after(iteration: int) -> None:
        nonlocal warned
        try:
            collect_as_it_runs(home, store, record.config, record.entries())
        except (OSError, HacrlError) as problem:
            if not warned:
                warn(f"old versions could not be collected, the campaign goes on: {problem}")
            warned = True

    return after


def collect_as_it_runs(home: Home, store: Store, config: CampaignConfig, entries: list[Entry]) -> int:
    """After an iteration: versions of this campaign that its policy does not keep, unless another campaign needs them. Returns the bytes
    freed. An evaluation that still waits for its turn keeps its version."""
    if config.keep is None:
        return 0
    own = home.campaign(config.name)
    versions = read_versions(History(config, store, entries), config.keep, read_pins(own))
    going = [v for v in versions if not v.kept and not store.is_collected(v.stage, v.key)]
    if not going:
        return 0
    others: set[str] = set()
    for folder in campaign_places(home):
        if folder != own:
            others |= read_place(home, store, folder).needed
    return sum(collect(store, v.stage, v.key, "keep policy") for v in going if v.key not in others)
