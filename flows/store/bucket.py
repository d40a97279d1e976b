"""A home's bucket: uploads behind the work, what is durable, and ``hacrl store push``, ``pull`` and ``sync``.

A home also leaves *roots* in the bucket, ``roots/<home>/<campaign>.json``: which artifacts its campaigns need. Garbage
collection of the bucket spares what the roots of all homes name.
"""

import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from flows.home import Home
from flows.record.record import Entry
from flows.store.survey import Campaign, recorded_campaigns, survey_campaign, survey_evaluations
from flows.views.text import size_text
from hacrl_core.artifacts import Store, open_store
from hacrl_core.artifacts.files import replace_synced, sync, write_synced
from hacrl_core.artifacts.remote import blob_path
from hacrl_core.artifacts.shared import SharedStore
from hacrl_core.errors import ArtifactError, BucketError, ConfigError, HacrlError

# The stages whose artifact is a version: gigabytes where the others are tables.
VERSION_STAGES = ("warmstart", "adopt", "update")
# The end of a command waits so long for a bucket that does not answer.
PATIENCE_SECONDS = 60.0
# Garbage collection of another home asks the roots, and waits at least an hour before it takes what none names.
ROOTS_SECONDS = 600.0
_THREADS = 8


@contextmanager
def uploading(store: Store, warn: Callable[[str], None], home: Home | None = None) -> Iterator[None]:
    """Upload what is published while the block runs, if the store has a bucket, and wait for the rest at its end.

    Raises ConfigError at once if the bucket cannot be used.
    """
    if not isinstance(store, SharedStore):
        yield
        return
    store.uploads.start()
    try:
        with _roots_written(home, store):
            yield
        if not store.uploads.flush(PATIENCE_SECONDS):
            left = len(store.uploads.waiting())
            warn(f"bucket {store.bucket.name}: {left} artifacts are not there yet; hacrl store push uploads them")
        elif home is not None:
            write_roots(home, store)
    except BucketError as problem:
        warn(f"{problem}; hacrl store push uploads the rest")
    finally:
        store.uploads.close()


