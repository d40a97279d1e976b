"""Work finer than a stage, kept in shards so that a crash costs little: sampled responses and verdicts.

Shards lie in the folder ``partial/<key of the stage call>``, so a call with another identity never sees them. They are
removed when the artifact is published. Each shard names the request it answers and carries a digest of its content: one
that is torn, altered or an answer to another request counts as absent.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.generation import GenerateConfig, VllmEngineConfig
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.contracts.manifest import digest_of
from hacrl_core.problems.problem import Problem
from hacrl_core.verification import Verdict, VerdictKind, verify_batch
from hacrl_core.verification.judge import Judging
from stages.spec import Context

if TYPE_CHECKING:
    from hacrl_core.generation.protocols import Generation, GenerationEngine, GenerationRequest, SamplingParams

# A shard of responses should be worth its file: small enough to lose little, large enough to keep the engine's batch
# full.
SHARD_BATCHES = 2
# Verdicts do not depend on their batch, so their shards are cut by the clock: the first one is this many responses, the
# later ones about as many seconds. What took less than half a second is not worth a file.
FIRST_SHARD = 16
SHARD_SECONDS = 5.0
WORTH_SECONDS = 0.5


@runtime_checkable
class PartsEngine(Protocol):
    """An engine that is several, which take parts of a generation from one another."""

    def generate_parts(
        self,
        version: ArtifactRef,
        parts: "Sequence[Sequence[GenerationRequest]]",
        params: "SamplingParams",
        on_progress: Callable[[int, int], None],
        on_part: "Callable[[int, list[Generation]], None]",
    ) -> None:
        """Sample all parts; ``on_part`` gets each of them with its number, one at a time."""


def generate_resumable(
    engine: "GenerationEngine",
    agent: ArtifactRef,
    requests: "Sequence[GenerationRequest]",
    config: GenerateConfig,
    context: Context,
    *,
    keep_all: bool = False,
) -> "list[Generation]":
    """Sample in shards of a few batches each, reading those that an interrupted run left.

    The bounds of shards are fixed, so a response has the same neighbours, and hence the same rounding, whether or not
    its stage was interrupted. A stage whose only work is one shard keeps none, unless ``keep_all`` says that more work
    follows.
    """
    from hacrl_core.generation import sampling_params

    params = sampling_params(config)
    size = _shard_size(config, len(requests), getattr(engine, "replicas", 1))
    shards = [requests[start : start + size] for start in range(0, len(requests), size)]
    kept = context.partial if keep_all or len(shards) > 1 else None
    paths = [None if kept is None else kept / f"responses-{number * size:07d}.json" for number in range(len(shards))]
    found = {number: rows for number, shard in enumerate(shards) if (rows := _responses_on_disk(paths[number], shard))}
    missing = [number for number in range(len(shards)) if number not in found]

    def keep(number: int, done: "list[Generation]") -> None:
        found[number] = done
        if (path := paths[number]) is not None:
            write_shard(path, _asked(shards[number]), [vars(row) for row in done])

    def progress(shard: int) -> Callable[[int, int], None]:
        before = sum(map(len, found.values()))
        return _sampling_progress(context, before, len(requests), shard * config.max_tokens)

    if isinstance(engine, PartsEngine):
        parts = [shards[number] for number in missing]
        engine.generate_parts(
            agent, parts, params, progress(sum(map(len, parts))), lambda at, done: keep(missing[at], done)
        )
    else:
        for number in missing:
            shard = shards[number]
            keep(number, engine.generate(agent.path, agent.digest, shard, params, progress(len(shard))))
    if config.engine.keep is not True:
        engine.rest()
    return [response for number in range(len(shards)) for response in found[number]]


def _shard_size(config: GenerateConfig, requests: int, replicas: int) -> int:
    """Return how many responses are sampled together.

    Of the built-in engine that does not depend on its replicas: a shard has the same bits whoever samples it. vLLM
    rounds as it likes, so there every replica gets a part.
    """
    engine = config.engine
    if not isinstance(engine, VllmEngineConfig):
        return SHARD_BATCHES * config.batch_size
    if replicas == 1:
        return SHARD_BATCHES * engine.in_flight
    return max(1, min(SHARD_BATCHES * engine.max_sequences, -(-requests // replicas)))


def _asked(shard: "Sequence[GenerationRequest]") -> str:
    return digest_of([vars(request) for request in shard])


def _responses_on_disk(path: Path | None, shard: "Sequence[GenerationRequest]") -> "list[Generation]":
    from hacrl_core.generation.protocols import Generation

    rows = None if path is None or not path.exists() else read_shard(path, _asked(shard))
    return [Generation(**{name: _frozen(value) for name, value in row.items()}) for row in rows or ()]


def verify_resumable(
    responses: Sequence[str],
    golds: Sequence[str],
    config: VerifyConfig,
    context: Context,
    *,
    problems: Sequence[Problem] | None = None,
    judging: Judging | None = None,
    truncated: Sequence[bool] | None = None,
    token_counts: Sequence[int] | None = None,
) -> list[Verdict]:
    """Verify in shards of some seconds each. Verifier errors are not kept: the next run tries those responses again."""
    asked = list(zip(responses, golds, strict=True))
    found = _verdicts_on_disk(context.partial, asked)
    missing = [index for index in range(len(responses)) if index not in found]
    size = FIRST_SHARD
    unsaved: dict[int, Verdict] = {}
    unsaved_seconds = 0.0
    while missing:
        part, missing = missing[:size], missing[size:]
        begun = time.perf_counter()
        verdicts = verify_batch(
            [responses[i] for i in part],
            [golds[i] for i in part],
            config,
            judging=judging,
            problems=None if problems is None else [problems[i] for i in part],
            token_counts=None if token_counts is None else [token_counts[i] for i in part],
            truncated=None if truncated is None else [truncated[i] for i in part],
            on_progress=_verification_progress(context, len(found), len(responses)),
        )
        seconds = time.perf_counter() - begun
        unsaved |= dict(zip(part, verdicts, strict=True))
        found |= unsaved
        unsaved_seconds += seconds
        if unsaved_seconds > WORTH_SECONDS and context.partial is not None:
            _save_verdicts(context.partial, asked, unsaved)
            unsaved, unsaved_seconds = {}, 0.0
        size = max(1, min(4 * size, int(size * SHARD_SECONDS / max(seconds, 1e-9))))
    return [found[index] for index in range(len(responses))]


def read_shard(path: Path | None, asked: str) -> list[Any] | None:
    """Return the rows of a shard that answers ``asked``; None where there is none or it is damaged."""
    if path is None or not path.exists():
        return None
    try:
        head, body = path.read_bytes().split(b"\n", 1)
        if json.loads(head) != {"asked": asked, "sha256": hashlib.sha256(body).hexdigest()}:
            return None
        rows: list[Any] = json.loads(body)
    except (OSError, ValueError):
        return None  # half written when the machine died
    return rows


def write_shard(path: Path | None, asked: str, rows: list[Any]) -> None:
    """Write a shard in one step.

    It is not synced: after a power cut its digest does not match, and it is computed again.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    body = json.dumps(rows).encode()
    head = json.dumps({"asked": asked, "sha256": hashlib.sha256(body).hexdigest()}).encode()
    draft = path.with_suffix(".draft")
    draft.write_bytes(head + b"\n" + body)
    os.replace(draft, path)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _question(pair: tuple[str, str]) -> str:
    """Return what names a response and its gold in a shard."""
    return digest_of(pair)[:16]


