"""Shards: what a stage has finished before it is finished, kept so that a crash costs little.

They lie in the folder ``partial/<key of the stage call>``, so another identity never sees them, and are gone when the artifact is published.
Each names what it is an answer to and carries a digest of itself: one that is torn, altered or of other questions counts as absent.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def read_shard(path: Path | None, asked: str) -> list[Any] | None:
    if path is None or not path.exists():
        return None
    try:
        head, body = path.read_bytes().split(b"\n", 1)
        if json.loads(head) != {"asked": asked, "sha256": hashlib.sha256(body).hexdigest()}:
            return None
        rows: list[Any] = json.loads(body)
    except (OSError, ValueError):
        return None  # half written by a dying machine
    return rows


def write_shard(path: Path | None, asked: str, rows: list[Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    body = json.dumps(rows).encode()
    head = json.dumps({"asked": asked, "sha256": hashlib.sha256(body).hexdigest()}).encode()
    draft = path.with_suffix(".draft")
    draft.write_bytes(head + b"\n" + body)
    os.replace(draft, path)  # not synced: after a power cut the digest tells, and the shard is made again
