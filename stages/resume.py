"""Generation finer than a stage: responses that were finished before a crash are kept in shards and not sampled again."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.contracts.manifest import digest_of
from stages.partial import read_shard, write_shard
from stages.spec import Context

# A shard should be worth its file: small enough to lose little, large enough to keep the engine's batch full.
SHARD_BATCHES = 2


def generate_resumable(
    engine: Any,
    agent: ArtifactRef,
    requests: Sequence[Any],
    config: GenerateConfig,
    context: Context,
    *,
    keep_all: bool = False,
) -> list[Any]:
    """Sample in shards of a few batches each. Their bounds are fixed, so that a response has the same neighbours, and with them the
    same rounding, whether or not its stage was interrupted. The last thing a stage does is not kept unless ``keep_all``."""
    from hacrl_core.generation.factory import sampling_params
    from hacrl_core.generation.protocols import Generation

    params = sampling_params(config)
    size = SHARD_BATCHES * config.batch_size
    results: list[Any] = []
    for start in range(0, len(requests), size):
        shard = requests[start : start + size]
        kept = context.partial if keep_all or len(requests) > size else None
        path = None if kept is None else kept / f"responses-{start:07d}.json"
        asked = "" if path is None else digest_of([vars(request) for request in shard])
        rows = None if path is None else read_shard(path, asked)
        if rows is None:
            done = engine.generate(
                agent.path, agent.digest, shard, params, _progress(context, len(results), len(requests))
            )
            if path is not None:
                write_shard(path, asked, [vars(row) for row in done])
        else:
            done = [_restored(Generation, row) for row in rows]
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


def _restored(kind: Any, row: dict[str, Any]) -> Any:
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
