"""Artifacts on disk: ``objects/<stage>/<key>/`` holds an artifact's files and its manifest, ``staging/`` unfinished
work.

Publish: staging folder in the same filesystem → files hashed and fsynced → manifest last → rename. Of two processes
that publish the same key, the first wins. Read: every lookup checks presence and sizes, the first use in a process also
digests. A damaged artifact is set aside and reported, never used. Collected: a keep policy removed the files and left
the manifest, with ``collected.json`` beside it (see ``removal.py``). The content digest and metrics of such an artifact
are known, but there is nothing to read; recomputing it restores the files.
"""

import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl_core.artifacts.locks import exclusive, release, shared, try_exclusive
from hacrl_core.artifacts.manifests import MANIFEST, check_schema, file_of, read_manifest
from hacrl_core.contracts.manifest import Identity, Manifest, Output, Provenance, sealed_json
from hacrl_core.errors import ArtifactError, InputGoneError, NewerArtifactError, StageError

COLLECTED = "collected.json"
_CHUNK = 1 << 20
_TRASH_SECONDS = 3600


@dataclass(frozen=True)
class ArtifactRef:
    """A published artifact: what made it (key), what is in it (digest), where it is."""

    stage: str
    key: str
    digest: str
    path: Path


class Store:
    """The store below one folder. It is cheap to make and remembers only which artifacts it has verified."""

    def __init__(self, root: Path, on_problem: Callable[[str], None] | None = None) -> None:
        """Open the store below a folder; ``on_problem`` is told of damaged artifacts."""
        self.root = root
        self._on_problem = on_problem or (lambda message: None)
        self._verified: set[str] = set()
        # By key, with the file's inode: another process may replace it.
        self._manifests: dict[str, tuple[int, Manifest]] = {}

    # -- lookup ----------------------------------------------------------------------------------------------------

    def lookup(self, identity: Identity, *, verify: bool = True, collected: bool = False) -> ArtifactRef | None:
        """Return the artifact of this identity, or None. A damaged one is reported, set aside and counts as absent.

        ``collected`` accepts one whose files a keep policy removed: its content digest and metrics are known.
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
                    return ArtifactRef(identity.stage, key, manifest.content_digest, folder) if collected else None
                self.check(folder, manifest, digests=verify and key not in self._verified)
            except NewerArtifactError:
                raise
            except ArtifactError as problem:
                self.set_aside(folder, str(problem))
                return None
            if verify:
                self._verified.add(key)
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
                self._verified.discard(key)
            found = read_manifest(folder)
            if (found.stage, found.key, found.identity.key) != (stage, key, key):
                raise ArtifactError(
                    f"{folder / MANIFEST}: belongs to {found.stage} {found.key[:12]}; the stage {stage} will run again"
                )
            kept = self._manifests[key] = (inode, found)
        return kept[1]

    def mark_verified(self, ref: ArtifactRef) -> None:
        """Trust the digests of an artifact that a child of this process has just published."""
        self._verified.add(ref.key)

    def folder(self, stage: str, key: str) -> Path:
        """Return where an artifact is, whether or not it exists."""
        return self.root / "objects" / stage / key

    def is_whole(self, ref: ArtifactRef) -> bool:
        """Return whether the artifact's files are there; damaged ones were set aside when they were found."""
        folder = self.folder(ref.stage, ref.key)
        return (folder / MANIFEST).exists() and not (folder / COLLECTED).exists()

    def is_collected(self, stage: str, key: str) -> bool:
        """Return whether a keep policy removed the artifact's files."""
        return (self.folder(stage, key) / COLLECTED).exists()

    @contextmanager
    def reading(self, refs: Iterable[ArtifactRef]) -> Iterator[None]:
        """Hold a stage's inputs while it runs: complete at the start, and not collected before it ends."""
        with ExitStack() as held:
            gone = tuple(ref for ref in refs if not self._hold(held, ref))
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
        for left in staging.glob(f"{key}.*"):
            shutil.rmtree(left, ignore_errors=True)
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
        listed = []
        for path in sorted(p for p in staged.rglob("*") if p.is_file()):
            name = path.relative_to(staged).as_posix()
            kind, rows, measured = outputs.get(name, ("file", 0, False))
            size, digest = hash_and_sync(path)
            listed.append(Output(path=name, kind=kind, rows=rows, bytes=size, sha256=digest, measured=measured))
        key = identity.key
        manifest = Manifest(
            stage=identity.stage,
            key=key,
            identity=identity,
            outputs=tuple(listed),
            metrics=metrics,
            details=details,
            provenance=provenance,
        )
        target = self.folder(identity.stage, key)
        if self.is_collected(identity.stage, key):
            return self._put_back(staged, target, manifest)
        write_synced(staged / MANIFEST, sealed_json(manifest))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(staged, target)
            sync_folder(target.parent)
        except OSError:
            if not (target / MANIFEST).exists():
                raise
            # Another process published the same key first: its artifact stays.
            shutil.rmtree(staged, ignore_errors=True)
            manifest = read_manifest(target)
        self._manifests[key] = (_inode(target / MANIFEST), manifest)
        self._verified.add(key)
        return ArtifactRef(identity.stage, key, manifest.content_digest, target)

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

    def check(self, folder: Path, manifest: Manifest, *, digests: bool) -> None:
        """Check every file against the manifest: presence, size and, on request, content; raise what is wrong."""
        for output in manifest.outputs:
            path = file_of(folder, output)
            check_schema(path, output)
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise ArtifactError(f"{path}: missing; the stage {manifest.stage} will run again") from None
            if size != output.bytes:
                raise ArtifactError(
                    f"{path}: {size} bytes, the manifest says {output.bytes}; the stage {manifest.stage} will run again"
                )
            if digests and _sha256_or_problem(path) != output.sha256:
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
        self._verified.discard(folder.name)
        try:
            os.rename(folder, place)
        except FileNotFoundError:
            # Another process was faster.
            return
        self._on_problem(f"damaged artifact set aside in {place}: {why}")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _put_back(self, staged: Path, target: Path, made: Manifest) -> ArtifactRef:
        """Restore the recomputed files of a collected artifact; its first manifest with times and metrics stays."""
        first = read_manifest(target)
        if made.content_digest != first.content_digest:
            raise ArtifactError(
                f"{target}: was collected, and computing it again gave other content (other hardware or library "
                "versions); to train anew from there, delete this folder and run again"
            )
        for output in made.outputs:
            place = file_of(target, output)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged / output.path, place)
        # Measured outputs differ each time.
        restored = first.model_copy(update={"outputs": made.outputs})
        replace_synced(target / MANIFEST, sealed_json(restored))
        sync_folder(target)
        # Last: until now the artifact counts as collected.
        (target / COLLECTED).unlink()
        sync_folder(target)
        shutil.rmtree(staged, ignore_errors=True)
        self._manifests[first.key] = (_inode(target / MANIFEST), restored)
        self._verified.add(first.key)
        return ArtifactRef(first.stage, first.key, first.content_digest, target)

    def _hold(self, held: ExitStack, ref: ArtifactRef) -> bool:
        """Share the manifest's lock, which removal takes exclusively; then check as in a lookup."""
        folder = self.folder(ref.stage, ref.key)
        if not _share(held, folder):
            return False
        try:
            manifest = self.manifest(ref.stage, ref.key)
            if self.is_collected(ref.stage, ref.key):
                return False
            self.check(folder, manifest, digests=ref.key not in self._verified)
        except NewerArtifactError:
            raise
        except ArtifactError as problem:
            self.set_aside(folder, str(problem))
            return False
        # Results of the old content must not be mixed with the new.
        if manifest.content_digest != ref.digest:
            raise StageError(f"{folder}: was recomputed and has other content than before; run the same command again")
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


def _sha256_or_problem(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as problem:
        if problem.errno != errno.EIO:
            raise
        raise ArtifactError(f"{path}: the disk cannot read it ({problem.strerror})") from problem


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def hash_and_sync(path: Path) -> tuple[int, str]:
    """Write a file through to the disk; return its size and sha256."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as handle:
        while block := handle.read(_CHUNK):
            digest.update(block)
            size += len(block)
        os.fsync(handle.fileno())
    return size, digest.hexdigest()


def write_synced(path: Path, text: str) -> None:
    """Write a text and wait until it is on the disk."""
    with path.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def replace_synced(path: Path, text: str) -> None:
    """Replace a file atomically by a text that is on the disk."""
    draft = path.with_name(f".{path.name}.draft")
    write_synced(draft, text)
    os.replace(draft, path)


def _touch(path: Path) -> None:
    """Record the time of use: garbage collection spares what was just looked up."""
    # A store may belong to another user.
    with suppress(OSError):
        os.utime(path)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk: until then a power cut may take back a rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
