"""The manifest of an artifact. Written last, so its presence is the stage's success."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from hacrl_core.config.base import StrictConfig

MANIFEST_VERSION = 1


class Output(StrictConfig):
    path: str  # relative to the artifact's folder
    kind: str  # a table's schema ("rollouts/1"), or "file"
    rows: int = 0
    bytes: int
    sha256: str
    measured: bool = False  # times and the like: kept, but not part of the content digest


class Identity(StrictConfig):
    """All that decides an artifact's content, and nothing else: its canonical JSON is hashed into the key."""

    stage: str
    stage_version: int
    config: dict[str, Any]
    inputs: dict[str, str]  # role → content digest
    seed: int | None = None

    @property
    def key(self) -> str:
        return digest_of(self.model_dump())


class Provenance(StrictConfig):
    started: float
    finished: float
    seconds: float
    commit: str = ""
    packages: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, str] = Field(default_factory=dict)
    process: str = ""
    peak_memory_bytes: int = 0  # highest resident size of the process during the stage; 0: not recorded
    peak_device_bytes: int = 0  # highest allocation on a GPU by torch in this process


class Manifest(StrictConfig):
    manifest_version: int = MANIFEST_VERSION
    stage: str
    key: str
    identity: Identity
    outputs: tuple[Output, ...]
    metrics: dict[str, float]
    details: dict[str, Any] = Field(default_factory=dict)  # small facts for people: engine, counts by kind
    provenance: Provenance

    @property
    def content_digest(self) -> str:
        return digest_of({o.path: o.sha256 for o in self.outputs if not o.measured})

    @property
    def bytes(self) -> int:
        return sum(o.bytes for o in self.outputs)


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces, no NaN; floats as Python writes them (shortest that round-trips)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def changed_fields(old: Identity, new: Identity) -> list[str]:
    """Which fields differ, as ``config.update.learning_rate: 5e-05 → 0.0001``, for people who wonder what recomputed."""
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
