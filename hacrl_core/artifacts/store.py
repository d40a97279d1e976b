"""Artifacts on disk. ``objects/<stage>/<key>/`` holds an artifact's files and its manifest, ``staging/`` what is being made.

Publish: staging folder in the same filesystem → files hashed and fsynced → manifest last → rename. A lost race keeps the winner.
Read: presence and sizes on every look-up, digests on first use in a process. What is damaged is set aside and reported, never used.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hacrl_core.artifacts.locks import exclusive, try_exclusive
from hacrl_core.contracts.manifest import MANIFEST_VERSION, Identity, Manifest, Output, Provenance
from hacrl_core.errors import ArtifactError

MANIFEST = "manifest.json"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class ArtifactRef:
    """A published artifact: what made it (key), what is in it (digest), where it lies."""

    stage: str
    key: str
    digest: str
    path: Path


class Store:
    """The store below one folder. Cheap to make; remembers only which artifacts it has already checked."""

    def __init__(self, root: Path, on_problem: Callable[[str], None] | None = None) -> None:
        self.root = root
        self._on_problem = on_problem or (lambda message: None)
        self._verified: set[str] = set()
        self._manifests: dict[str, Manifest] = {}

    # -- look up ---------------------------------------------------------------------------------------------------

    def lookup(self, identity: Identity, *, verify: bool = True) -> ArtifactRef | None:
        """The artifact of this identity, or None. A damaged one is reported, moved aside and counts as absent."""
        key = identity.key
        folder = self.folder(identity.stage, key)
        if not (folder / MANIFEST).exists():
            if folder.exists():
                self._set_aside(folder, "it has no manifest")
            return None
        try:
            manifest = self.manifest(identity.stage, key)
            self._check(folder, manifest, digests=verify and key not in self._verified)
        except ArtifactError as problem:
            self._set_aside(folder, str(problem))
            return None
        if verify:
            self._verified.add(key)
        return ArtifactRef(identity.stage, key, manifest.content_digest, folder)

    def manifest(self, stage: str, key: str) -> Manifest:
        if key not in self._manifests:
            self._manifests[key] = read_manifest(self.folder(stage, key))
        return self._manifests[key]

    def folder(self, stage: str, key: str) -> Path:
        return self.root / "objects" / stage / key

    # -- publish ---------------------------------------------------------------------------------------------------

    def lock(self, key: str, on_wait: Callable[[str], None] | None = None) -> AbstractContextManager[None]:
        return exclusive(self.root / "locks" / f"{key}.lock", on_wait)

    def stage_folder(self, key: str) -> Path:
        """A fresh folder to work in. What a dead process left under this key goes first: the caller holds the lock."""
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
        """Hash, sync, write the manifest, rename. ``outputs`` maps a path to (kind, rows, measured); others are files."""
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
        _write_synced(staged / MANIFEST, manifest.model_dump_json(indent=1))
        target = self.folder(identity.stage, key)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(staged, target)
            _sync_folder(target.parent)
        except OSError:
            if not (target / MANIFEST).exists():
                raise
            shutil.rmtree(staged, ignore_errors=True)  # somebody else published the same key first: theirs stays
            manifest = read_manifest(target)
        self._manifests[key] = manifest
        self._verified.add(key)
        return ArtifactRef(identity.stage, key, manifest.content_digest, target)

    def sweep_staging(self) -> int:
        """Remove staging folders whose maker is gone (its lock is free); returns how many."""
        removed = 0
        for left in (self.root / "staging").glob("*"):
            handle = try_exclusive(self.root / "locks" / f"{left.name.split('.')[0]}.lock")
            if handle is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(handle)
                removed += 1
        return removed

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check(self, folder: Path, manifest: Manifest, *, digests: bool) -> None:
        for output in manifest.outputs:
            path = folder / output.path
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise ArtifactError(f"{path}: missing; the stage {manifest.stage} will run again") from None
            if size != output.bytes:
                raise ArtifactError(
                    f"{path}: {size} bytes, the manifest says {output.bytes}; the stage {manifest.stage} will run again"
                )
            if digests and file_sha256(path) != output.sha256:
                raise ArtifactError(
                    f"{path}: content differs from its sha256; the stage {manifest.stage} will run again"
                )

    def _set_aside(self, folder: Path, why: str) -> None:
        place = (
            self.root / "damaged" / f"{folder.parent.name}-{folder.name[:12]}-{int(time.time())}-{secrets.token_hex(2)}"
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        self._manifests.pop(folder.name, None)
        self._verified.discard(folder.name)
        try:
            os.rename(folder, place)
        except FileNotFoundError:
            return  # another process was faster
        self._on_problem(f"damaged artifact set aside in {place}: {why}")


def read_manifest(folder: Path) -> Manifest:
    try:
        raw = json.loads((folder / MANIFEST).read_bytes())
        if raw["manifest_version"] != MANIFEST_VERSION:
            raise ArtifactError(
                f"{folder / MANIFEST}: version {raw['manifest_version']}, this hacrl reads {MANIFEST_VERSION}; upgrade hacrl or delete the folder"
            )
        return Manifest.model_validate(raw)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as problem:
        kind = type(problem).__name__
        raise ArtifactError(
            f"{folder / MANIFEST}: not a manifest ({kind}); delete the folder and run again"
        ) from problem


def file_sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def hash_and_sync(path: Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as handle:
        while block := handle.read(_CHUNK):
            digest.update(block)
            size += len(block)
        os.fsync(handle.fileno())
    return size, digest.hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
