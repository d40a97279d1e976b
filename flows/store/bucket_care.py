"""Garbage collection and verification of a bucket.

Several homes share a bucket. What a home needs is in its roots (``bucket.py``). An artifact that no root names, and a
file that no manifest names, go once they are older than a grace, by the server's clock.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rich.console import Console

from flows.home import Home
from flows.store.bucket import bucket_store, referenced, write_roots
from flows.views.text import size_text
from hacrl_core.artifacts.bucket import Stat
from hacrl_core.artifacts.remote import SHORTEST_GRACE, blob_path, manifest_path
from hacrl_core.artifacts.shared import SharedStore
from hacrl_core.errors import ArtifactError, ConfigError, NewerArtifactError

_THREADS = 8
_LEASE = "gc"


@dataclass
class Garbage:
    """What may be deleted from a bucket."""

    manifests: list[Stat] = field(default_factory=list)
    blobs: list[Stat] = field(default_factory=list)
    leftovers: list[Stat] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The size of all of it."""
        return sum(stat.size for stat in [*self.manifests, *self.blobs, *self.leftovers])


# -- garbage -----------------------------------------------------------------------------------------------------------


def collect_bucket_garbage(console: Console, home: Home, grace: float, *, really: bool) -> None:
    """Show what may be deleted from the bucket, and delete it if ``really``, one collector at a time."""
    if grace < SHORTEST_GRACE:
        raise ConfigError(
            f"--grace {grace:.0f}s: a bucket needs at least 1h, the time in which an upload may take place"
        )
    store = bucket_store(home)
    write_roots(home, store)
    if not really:
        _show(console, plan(store, grace))
        console.print("dry run, nothing was deleted; add --yes to delete", highlight=False)
        return
    holder = store.leases.holder(_LEASE)
    if holder is not None:
        raise ConfigError(f"bucket {store.bucket.name}: {holder} is collecting its garbage; wait for it")
    store.leases.acquire(_LEASE, lambda: False)
    try:
        garbage = plan(store, grace)
        _show(console, garbage)
        freed = carry_out(store, garbage)
    finally:
        store.leases.release(_LEASE, lambda: False)
    console.print(f"freed {size_text(freed)}", highlight=False)


def plan(store: SharedStore, grace: float) -> Garbage:
    """Return what no home needs and what is older than ``grace`` seconds."""
    needed, known = _roots(store)
    before = store.remote.clock.now() - grace
    garbage = Garbage()
    named: set[str] = set()
    manifests = list(store.bucket.list("manifests/"))
    kept = []
    for stat in manifests:
        key = _key(stat)
        if key not in needed | known and stat.modified < before:
            garbage.manifests.append(stat)
        elif key not in known:
            kept.append(stat)
    with ThreadPoolExecutor(_THREADS, "gc") as threads:
        for paths in threads.map(lambda stat: _blobs(store, stat), kept):
            named |= paths
    for stat in store.bucket.list("blobs/"):
        if stat.path not in named and stat.modified < before:
            garbage.blobs.append(stat)
    for prefix in ("leases/", "probe/"):
        garbage.leftovers += [
            s for s in store.bucket.list(prefix) if s.modified < before and s.path != f"leases/{_LEASE}"
        ]
    return garbage


def carry_out(store: SharedStore, garbage: Garbage) -> int:
    """Delete manifests, then the files that nothing names by now; return the bytes freed."""
    seen = {stat.path for stat in store.bucket.list("manifests/")} - {stat.path for stat in garbage.manifests}
    for stat in garbage.manifests:
        store.bucket.delete(stat.path)
        store.uploads.forget_durable(_key(stat))
    # What was published since the plan was made may name a file that was garbage then.
    fresh: set[str] = set()
    for stat in store.bucket.list("manifests/"):
        if stat.path not in seen or stat.modified > store.remote.clock.now() - SHORTEST_GRACE:
            fresh |= _blobs(store, stat)
    going = [stat for stat in garbage.blobs if stat.path not in fresh]
    with ThreadPoolExecutor(_THREADS, "gc") as threads:
        list(threads.map(lambda stat: store.bucket.delete(stat.path), [*going, *garbage.leftovers]))
    return sum(stat.size for stat in [*garbage.manifests, *going, *garbage.leftovers])


