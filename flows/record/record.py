"""A campaign's record: the artifact of each stage call, in the order of finishing.

The file is append-only; the last line of a label counts. It adds nothing to the manifests: it finds them again, for
status, reports, clean-up and "what changed". A line that cannot be read is skipped and reported; the campaign's next
run removes it and records the call again.
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TextIO

from pydantic import ValidationError

from flows.home import Home
from flows.record.lines import Entry as Entry
from flows.record.lines import entry_of, keep_readable, read_lines, report_unreadable, sealed_line
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.artifacts.files import replace_synced, sync
from hacrl_core.artifacts.locks import holder, is_held, try_exclusive
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.manifest import Identity, changed_fields
from hacrl_core.errors import ArtifactError, ConfigError
from stages.spec import Outcome, StageCall, find_stage

# The stages that make an agent's first version.
ORIGINS = ("warmstart", "adopt")
# A power cut takes at most the lines of so long from a record.
SYNC_SECONDS = 5.0
# Key of an artifact whose files are gone → key of the one that the campaign uses instead.
REMADE = "remade.json"


class Record:
    """One campaign's record, open for writing. It holds the lock that says that the campaign is running."""

    def __init__(self, folder: Path, config: CampaignConfig) -> None:
        self.folder, self.config = folder, config
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take the lock for a moment to see whether it is free; so wait a little.
        self._lock = try_exclusive(folder / "running.lock", patience=1.0)
        if self._lock is None:
            raise ConfigError(
                f"campaign {config.name}: already running ({holder(folder / 'running.lock')}); "
                "wait for it, or give this one another name"
            )
        # Counts what was added or forgotten.
        self.changes = 0
        # What history_of_run made of the entries, and after how many changes.
        self.kept: tuple[int, object] | None = None
        self._now: dict[str, Entry] = {}
        self._fresh: list[Entry] = []
        self._writing = threading.Lock()
        self._synced_at = time.time()
        try:
            self._before = {entry.label: entry for entry in read_entries(folder)}
            self._written = {label: entry.key for label, entry in self._before.items()}
            self._remade = _read_remade(folder)
            self._file = _open_to_append(folder / "stages.jsonl")
            replace_synced(folder / "config.json", config.model_dump_json(indent=1))
            # The names of both files and of the campaign's folder survive a power cut: without the record nothing
            # counts as garbage, and without the config no version can be collected.
            for parent in (folder.parent, folder.parent.parent):
                sync(parent)
        except BaseException:
            os.close(self._lock)
            raise

    def begin_pass(self) -> None:
        """Forget which calls were met so far: the campaign is walked again from its beginning."""
        with self._writing:
            self.changes += 1
            self._now.clear()
            self._fresh.clear()

    def add(self, call: StageCall, outcome: Outcome) -> Entry:
        """Record a finished call; one that is in the record with the same key is not written again."""
        entry = Entry(
            label=call.label,
            stage=call.stage,
            key=outcome.ref.key,
            agent=call.agent,
            iteration=call.iteration,
            variant=call.variant,
            cached=outcome.cached,
            seconds=outcome.seconds,
            at=time.time(),
        )
        with self._writing:
            self.changes += 1
            self._now[entry.label] = entry
            self._fresh.append(entry)
            if self._written.get(entry.label) != entry.key or not entry.cached:
                self._written[entry.label] = entry.key
                self._file.write(sealed_line(asdict(entry)))
                self._file.flush()
                if entry.at - self._synced_at > SYNC_SECONDS:
                    os.fsync(self._file.fileno())
                    self._synced_at = entry.at
        return entry

    def why(self, store: Store, call: StageCall) -> list[str]:
        """Return the fields in which this call differs from the last one with its label; empty if there was none."""
        known = self._before.get(call.label)
        if known is None:
            return []
        new = find_stage(call.stage).identity(call)
        try:
            old: Identity = store.manifest(known.stage, known.key).identity
        except ArtifactError:
            return ["the artifact of last time is gone or damaged"]
        return changed_fields(old, new)

    def now_at(self, key: str) -> str:
        """Return the key of the artifact that the campaign uses in place of this one; usually itself."""
        return self._remade.get(key, key)

    def use_instead(self, key: str, other: str) -> None:
        """From now on use another artifact in place of one whose files are gone and could not be repeated."""
        with self._writing:
            self._remade = {**self._remade, key: other}
            replace_synced(self.folder / REMADE, json.dumps(self._remade, indent=1))

    def entries(self, after: int = 0) -> list[Entry]:
        """Return the entries of this run, one for each label; ``after``: without the first so many."""
        with self._writing:
            return list(islice(self._now.values(), after, None))

    def entries_since_last_call(self) -> list[Entry]:
        """Return the entries added since this method was called last."""
        with self._writing:
            fresh, self._fresh = self._fresh, []
            return fresh

    def close(self) -> None:
        """Write the file through to the disk, close it and release the lock."""
        try:
            with closing(self._file), suppress(OSError):
                # Where the disk cannot, the next run records again what is missing.
                os.fsync(self._file.fileno())
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_entries(folder: Path) -> list[Entry]:
    """Return the last entry of each label, oldest label first. Lines that cannot be read are skipped and reported."""
    path = folder / "stages.jsonl"
    rows, unreadable = read_lines(path)
    latest: dict[str, Entry] = {}
    for row in rows:
        if (entry := entry_of(row)) is None:
            unreadable += 1
        else:
            latest[entry.label] = entry
    if unreadable:
        remedy = "nothing is lost: the next run of the campaign records again what is missing"
        report_unreadable(path, unreadable, remedy)
    return list(latest.values())


