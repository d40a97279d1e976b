"""A store in front of a bucket: this machine's artifacts, and those that other machines have published.

The local folder works as it does alone. A lookup that finds nothing there asks the bucket for the manifest, one
request, and the artifact is then known in the collected state. Its files come when a stage reads them. What is
published here is queued in ``outbox/`` and uploaded behind the next stages (``uploads.py``). A bucket that does not
answer stops nothing that is possible without it.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.artifacts.leases import Leases
from hacrl_core.artifacts.locks import exclusive
from hacrl_core.artifacts.manifests import MANIFEST, file_of, parse_manifest
from hacrl_core.artifacts.remote import Remote
from hacrl_core.artifacts.removal import collected_mark
from hacrl_core.artifacts.store import COLLECTED, ArtifactRef, Store
from hacrl_core.artifacts.uploads import Uploads
from hacrl_core.contracts.manifest import Identity, Manifest, Provenance
from hacrl_core.errors import BucketError, StageError
from hacrl_core.spans import span

T = TypeVar("T")
# A key that the bucket does not have is not asked for again for so long.
_MISS_SECONDS = 3.0
# After a request that was not answered, the next ones are skipped for so long.
_AWAY_SECONDS = 5.0
# So long a stage waits for inputs that only a bucket has, while that does not answer.
PATIENCE_SECONDS = 900.0
_POLL_SECONDS = 0.5


class SharedStore(Store):
    """A store whose artifacts are also in a bucket, and that finds there what other machines have made."""

    def __init__(
        self,
        root: Path,
        bucket: Bucket,
        on_problem: Callable[[str], None] | None = None,
        cache_bytes: int | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """``cache_bytes`` limits the local files of artifacts that are in the bucket."""
        super().__init__(root, on_problem)
        self.bucket = bucket
        self.remote = Remote(bucket, self._on_problem)
        self.leases = Leases(bucket, self.remote.clock)
        self.uploads = Uploads(self, self.remote, self._on_problem, cache_bytes)
        self._patience = patience
        # Key → its stage, and until when it counts as absent from the bucket.
        self._missed: dict[str, tuple[str, float]] = {}
        self._away_until = 0.0
        self._told_away = False

    # -- lookup ----------------------------------------------------------------------------------------------------

    def lookup(self, identity: Identity, *, collected: bool = False) -> ArtifactRef | None:
        """Return the artifact of this identity, from here or from the bucket, or None.

        Without ``collected`` its files are needed: those that are in the bucket are downloaded.
        """
        stage, key = identity.stage, identity.key
        found = None
        # Twice: a damaged one here is set aside, and the bucket may have it.
        for _ in range(2):
            known = self._learn(stage, key)
            found = super().lookup(identity, collected=True)
            if found is not None or not known:
                break
        if found is None:
            return None
        if not self.is_collected(stage, key):
            self.uploads.add_if_missing(stage, key)
            return found
        if collected or self.fetch(stage, key):
            return found
        return super().lookup(identity)

    def manifest(self, stage: str, key: str) -> Manifest:
        """Return an artifact's manifest, from here or from the bucket."""
        self._learn(stage, key)
        return super().manifest(stage, key)

    def is_whole(self, ref: ArtifactRef) -> bool:
        """Return whether the artifact's files are here or in the bucket."""
        if super().is_whole(ref):
            return True
        if not self._learn(ref.stage, ref.key):
            return False
        return self._asked(lambda: self.remote.has_blobs(self.manifest(ref.stage, ref.key))) is True

    def learn(self, text: bytes) -> None:
        """Take in a manifest that came another way than through the bucket, e.g. with a stage's outcome."""
        made = parse_manifest(text, "a manifest from another process")
        if not (self.folder(made.stage, made.key) / MANIFEST).exists():
            self._know(made, text)

    def _learn(self, stage: str, key: str) -> bool:
        """Return whether the artifact is known here; if it was not, ask the bucket for its manifest."""
        if (self.folder(stage, key) / MANIFEST).exists():
            return True
        if self._missed.get(key, ("", 0.0))[1] > time.monotonic():
            return False
        found = self._asked(lambda: self.remote.manifest(stage, key))
        if found is None:
            self._missed[key] = (stage, time.monotonic() + _MISS_SECONDS)
            return False
        self._know(found[1], found[0])
        self.uploads.mark_durable(key)
        return True

    def _know(self, made: Manifest, text: bytes) -> None:
        """Put a manifest in place, as one whose files were collected."""
        staged = self.root / "staging" / f"learn-{made.key}.{secrets.token_hex(4)}"
        target = self.folder(made.stage, made.key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(self.root / "locks" / f"learn-{made.key}.lock"):
            if (target / MANIFEST).exists():
                return
            staged.mkdir(parents=True)
            (staged / COLLECTED).write_text(collected_mark(made.bytes, "its files are in the bucket"))
            (staged / MANIFEST).write_bytes(text)
            try:
                os.rename(staged, target)
            except OSError:
                shutil.rmtree(staged, ignore_errors=True)
                if not (target / MANIFEST).exists():
                    raise

    # -- files -----------------------------------------------------------------------------------------------------

    def fetch(self, stage: str, key: str) -> bool:
        """Return whether an artifact's files are here, downloading them if need be; hashed on the way in."""
        if not self._learn(stage, key):
            return False
        if not self.is_collected(stage, key):
            return True
        with exclusive(self.root / "locks" / f"fetch-{key}.lock"):
            if not self.is_collected(stage, key):
                return True
            return self._patiently(f"the files of {stage} {key[:12]}", lambda: self._download(stage, key))

    def _download(self, stage: str, key: str) -> bool:
        folder, manifest = self.folder(stage, key), self.manifest(stage, key)
        place = self.root / "staging" / f"fetch-{key}.{secrets.token_hex(4)}"
        place.mkdir(parents=True)
        try:
            with span(f"download {stage}", "download"):
                bad = self.remote.download(list(manifest.outputs), place)
            if bad:
                self.uploads.rewrite(bad)
                return False
            for output in manifest.outputs:
                target = file_of(folder, output)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(place / output.path, target)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        # The manifest's time says when the files were last checked: now.
        os.utime(folder / MANIFEST)
        (folder / COLLECTED).unlink(missing_ok=True)
        self._verified.add(key)
        return True

    def _hold(self, held: ExitStack, ref: ArtifactRef, apart_from: str = "") -> bool:
        for _ in range(3):
            if not self._await(ref) or not self.fetch(ref.stage, ref.key):
                return False
            if super()._hold(held, ref, apart_from):
                return True
        return False

    def _await(self, ref: ArtifactRef) -> bool:
        """Wait for an input that another machine has published and is still uploading.

        A manifest that came with a stage's outcome is known before the files are in the bucket, which gets its own copy
        of the manifest last.
        """

        def in_bucket() -> bool:
            found = self.remote.manifest(ref.stage, ref.key)
            if found is not None:
                self._missed.pop(ref.key, None)
                self._know(found[1], found[0])
                self.uploads.mark_durable(ref.key)
            return found is not None

        def there() -> bool | None:
            if in_bucket():
                return True
            # Asked twice: the upload may have ended, and with it the lease, in between.
            return None if self.leases.is_alive(ref.key) else in_bucket()

        if self._is_here(ref) or self.uploads.is_durable(ref.key):
            return True
        while (answer := self._patiently(f"{ref.stage} {ref.key[:12]}", there)) is None:
            time.sleep(_POLL_SECONDS)
        return answer

    def _is_here(self, ref: ArtifactRef) -> bool:
        """Return whether the artifact's files are on this machine."""
        published = (self.folder(ref.stage, ref.key) / MANIFEST).exists()
        return published and not self.is_collected(ref.stage, ref.key)

    # -- publish ---------------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, key: str, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Lock a key on this machine, and lease it among machines."""
        with super().lock(key, on_wait):
            stage = self._missed.get(key, ("", 0.0))[0]
            waited = False

            def is_published() -> bool:
                nonlocal waited
                waited = True
                return self._is_published(stage, key)

            leased = self._asked(lambda: self.leases.acquire(key, is_published, on_wait))
            if waited:
                # Whoever had the lease may have published meanwhile.
                self._missed.pop(key, None)
            try:
                yield
            finally:
                if leased:
                    self.leases.release(key, lambda: self.uploads.is_queued(key))

    def publish(
        self,
        staged: Path,
        identity: Identity,
        outputs: dict[str, tuple[str, int, bool]],
        metrics: dict[str, float],
        details: dict[str, Any],
        provenance: Provenance,
    ) -> ArtifactRef:
        """Publish a staged folder here, and queue it for the bucket."""
        ref = super().publish(staged, identity, outputs, metrics, details, provenance)
        self.uploads.add(ref.stage, ref.key)
        return ref

    def give_way(self, stage: str, key: str) -> None:
        """Another machine has published other content under this key first: theirs stands, ours is set aside."""
        folder = self.folder(stage, key)
        with exclusive(self.root / "locks" / f"{key}.lock"), _unread(folder):
            self.set_aside(folder, "another machine published other content under this key first; theirs is used")
        self._missed.pop(key, None)
        self._learn(stage, key)

    def _is_published(self, stage: str, key: str) -> bool:
        """Return whether somebody has published the key while this process waited for its lease."""
        self._missed.pop(key, None)
        return bool(stage) and self._learn(stage, key)

    # -- a bucket that does not answer -------------------------------------------------------------------------------

    def _asked(self, request: Callable[[], T]) -> T | None:
        """Return the bucket's answer, or None if it does not answer; said once, and not asked again for a while."""
        if time.monotonic() < self._away_until:
            return None
        try:
            answer = request()
        except BucketError as problem:
            self._away_until = time.monotonic() + _AWAY_SECONDS
            if not self._told_away:
                self._told_away = True
                self._on_problem(f"{problem}; going on without it, what is made here is uploaded when it answers")
            return None
        self._told_away = False
        return answer

    def _patiently(self, what: str, request: Callable[[], T]) -> T:
        """Return the bucket's answer; wait for a bucket that does not answer, because the stage cannot go on."""
        deadline = time.monotonic() + self._patience
        told = False
        while True:
            try:
                return request()
            except BucketError as problem:
                if time.monotonic() > deadline:
                    raise StageError(f"{what}: only the bucket has it; {problem}") from problem
                if not told:
                    told = True
                    self._on_problem(f"{problem}; waiting for {what}")
                time.sleep(_POLL_SECONDS)


@contextmanager
def _unread(folder: Path) -> Iterator[None]:
    """Hold an artifact's manifest exclusively: no stage reads the artifact meanwhile."""
    handle = os.open(folder / MANIFEST, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
