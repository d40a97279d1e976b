"""What a campaign left on disk, read without the product's own code where that is easy: manifests, MLflow's database,
folders.
"""

import hashlib
import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kept:
    """An artifact as its manifest tells it."""

    stage: str
    key: str
    content: str  # of all files that are not measurements
    manifest: str  # digest of the manifest itself: it is written once
    started: float


def artifacts(home: Path) -> dict[str, Kept]:
    found = {}
    for path in (home / "store" / "objects").glob("*/*/manifest.json"):
        raw = path.read_bytes()
        manifest = json.loads(raw)
        files = {o["path"]: o["sha256"] for o in manifest["outputs"] if not o["measured"]}
        for output in manifest["outputs"] if not (path.parent / "collected.json").exists() else ():
            with (path.parent / output["path"]).open("rb") as file:
                assert hashlib.file_digest(file, "sha256").hexdigest() == output["sha256"], path
        content = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        started = manifest["provenance"]["started"]
        kept = Kept(manifest["stage"], manifest["key"], content, hashlib.sha256(raw).hexdigest(), started)
        assert path.parent.name == kept.key
        found[kept.key] = kept
    return found


def published(home: Path) -> dict[str, str]:
    """Key and stage of what is published just now; cheap."""
    return {p.parent.name: p.parent.parent.name for p in (home / "store" / "objects").glob("*/*/manifest.json")}


def points(home: Path) -> Counter[tuple[str, str, int]]:
    """How often each point is in MLflow: run, metric, step.

    System metrics are taken by the clock, so a campaign has more of them the longer it takes: they count where one is
    there twice.
    """
    with sqlite3.connect(home / "mlflow.db") as database:
        rows = database.execute("select r.name, m.key, m.step from metrics m join runs r using (run_uuid)").fetchall()
    found: Counter[tuple[str, str, int]] = Counter(rows)
    return Counter({point: n for point, n in found.items() if n > 1 or not point[1].startswith("system/")})


def runs(home: Path) -> list[tuple[str, str, int]]:
    """Name, status and number of parameters of each run."""
    with sqlite3.connect(home / "mlflow.db") as database:
        count = "(select count(*) from params p where p.run_uuid = r.run_uuid)"
        return sorted(database.execute(f"select name, status, {count} from runs r").fetchall())


def leftovers(home: Path) -> list[str]:
    """What should be gone once a campaign is complete."""
    places = [home / "store" / name for name in ("staging", "partial", "locks", "damaged")]
    return [str(path.relative_to(home)) for place in places for path in place.glob("*")]


def recorded(home: Path, campaign: str) -> tuple[dict[str, str], int]:
    """The key of each label in the campaign's record, and the number of lines that nobody can read."""
    labels, torn = {}, 0
    for line in (home / "campaigns" / campaign / "stages.jsonl").read_text().splitlines():
        try:
            entry = json.loads(line)
            labels[entry["label"]] = entry["key"]
        except ValueError:
            torn += 1
    return labels, torn
