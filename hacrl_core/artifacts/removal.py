"""Remove artifacts from the store: only their files, so that the artifact stays known (collect), or all of it (remove).

Both take the manifest's lock exclusively, which a stage that reads the artifact shares: an artifact in use is skipped.
Files are moved into ``trash/`` by renaming, so that a crash leaves either the whole artifact or none of it. A full disk
has no room for a trash folder; there, files are unlinked.
"""

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hacrl_core.artifacts.disk import is_disk_full
from hacrl_core.artifacts.files import replace_synced, sync
from hacrl_core.artifacts.manifests import MANIFEST, file_of
from hacrl_core.artifacts.store import COLLECTED, Store
from hacrl_core.errors import ArtifactError


def collect(store: Store, stage: str, key: str, why: str) -> int:
    """Remove an artifact's files and keep its manifest; return the bytes freed, 0 if it is in use."""
    folder = store.folder(stage, key)
    with _exclusive(folder) as free, _trash(store, key) as trash:
        if not free:
            return 0
        try:
            manifest = store.manifest(stage, key)
            files = [path for output in manifest.outputs if (path := file_of(folder, output)).exists()]
        except ArtifactError:
            # Damaged or newer: looking it up reports that.
            return 0
        freed = sum(path.stat().st_size for path in files)
        # First the mark, then the files: the next call finishes what a crash between the two leaves. A mark that is
        # there already need not be on the disk: whoever set it may have been killed before its folder was synced.
        if not (folder / COLLECTED).exists():
            _mark(folder, collected_mark(manifest.bytes, why))
        if files:
            sync(folder)
        for number, path in enumerate(files):
            _discard(path, trash, str(number))
        for path in sorted((p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink()), reverse=True):
            # A folder with files that the manifest does not name stays.
            with suppress(OSError):
                path.rmdir()
        return freed


def collected_mark(size: int, why: str) -> str:
    """Return the text that says that an artifact's files are not here, how large they were, and why."""
    return json.dumps({"at": time.time(), "bytes": size, "why": why}) + "\n"


def remove(store: Store, stage: str, key: str, not_since: float) -> int:
    """Remove an artifact altogether, unless it is in use or was looked up since; return the bytes freed."""
    folder = store.folder(stage, key)
    with _exclusive(folder) as free, _trash(store, key) as trash:
        if not free or last_used(folder) > not_since:
            return 0
        freed = size_of(folder)
        _discard(folder, trash, "all")
        return freed


def last_used(folder: Path) -> float:
    """Return when the artifact was made or last looked up."""
    for path in (folder / MANIFEST, folder):
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            continue
    return 0.0


def size_of(folder: Path) -> int:
    """Return the size of all files in a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            # Another process removed it in the meantime.
            continue
    return total


@contextmanager
def _exclusive(folder: Path) -> Iterator[bool]:
    try:
        handle = os.open(folder / MANIFEST, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(handle)


def _mark(folder: Path, text: str) -> None:
    """Mark the artifact as collected. An empty mark counts as well, because it needs no block of a full disk."""
    try:
        replace_synced(folder / COLLECTED, text)
    except OSError as problem:
        if not is_disk_full(problem):
            raise
        (folder / COLLECTED).touch()


def _discard(path: Path, trash: Path | None, name: str) -> None:
    """Move a path into the trash, or delete it where a full disk has no room for a trash.

    A folder's manifest is deleted last: what a crash leaves is found damaged, or removed by the next call.
    """
    if trash is not None:
        try:
            os.rename(path, trash / name)
            return
        except OSError as problem:
            if not is_disk_full(problem):
                raise
    if not path.is_dir():
        os.unlink(path)
        return
    for file in [p for p in path.rglob("*") if not p.is_dir() and p != path / MANIFEST]:
        os.unlink(file)
    shutil.rmtree(path)


@contextmanager
def _trash(store: Store, key: str) -> Iterator[Path | None]:
    place = store.root / "trash" / f"{key[:12]}-{secrets.token_hex(3)}"
    try:
        place.mkdir(parents=True)
    except OSError as problem:
        if not is_disk_full(problem):
            raise
        yield None
        return
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