def _read_remade(folder: Path) -> dict[str, str]:
    try:
        return {str(key): str(other) for key, other in json.loads((folder / REMADE).read_text()).items()}
    except (OSError, ValueError, AttributeError):
        # Without the file the campaign finds its first artifacts again, and makes those that it needs once more.
        return {}


def read_campaign(folder: Path) -> CampaignConfig:
    """Return the config of the last run; raise ConfigError if there is none that this version can read."""
    try:
        return CampaignConfig.model_validate_json((folder / "config.json").read_bytes())
    except OSError:
        known = ", ".join(sorted(p.name for p in folder.parent.glob("*") if p.is_dir())) or "none yet"
        raise ConfigError(f"campaign {folder.name}: not found in {folder.parent}; known campaigns: {known}") from None
    except ValidationError:
        raise ConfigError(
            f"campaign {folder.name}: {folder / 'config.json'} was written by another version of hacrl; "
            "run its config again to renew it"
        ) from None


def is_running(folder: Path) -> bool:
    """Say whether a process holds the lock of the campaign (or sweep) in this folder."""
    return is_held(folder / "running.lock")


def reference(store: Store, entry: Entry) -> ArtifactRef:
    """Return the artifact of an entry; raise ArtifactError if its manifest is gone."""
    manifest = store.manifest(entry.stage, entry.key)
    return ArtifactRef(entry.stage, entry.key, manifest.content_digest, store.folder(entry.stage, entry.key))


def campaign_folders(home: Home) -> list[Path]:
    """Return the campaigns' folders, the one with the newest activity first."""
    found = [path.parent for path in home.campaigns.glob("*/config.json")]
    return sorted(found, key=lambda folder: -last_activity(folder))


def find_campaign(home: Home, name: str | None) -> Path:
    """Return the folder of the named campaign, or of the one with the newest activity."""
    if name is not None:
        return home.campaign(name)
    folders = campaign_folders(home)
    if not folders:
        raise ConfigError(f"no campaigns in {home.root} yet; start one with: hacrl run configs/demo.yaml")
    return folders[0]


def last_activity(folder: Path) -> float:
    """Return the time stamp of the last entry; the folder's own where there is no record."""
    record = folder / "stages.jsonl"
    return os.path.getmtime(record if record.exists() else folder)


def versions_of(store: Store, entries: Sequence[Entry], agent: str, config: CampaignConfig) -> list[Entry]:
    """Return the agent's versions in order; the first is the one before any iteration.

    A campaign whose settings changed, and that has not run to its end since, has records of the old settings behind the
    new ones. So the list ends before a version that was not made from its predecessor.
    """
    own = [entry for entry in entries if entry.agent == agent]
    versions = [entry for entry in own if entry.stage in ORIGINS][-1:]
    updates = {entry.iteration: entry for entry in own if entry.stage == "update"}
    settings = config.agents[agent]
    for iteration in range(settings.joins, min(settings.leaves or config.iterations, config.iterations)):
        update = updates.get(iteration)
        if not versions or update is None or not _made_from(store, versions[-1], update):
            break
        versions.append(update)
    return versions


def _made_from(store: Store, before: Entry, update: Entry) -> bool:
    try:
        digest = store.manifest(before.stage, before.key).content_digest
        return store.manifest(update.stage, update.key).identity.inputs["agent"] == digest
    except ArtifactError:
        # One of the two was deleted: nothing contradicts it.
        return True


def evaluations_log(home: Home) -> Path:
    """Return the file that lists what ``hacrl eval`` made: no campaign records it, and it is not garbage."""
    return home.root / "evaluations.jsonl"


def _open_to_append(path: Path) -> TextIO:
    """Open the file without the lines that cannot be read, so that the next line does not join one that was cut off."""
    if path.exists():
        text = path.read_bytes()
        if (readable := keep_readable(text)) != text:
            replace_synced(path, readable.decode())
    return path.open("a")
