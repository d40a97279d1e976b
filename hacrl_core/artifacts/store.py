"""Artifacts on disk: ``objects/<stage>/<key>/`` holds an artifact's files and its manifest, ``staging/`` unfinished
work.

Publish: staging folder in the same filesystem → files hashed and fsynced → manifest last → rename. Of two processes
that publish the same key, the first wins. Read: every lookup checks presence, sizes and times, a stage's first use in a
process the digests. A damaged artifact is set aside and reported, never used. Collected: a keep policy removed the
files and left the manifest, with ``collected.json`` beside it (see ``removal.py``). The content digest and metrics of
such an artifact are known, but there is nothing to read; recomputing it restores the files.
"""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hacrl_core.artifacts.files import hash_and_sync, hash_files, replace_synced, sync, write_synced
from hacrl_core.artifacts.locks import exclusive, release, shared, try_exclusive
from hacrl_core.artifacts.manifests import MANIFEST, check_schema, file_of, read_manifest
from hacrl_core.contracts.manifest import Identity, Manifest, Output, Provenance, is_below, sealed_json
from hacrl_core.errors import ArtifactError, ContentChangedError, InputGoneError, NewerArtifactError

COLLECTED = "collected.json"
# The role of the content that an artifact could not repeat, among its identity's inputs.
AGAIN = "instead of"
_TRASH_SECONDS = 3600
# Manifests that a store remembers; an older one is read again when somebody asks.
_REMEMBERED = 256


@dataclass(frozen=True)
class ArtifactRef:
    """A published artifact: what made it (key), what is in it (digest), where it is."""

    stage: str
    key: str
    digest: str
    path: Path


def again(identity: Identity, first: str) -> Identity:
    """Return the identity of an artifact that was computed again after the files of the first had been collected.

    Some hardware does not repeat a computation bit for bit. The second result is then an artifact of its own, whose
    inputs name the content that it could not repeat.
    """
    return identity.model_copy(update={"inputs": {**identity.inputs, AGAIN: first}})


