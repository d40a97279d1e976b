"""The manifest of an artifact. It is written last: where it exists, the stage has succeeded."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from hacrl_core.config.base import StrictModel

MANIFEST_VERSION = 1
# The name of the manifest's own digest. It is one of the details, because a version of hacrl that does not know it
# accepts any detail there, and refuses any other new field.
SEAL = "manifest_sha256"
# Files of the store beside the outputs.
_RESERVED = ("manifest.json", "collected.json")


class Output(StrictModel):
    """One file of an artifact."""

    # Relative to the artifact's folder.
    path: str
    # A table's schema ("rollouts/1"), or "file".
    kind: str
    rows: int = 0
    bytes: int
    sha256: str
    # Times and the like are kept, but are not part of the content digest.
    measured: bool = False

    @field_validator("path")
    @classmethod
    def _stays_in_the_folder(cls, path: str) -> str:
        """Files are read, copied and deleted by this path: it must not lead out of the artifact's folder."""
        if {"", ".", ".."} & set(path.split("/")) or "\\" in path or "\0" in path or path in _RESERVED:
            raise ValueError(f"{path!r} is not the path of a file below the artifact's folder")
        return path


class Identity(StrictModel):
    """Everything that decides an artifact's content, and nothing else: its canonical JSON is hashed into the key."""

    stage: str
    stage_version: int
    config: dict[str, Any]
    # Role to content digest.
    inputs: dict[str, str]
    seed: int | None = None

    @property
    def key(self) -> str:
        """The name under which the store keeps the artifact."""
        return digest_of(self.model_dump())


class Provenance(StrictModel):
    """Where, when and how an artifact was made; not part of its identity."""

    started: float
    finished: float
    seconds: float
    commit: str = ""
    packages: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, str] = Field(default_factory=dict)
    process: str = ""
    # Highest resident size of the process during the stage; 0: not recorded.
    peak_memory_bytes: int = 0
    # Highest allocation on a GPU by torch in this process.
    peak_device_bytes: int = 0


# The folder of a version that only its next update reads: the optimizer's moments.
TRAINING = "training"


class Manifest(StrictModel):
    """What an artifact is, what is in it and how it was made."""

    manifest_version: int = MANIFEST_VERSION
    stage: str
    key: str
    identity: Identity
    outputs: tuple[Output, ...]
    metrics: dict[str, float]
    # Small facts for people: engine, counts by kind.
    details: dict[str, Any] = Field(default_factory=dict)
    provenance: Provenance

    @property
    def content_digest(self) -> str:
        """A digest of all files except measured ones."""
        return digest_of({o.path: o.sha256 for o in self.outputs if not o.measured})

    def part_digest(self, folder: str, *, inside: bool = True) -> str:
        """Return a digest of the files below a folder, or of all others; measured files are left out.

        A version's weights and its training state so have digests of their own: two versions with equal weights have
        equal digests apart from ``training``.
        """
        return digest_of(
            {o.path: o.sha256 for o in self.outputs if not o.measured and is_below(o.path, folder) == inside}
        )

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(o.bytes for o in self.outputs)


def is_below(path: str, folder: str) -> bool:
    """Return whether a file of an artifact lies below one of its folders; nothing lies below the empty name."""
    return bool(folder) and path.startswith(f"{folder}/")


def sealed_json(manifest: Manifest) -> str:
    """Return the manifest's text with a digest of all the rest among its details."""
    seal = digest_of(json.loads(manifest.model_dump_json()))
    return manifest.model_copy(update={"details": {**manifest.details, SEAL: seal}}).model_dump_json(indent=1)


def unseal(raw: dict[str, Any]) -> bool:
    """Take the seal out of a parsed manifest and return whether it had one; raise ValueError if it does not fit.

    Manifests of earlier versions have none.
    """
    details = raw.get("details")
    if not isinstance(details, dict):
        return False
    seal = details.pop(SEAL, None)
    if seal is None:
        for name, value in details.items():
            others = {other: kept for other, kept in details.items() if other != name}
            if isinstance(value, str) and len(value) == 64 and value == digest_of({**raw, "details": others}):
                raise ValueError(f"the name of its digest is damaged: {name!r}")
        return False
    if seal != digest_of(raw):
        raise ValueError("its content differs from its own digest")
    return True


def canonical_json(value: Any) -> str:
    """Return the one text of a value: sorted keys, no spaces, no NaN, floats in the shortest form that round-trips."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def changed_fields(old: Identity, new: Identity) -> list[str]:
    """Return the fields that differ, as ``config.update.learning_rate: 5e-05 → 0.0001``: why a stage runs again."""
    before, after = _flatten(old.model_dump()), _flatten(new.model_dump())
    changes = []
    for field in sorted(before.keys() | after.keys()):
        if before.get(field) != after.get(field):
            if field.startswith("inputs."):
                changes.append(f"{field} has other content")
            else:
                changes.append(f"{field}: {before.get(field, 'absent')} → {after.get(field, 'absent')}")
    return changes


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        path = f"{prefix}{name}"
        if isinstance(item, Mapping):
            flat.update(_flatten(item, f"{path}."))
        else:
            flat[path] = item
    return flat