def _roots(store: SharedStore) -> tuple[set[str], set[str]]:
    needed: set[str] = set()
    known: set[str] = set()
    for stat in store.bucket.list("roots/"):
        try:
            root = json.loads(store.bucket.read(stat.path) or b"{}")
            needed |= set(root["needed"])
            known |= set(root["known"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"bucket {store.bucket.name}: {stat.path} cannot be read, so what its home needs is not known; "
                "delete it if that home is gone, or run hacrl store push there"
            ) from None
    return needed, known - needed


def _blobs(store: SharedStore, stat: Stat) -> set[str]:
    try:
        return referenced(store, stat.path.split("/")[-2], _key(stat))
    except NewerArtifactError:
        raise
    except ArtifactError:
        # A damaged manifest names nothing that anybody could read.
        return set()


def _key(stat: Stat) -> str:
    return stat.path.rpartition("/")[2].removesuffix(".json")


def _show(console: Console, garbage: Garbage) -> None:
    console.print(
        f"{len(garbage.manifests)} artifacts that no home needs, {len(garbage.blobs)} files that no artifact names, "
        f"{len(garbage.leftovers)} old leases and probes: {size_text(garbage.bytes)}",
        highlight=False,
        soft_wrap=True,
    )


# -- verification ------------------------------------------------------------------------------------------------------


def verify_bucket(console: Console, home: Home, *, repair: bool, quick: bool) -> int:
    """Check every manifest, and every file that one names: its size, and unless ``quick`` its content.

    ``repair`` deletes what is damaged; whoever has it here uploads it again. Return the exit code: 1 for damage.
    """
    store = bucket_store(home)
    blobs = {stat.path: stat for stat in store.bucket.list("blobs/")}
    problems: list[tuple[str, str]] = []
    wanted: dict[str, tuple[int, str]] = {}
    artifacts = 0
    collected = 0
    for stage, key in store.remote.artifacts():
        found = store.remote.manifest(stage, key)
        if found is None:
            problems.append((manifest_path(stage, key), "not a manifest, or that of another artifact"))
            continue
        artifacts += 1
        files = {blob_path(output.sha256): (output.bytes, output.path) for output in found[1].outputs}
        if files and not any(path in blobs for path in files):
            # Garbage collection took the files of a version that no home keeps.
            collected += 1
            continue
        wanted |= files

    def one(item: tuple[str, tuple[int, str]]) -> tuple[str, str] | None:
        path, (size, name) = item
        if path not in blobs:
            return path, f"{name}: missing"
        if blobs[path].size != size:
            return path, f"{name}: {blobs[path].size} bytes instead of {size}"
        if not quick and store.bucket.hash(path) != path.rpartition("/")[2]:
            return path, f"{name}: content differs from its sha256"
        return None

    with ThreadPoolExecutor(_THREADS, "verify") as threads:
        problems += [problem for problem in threads.map(one, wanted.items()) if problem is not None]
    for path, what in problems:
        console.print(f"[red]{path}[/red]: {what}", highlight=False, soft_wrap=True)
        if repair:
            _repair(store, path)
    how = "sizes compared" if quick else f"{size_text(sum(size for size, _ in wanted.values()))} hashed"
    console.print(
        f"bucket {store.bucket.name}: {artifacts} artifacts ({collected} without files), {len(wanted)} files, {how}; "
        f"{len(problems)} damaged",
        highlight=False,
        soft_wrap=True,
    )
    if problems:
        console.print(
            "deleted; hacrl store push on a machine that has them uploads them again"
            if repair
            else "no machine uses them: what is read is hashed; --repair deletes them, push uploads them again",
            highlight=False,
            soft_wrap=True,
        )
    return 1 if problems else 0


def _repair(store: SharedStore, path: str) -> None:
    """Delete a damaged object, and have this home upload it again if it has it."""
    store.bucket.delete(path)
    name = path.rpartition("/")[2]
    if path.startswith("blobs/"):
        store.uploads.rewrite([name])
    for folder in (store.root / "objects").glob("*/*"):
        stage, key = folder.parent.name, folder.name
        if name.removesuffix(".json") == key or path in referenced(store, stage, key):
            store.uploads.forget_durable(key)
            if not store.is_collected(stage, key):
                store.uploads.add(stage, key)
