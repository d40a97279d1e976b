"""Read manifests: what is damaged, what a newer version wrote, and where an output's file is."""

import json
import os
from pathlib import Path

from pydantic import ValidationError

from hacrl_core.contracts.manifest import MANIFEST_VERSION, Manifest, Output, unseal
from hacrl_core.contracts.tables import NEWEST
from hacrl_core.errors import ArtifactError, NewerArtifactError

MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in a folder; raise ArtifactError if it is not one that this version can read.

    Only a manifest whose own digest fits can be of a newer version: whatever else looks like one is damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError as problem:
        raise ArtifactError(
            f"{path}: not a manifest ({_reason(problem)}); delete the folder and run again"
        ) from problem
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Path | str) -> Manifest:
    """Return what a manifest's bytes say; ``path`` names it in errors, which are those of ``read_manifest``."""
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError(f"it holds a {type(raw).__name__}")
        sealed = unseal(raw)
        if raw["manifest_version"] > MANIFEST_VERSION:
            if not sealed:
                raise ValueError(f"manifest version {raw['manifest_version']} without a digest")
            raise _newer(path, f"manifest version {raw['manifest_version']}", str(MANIFEST_VERSION))
        manifest = Manifest.model_validate(raw)
        unknown = [output.kind for output in manifest.outputs if _is_unknown(output)]
        if unknown and not sealed:
            raise ValueError(f"schema {unknown[0]} without a digest")
        return manifest
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ArtifactError(
            f"{path}: not a manifest ({_reason(problem)}); delete the folder and run again"
        ) from problem


def check_schema(path: Path, output: Output) -> None:
    """Refuse a table of a newer schema; every earlier version stays readable."""
    known = NEWEST.get(output.kind.partition("/")[0])
    if _is_unknown(output):
        raise _newer(path, f"schema {output.kind}", known.tag if known else "no such table")


def file_of(folder: Path, output: Output) -> Path:
    """Return where an output's file is, whether or not it exists; raise ArtifactError if a symbolic link is on the way.

    The path itself stays in the folder, which reading the manifest has checked. A link could lead out of it.
    """
    place = str(folder)
    for part in output.path.split("/"):
        place = f"{place}/{part}"
        if os.path.islink(place):
            raise ArtifactError(f"{place}: a symbolic link, which an artifact never has; delete {folder} and run again")
    return Path(place)


def _is_unknown(output: Output) -> bool:
    name, _, version = output.kind.partition("/")
    known = NEWEST.get(name)
    return output.kind != "file" and (known is None or not version.isdecimal() or int(version) > known.version)


def _newer(path: Path | str, what: str, ours: str) -> NewerArtifactError:
    return NewerArtifactError(
        f"{path}: written by a newer hacrl ({what}, this one knows {ours}); it is left as it is. Upgrade hacrl, or "
        "give this version a folder of its own with --home"
    )


def _reason(problem: Exception) -> str:
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(problem, ValueError) and not isinstance(problem, UnicodeError):
        return str(problem)
    return type(problem).__name__