@contextmanager
def _roots_written(home: Home | None, store: SharedStore) -> Iterator[None]:
    """Write down every few minutes what the home's campaigns need: a campaign may run for longer than a grace."""
    ended = threading.Event()

    def write() -> None:
        while home is not None and not ended.wait(ROOTS_SECONDS):
            # A bucket that is away, or a record that is being written: the next time.
            with suppress(HacrlError, OSError):
                write_roots(home, store)

    writer = threading.Thread(target=write, name="roots", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def bucket_store(home: Home) -> SharedStore:
    """Return the home's store with its bucket; raise ConfigError if it has none."""
    store = open_store(home.store)
    if not isinstance(store, SharedStore):
        raise ConfigError(
            f"home {home.root}: has no bucket; give a campaign store: {{bucket: s3://…}}, or set HACRL_BUCKET"
        )
    return store


def durability(store: Store, entries: list[Entry]) -> str | None:
    """Return how many of a campaign's artifacts are in the bucket, for people; None without a bucket."""
    if not isinstance(store, SharedStore):
        return None
    keys = {entry.key for entry in entries}
    durable = sum(store.uploads.is_durable(key) for key in keys)
    updates = [entry for entry in entries if entry.stage == "update" and entry.iteration is not None]
    missing = [entry.iteration for entry in updates if not store.uploads.is_durable(entry.key)]
    last = max((entry.iteration for entry in updates if entry.iteration is not None), default=None)
    until = (
        "" if last is None else f", durable to iteration {min((i for i in missing if i is not None), default=last + 1)}"
    )
    return f"{durable} of {len(keys)} artifacts in {store.bucket.name}{until}"


# -- push, pull, sync --------------------------------------------------------------------------------------------------


@dataclass
class Moved:
    """What went over the wire."""

    artifacts: int = 0
    bytes: int = 0

    def text(self, verb: str) -> str:
        """Return a line for people."""
        return f"{verb} {self.artifacts} artifacts, {size_text(self.bytes)}"


def push(console: Console, home: Home) -> int:
    """Upload every artifact that is not known to be in the bucket; return the exit code."""
    store = bucket_store(home)
    store.uploads.probe()
    queued = {item.key for item in store.uploads.waiting()}
    moved = Moved()
    for folder in sorted((store.root / "objects").glob("*/*")):
        stage, key = folder.parent.name, folder.name
        if key not in queued and store.uploads.is_durable(key):
            continue
        try:
            manifest = store.manifest(stage, key)
            if not store.is_collected(stage, key):
                # These may be years old: what is uploaded is what was once published.
                store.check(folder, manifest, digests="all")
        except ArtifactError as problem:
            console.print(f"! not uploaded: {problem}", style="yellow", highlight=False, soft_wrap=True)
            continue
        store.uploads.add(stage, key)
        moved.artifacts += 1
        moved.bytes += 0 if store.is_collected(stage, key) else manifest.bytes
    complete = store.uploads.flush(PATIENCE_SECONDS)
    if complete:
        write_roots(home, store)
    left = len(store.uploads.waiting())
    console.print(moved.text("pushed") if complete else f"{left} artifacts are still waiting", highlight=False)
    return 0 if complete else 1


def pull(console: Console, home: Home, stage: str | None, *, versions: bool) -> int:
    """Learn every artifact of the bucket, and download the files of tables, or with ``versions`` of all stages."""
    store = bucket_store(home)
    moved = Moved()

    def one(found: tuple[str, str]) -> tuple[bool, int]:
        where, key = found
        known = (store.folder(where, key) / "manifest.json").exists() and not store.is_collected(where, key)
        size = store.manifest(where, key).bytes
        if known or (where in VERSION_STAGES and not versions):
            return False, 0
        return store.fetch(where, key), size

    with ThreadPoolExecutor(_THREADS, "pull") as threads:
        for came, size in threads.map(one, list(store.remote.artifacts(stage or ""))):
            moved.artifacts += came
            moved.bytes += size if came else 0
    console.print(moved.text("pulled"), highlight=False)
    return 0


# -- roots -------------------------------------------------------------------------------------------------------------


def write_roots(home: Home, store: SharedStore) -> None:
    """Write down in the bucket what each campaign of this home needs; what is unchanged is not sent again."""
    known = _sent(store)
    sent = dict(known)
    for folder in recorded_campaigns(home):
        name = folder.relative_to(home.campaigns).as_posix()
        sent[name] = _root(survey_campaign(home, store, folder))
    needed, adopted = survey_evaluations(home)
    if needed or adopted:
        sent["evaluations"] = json.dumps({"needed": sorted(needed), "known": sorted(adopted)})
    gone = known.keys() - {folder.relative_to(home.campaigns).as_posix() for folder in recorded_campaigns(home)}
    for name, text in sent.items():
        path = f"roots/{home_id(store.root)}/{name.replace('/', '~')}.json"
        if name in gone and name != "evaluations":
            store.bucket.delete(path)
        elif known.get(name) != text:
            store.bucket.write(path, text.encode())
    kept = {name: text for name, text in sent.items() if name not in gone or name == "evaluations"}
    replace_synced(store.root / "roots.json", json.dumps(kept))


def _root(campaign: Campaign) -> str:
    return json.dumps({"needed": sorted(campaign.needed), "known": sorted(campaign.known)})


def _sent(store: SharedStore) -> dict[str, str]:
    try:
        sent = json.loads((store.root / "roots.json").read_text())
        return {str(name): str(text) for name, text in sent.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def home_id(root: Path) -> str:
    """Return a name of this store that no other has; of several campaigns that begin in a new home, one names it."""
    path = root / "home-id"
    with suppress(FileNotFoundError):
        return path.read_text()
    root.mkdir(parents=True, exist_ok=True)
    name = secrets.token_hex(8)
    draft = root / f".home-id.{name}.draft"
    write_synced(draft, name)
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    sync(root)
    return path.read_text()


# -- hacrl store du ----------------------------------------------------------------------------------------------------


def show_bucket_size(console: Console, store: Store, price: float) -> None:
    """Print how much the bucket holds and what that costs a month; nothing without a bucket."""
    if not isinstance(store, SharedStore):
        return
    size = count = 0
    for found in store.bucket.list("blobs/"):
        size, count = size + found.size, count + 1
    manifests = sum(1 for _ in store.remote.artifacts())
    waiting = len(store.uploads.waiting())
    cost = size / 1e9 * price
    console.print(
        f"bucket {store.bucket.name}: {manifests} artifacts, {count} files, {size_text(size)}; "
        f"{cost:.2f} $ a month at {price:g} $ per GB, requests not counted; {waiting} artifacts wait for their upload",
        highlight=False,
        soft_wrap=True,
    )


def referenced(store: SharedStore, stage: str, key: str) -> set[str]:
    """Return the paths of the blobs that an artifact's manifest names."""
    return {blob_path(output.sha256) for output in store.manifest(stage, key).outputs}