def _verdicts_on_disk(folder: Path | None, asked: Sequence[tuple[str, str]]) -> dict[int, Verdict]:
    """Verdicts of earlier runs by index, where response and gold answer are still the same."""
    found: dict[int, Verdict] = {}
    for path in sorted(folder.glob("verdicts-*.json")) if folder is not None else ():
        for index, question, row in read_shard(path, "verdicts") or ():
            if index < len(asked) and _question(asked[index]) == question:
                known = {name: _frozen(value) for name, value in row.items()}
                found[index] = Verdict(**{**known, "verdict": VerdictKind(row["verdict"])})
    return found


def _save_verdicts(folder: Path, asked: Sequence[tuple[str, str]], verdicts: dict[int, Verdict]) -> None:
    rows = [[i, _question(asked[i]), asdict(v)] for i, v in verdicts.items() if v.verdict is not VerdictKind.ERROR]
    if rows:
        write_shard(folder / f"verdicts-{rows[0][0]:07d}.json", "verdicts", rows)


def _sampling_progress(context: Context, before: int, total: int, most: int) -> Callable[[int, int], None]:
    """Report responses done, tokens written and the speed of this shard, of which it may write ``most`` at the most.

    Responses may all end late: until the first one does, only its tokens show that anything happens.
    """
    begun = time.perf_counter()

    def report(done: int, tokens: int) -> None:
        speed = tokens / max(time.perf_counter() - begun, 1e-9)
        context.progress(before + done, total, f"{tokens:,} of at most {most:,} tokens, {speed:,.0f} tokens/s")

    return report


def _verification_progress(context: Context, before: int, total: int) -> Callable[[int, int], None]:
    """Report verdicts at most ten times a second: they come one by one and fast."""
    told = time.perf_counter()

    def report(done: int, of: int) -> None:
        nonlocal told
        if done == of or time.perf_counter() - told > 0.1:
            told = time.perf_counter()
            context.progress(before + done, total, "checked")

    return report
