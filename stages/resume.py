"""Work finer than a stage: responses that were finished before a crash are kept in shards and not sampled again."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.generation import GenerateConfig
from stages.spec import Context

# A shard should be worth its fsync: small enough to lose little, large enough to keep the engine's batch full.
SHARD_BATCHES = 2


def generate_resumable(
    engine: Any, agent: ArtifactRef, requests: Sequence[Any], config: GenerateConfig, context: Context
) -> list[Any]:
    """Sample in shards of a few batches each; a shard on disk is taken as it is, since requests are pure functions of their seed."""
    from hacrl_core.engines.factory import sampling_params

    params = sampling_params(config)
    size = SHARD_BATCHES * config.batch_size
    shards = [requests[start : start + size] for start in range(0, len(requests), size)]
    results: list[Any] = []
    for number, shard in enumerate(shards):
        path = context.partial / f"{number:05d}.json" if context.partial and len(shards) > 1 else None
        done = _read(path, shard)
        if done is None:
            report = _progress(context, len(results), len(requests))
            done = engine.generate(agent.path, agent.digest, shard, params, report)
            _write(path, done)
        results += done
    if not config.engine.keep:
        engine.close()  # it starts again when it is asked next
    return results


def _progress(context: Context, before: int, total: int) -> Callable[[int, int], None]:
    """Responses done and the speed of this shard, for the bar."""
    begun = time.perf_counter()

    def report(done: int, tokens: int) -> None:
        speed = tokens / max(time.perf_counter() - begun, 1e-9)
        context.progress(before + done, total, f"{speed:,.0f} tokens/s")

    return report


def _read(path: Path | None, shard: Sequence[Any]) -> list[Any] | None:
    from hacrl_core.engines.protocols import Generation

    if path is None or not path.exists():
        return None
    try:
        rows = [_restored(Generation, row) for row in json.loads(path.read_text())]
    except (ValueError, TypeError):
        return None  # half written by a dying machine: sample it again
    return rows if [r.request_id for r in rows] == [r.request_id for r in shard] else None


def _restored(kind: Any, row: dict[str, Any]) -> Any:
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})


def _write(path: Path | None, rows: Sequence[Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([asdict(row) for row in rows]))
    os.replace(draft, path)
