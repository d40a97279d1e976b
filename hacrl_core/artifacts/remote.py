"""Artifacts in a bucket: ``manifests/<stage>/<key>.json`` and ``blobs/<sha256>``.

A manifest is created last and once: where it exists, the artifact does. Blobs are files by content, so equal files of
several artifacts are one object, and writing one again is no harm. Everything that is read is checked: a manifest
against its own digest and its key, a blob against its name.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.artifacts.leases import ServerClock
from hacrl_core.artifacts.manifests import file_of, parse_manifest
from hacrl_core.contracts.manifest import Manifest, Output
from hacrl_core.errors import ArtifactError, NewerArtifactError

_THREADS = 8
# Garbage collection deletes blobs that no manifest names and that are older than this at the least. One that is found
# in place of an upload must be younger than half of it, or is written again.
SHORTEST_GRACE = 3600.0


class Remote:
    """The artifacts in one bucket."""

    def __init__(self, bucket: Bucket, on_problem: Callable[[str], None]) -> None:
        self.bucket = bucket
        self.clock = ServerClock(bucket)
        self._on_problem = on_problem

    def manifest(self, stage: str, key: str) -> tuple[bytes, Manifest] | None:
        """Return an artifact's manifest, its bytes and what they say, or None; a damaged one is reported."""
        path = manifest_path(stage, key)
        text = self.bucket.read(path)
        if text is None:
            return None
        try:
            found = parse_manifest(text, f"{self.bucket.name}: {path}")
            if (found.stage, found.key, found.identity.key) != (stage, key, key):
                raise ArtifactError(f"{self.bucket.name}: {path}: belongs to {found.stage} {found.key[:12]}")
        except NewerArtifactError:
            raise
        except ArtifactError as problem:
            self._on_problem(f"{problem}; it counts as absent, and publishing the artifact replaces it")
            return None
        return text, found

    def upload(
        self, folder: Path, manifest: Manifest, outputs: Sequence[Output], text: bytes, rewrite: Callable[[str], bool]
    ) -> Manifest:
        """Upload some files of an artifact and then its manifest; return the manifest that stands in the bucket.

        It is another one where another machine was first. ``rewrite`` says whether a blob is known to be damaged.
        """
        with ThreadPoolExecutor(_THREADS, "upload") as threads:
            list(threads.map(lambda output: self._upload_blob(folder, output, rewrite), outputs))
        path = manifest_path(manifest.stage, manifest.key)
        if self.bucket.create(path, text):
            return manifest
        theirs = self.manifest(manifest.stage, manifest.key)
        if theirs is None:
            # Damaged: nobody could have read it.
            self.bucket.write(path, text)
            return manifest
        return theirs[1]

    def _upload_blob(self, folder: Path, output: Output, rewrite: Callable[[str], bool]) -> None:
        path = blob_path(output.sha256)
        found = None if rewrite(output.sha256) else self.bucket.stat(path)
        if found is not None and found.size == output.bytes:
            is_young = self.clock.now() - found.modified < SHORTEST_GRACE / 2
            if is_young:
                return
        self.bucket.write(path, file_of(folder, output))

    def has_blobs(self, manifest: Manifest) -> bool:
        """Return whether all files of an artifact are in the bucket, with the right sizes."""
        with ThreadPoolExecutor(_THREADS, "head") as threads:
            found = list(threads.map(lambda output: self.bucket.stat(blob_path(output.sha256)), manifest.outputs))
        return all(
            stat is not None and stat.size == output.bytes for stat, output in zip(found, manifest.outputs, strict=True)
        )

    def download(self, outputs: list[Output], place: Path) -> list[str]:
        """Download files into a folder, hashed on the way in; return the digests of those that are damaged or absent.

        A file whose digest does not fit is asked for twice, since the way may be at fault, and deleted.
        """
        with ThreadPoolExecutor(_THREADS, "download") as threads:
            fits = list(threads.map(lambda output: self._download_one(output, place), outputs))
        return [output.sha256 for output, fit in zip(outputs, fits, strict=True) if not fit]

    def _download_one(self, output: Output, place: Path) -> bool:
        target = place / output.path
        target.parent.mkdir(parents=True, exist_ok=True)
        found: str | None = None
        for _ in range(2):
            found = self.bucket.download(blob_path(output.sha256), target)
            if found == output.sha256 or found is None:
                break
        if found == output.sha256:
            return True
        with suppress(FileNotFoundError):
            target.unlink()
        if found is not None:
            self._on_problem(f"{self.bucket.name}: blob {output.sha256[:12]} ({output.path}) is damaged and not used")
        return False

    def artifacts(self, stage: str = "") -> Iterator[tuple[str, str]]:
        """Yield (stage, key) of every artifact in the bucket."""
        for found in self.bucket.list(f"manifests/{stage}/" if stage else "manifests/"):
            where, _, name = found.path.rpartition("/")
            yield where.rpartition("/")[2], name.removesuffix(".json")


def manifest_path(stage: str, key: str) -> str:
    """Return where an artifact's manifest is in the bucket."""
    return f"manifests/{stage}/{key}.json"


def blob_path(sha256: str) -> str:
    """Return where a file's content is in the bucket."""
    return f"blobs/{sha256}"