class Store:
    """The store below one folder. It is cheap to make and remembers what it read and verified last."""

    def __init__(self, root: Path, on_problem: Callable[[str], None] | None = None) -> None:
        """Open the store below a folder; ``on_problem`` is told of damaged artifacts."""
        self.root = root
        self._on_problem = on_problem or (lambda message: None)
        self._verified: set[str] = set()
        self._verified_apart: set[tuple[str, str]] = set()  # key and the folder that was left out
        # By key, with the file's inode: another process may replace it.
        self._manifests: dict[str, tuple[int, Manifest]] = {}

    # -- lookup ----------------------------------------------------------------------------------------------------

    def lookup(self, identity: Identity, *, collected: bool = False) -> ArtifactRef | None:
        """Return the artifact of this identity, or None. A damaged one is reported, set aside and counts as absent.

        ``collected`` accepts one whose files a keep policy removed: its content digest and metrics are known. Without
        it, an artifact with other content stands in that was computed after the files had been removed.

        Only files that changed since the last look-up are hashed; a stage hashes what it reads (``reading``).
        """
        key = identity.key
        folder = self.folder(identity.stage, key)
        if not (folder / MANIFEST).exists():
            if folder.exists():
                self.set_aside(folder, "it has no manifest")
            return None
        with ExitStack() as held:
            # Without this lock, files that a clean-up collects while they are hashed would count as damaged.
            if not _share(held, folder):
                return None
            try:
                manifest = self.manifest(identity.stage, key)
                if self.is_collected(identity.stage, key):
                    if not collected:
                        return self.lookup(again(identity, manifest.content_digest))
                    return ArtifactRef(identity.stage, key, manifest.content_digest, folder)
                self.check(folder, manifest, digests="changed")
            except NewerArtifactError:
                raise
            except ArtifactError as problem:
                self.set_aside(folder, str(problem))
                return None
            _touch(folder / MANIFEST)
            return ArtifactRef(identity.stage, key, manifest.content_digest, folder)

    def manifest(self, stage: str, key: str) -> Manifest:
        """Return an artifact's manifest, read again only when the file changed."""
        folder = self.folder(stage, key)
        inode = _inode(folder / MANIFEST)
        kept = self._manifests.get(key)
        if kept is None or kept[0] != inode:
            if self._manifests.pop(key, None) is not None:
                # Recomputed since the last lookup.
                self._doubt(key)
            found = read_manifest(folder)
            if (found.stage, found.key, found.identity.key) != (stage, key, key):
                raise ArtifactError(
                    f"{folder / MANIFEST}: belongs to {found.stage} {found.key[:12]}; the stage {stage} will run again"
                )
            kept = self._remember(key, inode, found)
        return kept[1]

    def _remember(self, key: str, inode: int, manifest: Manifest) -> tuple[int, Manifest]:
        """Keep a manifest, and forget the oldest where there are many: a campaign may have any number of them."""
        kept = self._manifests[key] = (inode, manifest)
        while len(self._manifests) > _REMEMBERED:
            oldest = next(iter(self._manifests), None)
            # Another thread may have taken it.
            if oldest is not None and self._manifests.pop(oldest, None) is not None:
                self._verified.discard(oldest)
        return kept

    def mark_verified(self, ref: ArtifactRef) -> None:
        """Trust the digests of an artifact that a child of this process has just published."""
        self._verified.add(ref.key)

    def _doubt(self, key: str) -> None:
        """Let the files of an artifact be hashed before anything reads them again."""
        self._verified.discard(key)
        self._verified_apart = {known for known in self._verified_apart if known[0] != key}

    def folder(self, stage: str, key: str) -> Path:
        """Return where an artifact is, whether or not it exists."""
        return self.root.joinpath("objects", stage, key)

    def is_whole(self, ref: ArtifactRef) -> bool:
        """Return whether the artifact's files are there; damaged ones were set aside when they were found."""
        folder = self.folder(ref.stage, ref.key)
        return (folder / MANIFEST).exists() and not (folder / COLLECTED).exists()

    def fetch(self, stage: str, key: str) -> bool:
        """Return whether an artifact's files are here; a store with a bucket downloads them if need be."""
        return (self.folder(stage, key) / MANIFEST).exists() and not self.is_collected(stage, key)

    def is_collected(self, stage: str, key: str) -> bool:
        """Return whether a keep policy removed the artifact's files."""
        return (self.folder(stage, key) / COLLECTED).exists()

    @contextmanager
    def reading(self, refs: Iterable[ArtifactRef], *, apart_from: str = "") -> Iterator[None]:
        """Hold a stage's inputs while it runs: complete at the start, and not collected before it ends.

        Files below the folder ``apart_from`` are not read by the stage: they must be there, and are not hashed.
        """
        with ExitStack() as held:
            gone = tuple(ref for ref in refs if not self._hold(held, ref, apart_from))
            if gone:
                places = ", ".join(str(ref.path) for ref in gone)
                raise InputGoneError(
                    f"{places}: the files are not there (collected or damaged); run the campaign that made them again",
                    tuple(ref.key for ref in gone),
                )
            yield

    # -- publish ---------------------------------------------------------------------------------------------------

    def lock(self, key: str, on_wait: Callable[[str], None] | None = None) -> AbstractContextManager[None]:
        """Lock a key, so that one process at a time computes it."""
        return exclusive(self.root / "locks" / f"{key}.lock", on_wait)

    def stage_folder(self, key: str) -> Path:
        """Make a fresh folder to work in and remove what a dead process left under this key, whose lock is held."""
        staging = self.root / "staging"
        staging.mkdir(parents=True, exist_ok=True)
        for name in os.listdir(staging):  # a pattern with the key in it would be compiled anew for every stage
            if name.startswith(f"{key}."):
                shutil.rmtree(staging / name, ignore_errors=True)
        folder = staging / f"{key}.{os.getpid()}.{secrets.token_hex(3)}"
        folder.mkdir()
        return folder

    def publish(
        self,
        staged: Path,
        identity: Identity,
        outputs: dict[str, tuple[str, int, bool]],
        metrics: dict[str, float],
        details: dict[str, Any],
        provenance: Provenance,
    ) -> ArtifactRef:
        """Publish a staged folder: hash, sync, write the manifest, rename.

        ``outputs`` maps a path to (kind, rows, measured); all others are plain files.
        """
        manifest = Manifest(
            stage=identity.stage,
            key=identity.key,
            identity=identity,
            outputs=_outputs_of(staged, outputs),
            metrics=metrics,
            details=details,
            provenance=provenance,
        )
        return self._publish(staged, manifest)

    def _publish(self, staged: Path, manifest: Manifest) -> ArtifactRef:
        key = manifest.key
        target = self.folder(manifest.stage, key)
        if self.is_collected(manifest.stage, key):
            first = read_manifest(target)
            if manifest.content_digest == first.content_digest:
                return self._put_back(staged, target, first, manifest)
            identity = again(manifest.identity, first.content_digest)
            return self._publish(staged, manifest.model_copy(update={"identity": identity, "key": identity.key}))
        write_synced(staged / MANIFEST, sealed_json(manifest))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(staged, target)
            sync(target.parent)
        except OSError:
            if not (target / MANIFEST).exists():
                raise
            # Another process published the same key first: its artifact stays.
            shutil.rmtree(staged, ignore_errors=True)
            manifest = read_manifest(target)
        self._remember(key, _inode(target / MANIFEST), manifest)
        self._verified.add(key)
        return ArtifactRef(manifest.stage, key, manifest.content_digest, target)

    def remove_stale_staging(self) -> int:
        """Remove old trash and staging folders whose process is gone (its lock is free); return how many folders."""
        removed = 0
        for old in (self.root / "trash").glob("*"):
            with suppress(FileNotFoundError):
                # A younger one may belong to a process that collects just now.
                if time.time() - old.stat().st_ctime > _TRASH_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
        for left in (self.root / "staging").glob("*"):
            lock = self.root / "locks" / f"{left.name.split('.')[0]}.lock"
            handle = try_exclusive(lock)
            if handle is not None:
                shutil.rmtree(left, ignore_errors=True)
                release(lock, handle)
                removed += 1
        return removed

    # -- damage ----------------------------------------------------------------------------------------------------

    def check(
        self, folder: Path, manifest: Manifest, *, digests: Literal["none", "changed", "all"], apart_from: str = ""
    ) -> None:
        """Check every file against the manifest: presence, size and content; raise what is wrong.

        ``changed`` hashes only files that are newer than the manifest, whose time is that of the last look-up. Files
        below ``apart_from`` are not hashed.
        """
        checked = (folder / MANIFEST).stat().st_mtime_ns
        hashed = []
        for output in manifest.outputs:
            path = file_of(folder, output)
            check_schema(path, output)
            try:
                found = path.stat()
            except FileNotFoundError:
                raise ArtifactError(f"{path}: missing; the stage {manifest.stage} will run again") from None
            if found.st_size != output.bytes:
                raise ArtifactError(
                    f"{path}: {found.st_size} bytes, the manifest says {output.bytes}; "
                    f"the stage {manifest.stage} will run again"
                )
            if is_below(output.path, apart_from):
                continue
            if digests == "all" or (digests == "changed" and found.st_mtime_ns >= checked):
                hashed.append((path, output.sha256))
        for (path, expected), digest in zip(hashed, _digests([path for path, _ in hashed]), strict=True):
            if digest != expected:
                raise ArtifactError(
                    f"{path}: content differs from its sha256; the stage {manifest.stage} will run again"
                )

    def set_aside(self, folder: Path, why: str) -> None:
        """Move a damaged artifact into ``damaged/``, where it can be inspected."""
        place = (
            self.root / "damaged" / f"{folder.parent.name}-{folder.name[:12]}-{int(time.time())}-{secrets.token_hex(2)}"
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        self._manifests.pop(folder.name, None)
        self._doubt(folder.name)
        try:
            os.rename(folder, place)
        except FileNotFoundError:
            # Another process was faster.
            return
        self._on_problem(f"damaged artifact set aside in {place}: {why}")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _put_back(self, staged: Path, target: Path, first: Manifest, made: Manifest) -> ArtifactRef:
        """Restore the recomputed files of a collected artifact; its first manifest with times and metrics stays."""
        for output in made.outputs:
            place = file_of(target, output)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged / output.path, place)
        # Measured outputs differ each time.
        restored = first.model_copy(update={"outputs": made.outputs})
        replace_synced(target / MANIFEST, sealed_json(restored))
        sync(target)
        # Last: until now the artifact counts as collected.
        (target / COLLECTED).unlink()
        sync(target)
        shutil.rmtree(staged, ignore_errors=True)
        self._remember(first.key, _inode(target / MANIFEST), restored)
        self._verified.add(first.key)
        return ArtifactRef(first.stage, first.key, first.content_digest, target)

    def _hold(self, held: ExitStack, ref: ArtifactRef, apart_from: str = "") -> bool:
        """Share the manifest's lock, which removal takes exclusively; then check as in a lookup."""
        folder = self.folder(ref.stage, ref.key)
        if not _share(held, folder):
            return False
        try:
            manifest = self.manifest(ref.stage, ref.key)
            if self.is_collected(ref.stage, ref.key):
                return False
            known = ref.key in self._verified or (ref.key, apart_from) in self._verified_apart
            self.check(folder, manifest, digests="none" if known else "all", apart_from=apart_from)
        except NewerArtifactError:
            raise
        except ArtifactError as problem:
            self.set_aside(folder, str(problem))
            return False
        # Results of the old content must not be mixed with the new.
        if manifest.content_digest != ref.digest:
            raise ContentChangedError(f"{folder}: was made again and has other content than before")
        if any(is_below(output.path, apart_from) for output in manifest.outputs):
            self._verified_apart.add((ref.key, apart_from))
        else:
            self._verified.add(ref.key)
        return True


