"""Uploads run behind the stages: a queue on disk, and threads that empty it.

``outbox/<key>`` names an artifact that is to be uploaded; it outlives every process. ``durable/<bucket>/<key>``
says that the bucket has the artifact. Any process of the home may upload what another has published.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hacrl_core.artifacts.files import replace_synced
from hacrl_core.artifacts.locks import release, shared, try_exclusive
from hacrl_core.artifacts.manifests import MANIFEST
from hacrl_core.artifacts.remote import Remote
from hacrl_core.artifacts.removal import collect, last_used, size_of
from hacrl_core.errors import ArtifactError, BucketError, HacrlError
from hacrl_core.spans import span

if TYPE_CHECKING:
    from hacrl_core.artifacts.shared import SharedStore

_THREADS = 3
_POLL_SECONDS = 0.25
_LONGEST_PAUSE = 10.0
_EVICT_SECONDS = 10.0
# A server may be replaced behind its address.
_PROBE_SECONDS = 86400.0


@dataclass(frozen=True)
class Queued:
    """An artifact in the queue."""

    stage: str
    key: str
    marker: Path
    since: int


class Uploads:
    """The queue of a store's uploads."""

    def __init__(
        self,
        store: "SharedStore",
        remote: Remote,
        on_problem: Callable[[str], None],
        cache_bytes: int | None = None,
    ) -> None:
        self._store = store
        self._remote = remote
        self._on_problem = on_problem
        self._cache_bytes = cache_bytes
        self._outbox = store.root / "outbox"
        # Of this bucket: a home may be put in front of another one.
        self._durable = store.root / "durable" / hashlib.sha256(remote.bucket.name.encode()).hexdigest()[:16]
        self._rewrite = store.root / "rewrite"
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._refused: HacrlError | None = None
        self._told_away = False
        self._evicted_at = 0.0
        self._probed = False

    # -- the queue ---------------------------------------------------------------------------------------------------

    def add(self, stage: str, key: str) -> None:
        """Queue an artifact."""
        self._outbox.mkdir(parents=True, exist_ok=True)
        draft = self._outbox / f".{key}.{os.getpid()}.{threading.get_ident()}"
        draft.write_text(stage)
        os.replace(draft, self._outbox / key)

    def add_if_missing(self, stage: str, key: str) -> None:
        """Queue an artifact of which nobody has said that it is in the bucket: it was made before the bucket was."""
        if not self.is_durable(key) and not self.is_queued(key):
            self.add(stage, key)

    def is_queued(self, key: str) -> bool:
        """Return whether an artifact waits for its upload."""
        return (self._outbox / key).exists()

    def is_durable(self, key: str) -> bool:
        """Return whether the bucket has the artifact, as far as this machine knows."""
        return (self._durable / key).exists() and not self.is_queued(key)

    def mark_durable(self, key: str) -> None:
        """Note that the bucket has the artifact."""
        self._durable.mkdir(parents=True, exist_ok=True)
        (self._durable / key).touch()

    def forget_durable(self, key: str) -> None:
        """Note that the bucket does not have the artifact any more."""
        (self._durable / key).unlink(missing_ok=True)

    def rewrite(self, digests: Iterable[str]) -> None:
        """Note that these blobs are damaged or absent: whoever has the content here writes them again."""
        self._rewrite.mkdir(parents=True, exist_ok=True)
        for digest in digests:
            (self._rewrite / digest).touch()

    def waiting(self) -> list[Queued]:
        """Return the queue, oldest first."""
        found = []
        for path in self._outbox.glob("[!.]*"):
            with suppress(FileNotFoundError):
                found.append(Queued(path.read_text(), path.name, path, path.stat().st_mtime_ns))
        return sorted(found, key=lambda queued: queued.since)

    # -- the threads -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Upload behind the work of this process until it ends, whatever any process of this home publishes.

        Raises ConfigError if the bucket cannot be used. One that does not answer now is asked again later.
        """
        try:
            self.probe()
        except BucketError as problem:
            self._tell_away(problem)
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._serve, name=f"upload {number}", daemon=True) for number in range(_THREADS)
            ]
            for thread in self._threads:
                thread.start()

    def flush(self, seconds: float, keys: Iterable[str] | None = None) -> bool:
        """Wait until these artifacts, or all, are in the bucket; return False after so many seconds without progress.

        Uploads what is left in this thread if there are no others.
        """
        wanted = None if keys is None else set(keys)

        def left() -> list[Queued]:
            return [queued for queued in self.waiting() if wanted is None or queued.key in wanted]

        before, deadline = -1, time.monotonic() + seconds
        while todo := left():
            if self._refused is not None:
                raise self._refused
            if len(todo) != before:
                before, deadline = len(todo), time.monotonic() + seconds
            if time.monotonic() > deadline:
                return False
            if self._threads or not self._empty(todo):
                time.sleep(_POLL_SECONDS / 5)
        return True

    def close(self) -> None:
        """End the threads; what they have not uploaded stays in the queue."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5)
        self._threads = []
        self._stop.clear()

    def _serve(self) -> None:
        pause = _POLL_SECONDS
        while not self._stop.wait(pause):
            try:
                went = self._empty(self.waiting())
                self._evict()
            except HacrlError as problem:
                self._refused = problem
                self._on_problem(f"{problem}; nothing is uploaded until then, and everything is kept here")
                return
            except OSError as problem:
                self._on_problem(f"uploads: {problem}; trying again")
                went = False
            pause = _POLL_SECONDS if went else min(2 * pause, _LONGEST_PAUSE)

    def _empty(self, queue: list[Queued]) -> bool:
        """Upload what is queued; return False when the bucket does not answer."""
        for queued in queue:
            if self._stop.is_set():
                return True
            lock = self._store.root / "locks" / f"upload-{queued.key}.lock"
            handle = try_exclusive(lock)
            if handle is None:
                continue
            try:
                if queued.marker.exists():
                    self.probe()
                    self._upload(queued)
                    self._told_away = False
            except BucketError as problem:
                self._tell_away(problem)
                return False
            finally:
                release(lock, handle)
        return True

    def _upload(self, queued: Queued) -> None:
        folder = self._store.folder(queued.stage, queued.key)
        with ExitStack() as held:
            handle = shared(folder / MANIFEST)
            if handle is None:
                # Garbage collection or damage took it; a stage that needs it makes it again.
                self._done(queued, durable=False)
                return
            held.callback(os.close, handle)
            try:
                manifest = self._store.manifest(queued.stage, queued.key)
                text = (folder / MANIFEST).read_bytes()
                # Where a keep policy was faster, other machines learn what was made, and its files are gone.
                files = not self._store.is_collected(queued.stage, queued.key)
                if files:
                    self._store.check(folder, manifest, digests="changed")
            except ArtifactError as problem:
                self._on_problem(f"not uploaded: {problem}")
                self._done(queued, durable=False)
                return
            outputs = manifest.outputs if files else ()
            with span(f"upload {manifest.stage}", "upload"):
                stands = self._remote.upload(
                    folder, manifest, outputs, text, lambda sha: (self._rewrite / sha).exists()
                )
        for output in outputs:
            (self._rewrite / output.sha256).unlink(missing_ok=True)
        if stands.content_digest != manifest.content_digest:
            self._store.give_way(queued.stage, queued.key)
        self._done(queued, durable=True)
        self._remote.bucket.delete(f"leases/{queued.key}")

    def _done(self, queued: Queued, *, durable: bool) -> None:
        if durable:
            self.mark_durable(queued.key)
        with suppress(FileNotFoundError):
            # It may have been published again meanwhile.
            if queued.marker.stat().st_mtime_ns == queued.since:
                queued.marker.unlink()

    def _tell_away(self, problem: BucketError) -> None:
        if not self._told_away:
            self._told_away = True
            self._on_problem(f"{problem}; what is made here is uploaded when it answers")

    def probe(self) -> None:
        """Raise ConfigError if the bucket has no conditional writes; asked once a day and home."""
        if self._probed:
            return
        bucket = self._remote.bucket
        path, who = self._store.root / "probed.json", f"{bucket.name} {bucket.endpoint or ''}"
        with suppress(OSError, ValueError, KeyError, TypeError):
            if abs(time.time() - json.loads(path.read_text())[who]) < _PROBE_SECONDS:
                self._probed = True
                return
        bucket.probe()
        self._store.root.mkdir(parents=True, exist_ok=True)
        replace_synced(path, json.dumps({who: time.time()}))
        self._probed = True

    # -- the cache ---------------------------------------------------------------------------------------------------

    def _evict(self) -> None:
        if self._cache_bytes is not None and time.monotonic() - self._evicted_at > _EVICT_SECONDS:
            self._evicted_at = time.monotonic()
            self.evict(self._cache_bytes)

    def evict(self, limit: int) -> int:
        """Remove local files of artifacts that are in the bucket, least recently used first, down to so many bytes.

        Return the bytes freed. Artifacts in use stay.
        """
        here = [path for path in (self._store.root / "objects").glob("*/*") if path.is_dir()]
        sizes = {path: size_of(path) for path in here if not self._store.is_collected(path.parent.name, path.name)}
        total, freed = sum(sizes.values()), 0
        for path in sorted(sizes, key=last_used):
            if total - freed <= limit:
                break
            if self.is_durable(path.name) and self._is_there(path):
                freed += collect(self._store, path.parent.name, path.name, "cache_gb: its files are in the bucket")
        return freed

    def _is_there(self, folder: Path) -> bool:
        """Ask the bucket once more before the only other copy goes: garbage collection may have been faster."""
        try:
            there = self._remote.has_blobs(self._store.manifest(folder.parent.name, folder.name))
        except HacrlError:
            return False
        if not there:
            self.forget_durable(folder.name)
        return there