def _share(held: ExitStack, folder: Path) -> bool:
    """Hold the manifest's lock, which removal takes exclusively; return False where there is no manifest any more."""
    handle = shared(folder / MANIFEST)
    if handle is not None:
        held.callback(os.close, handle)
    return handle is not None


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1


def _digests(paths: list[Path]) -> list[str]:
    try:
        return hash_files(paths)
    except OSError as problem:
        if problem.errno != errno.EIO:
            raise
        place = problem.filename or ", ".join(map(str, paths))
        raise ArtifactError(f"{place}: the disk cannot read it ({problem.strerror})") from problem


def _outputs_of(staged: Path, known: dict[str, tuple[str, int, bool]]) -> tuple[Output, ...]:
    """Hash and sync a stage's files and describe each."""
    names = sorted(_files_below(staged), key=lambda name: name.split("/"))
    described = []
    for name, (size, digest) in zip(names, hash_and_sync([staged / name for name in names]), strict=True):
        kind, rows, measured = known.get(name, ("file", 0, False))
        described.append(Output(path=name, kind=kind, rows=rows, bytes=size, sha256=digest, measured=measured))
    return tuple(described)


def _files_below(folder: Path, prefix: str = "") -> Iterator[str]:
    """The paths of all files in a folder and in those below it, relative to it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(folder / entry.name, f"{prefix}{entry.name}/")
            elif entry.is_file():
                yield prefix + entry.name


def _touch(path: Path) -> None:
    """Record the time of use: garbage collection spares what was just looked up."""
    # A store may belong to another user.
    with suppress(OSError):
        os.utime(path)
