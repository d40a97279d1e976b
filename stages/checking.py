"""Verification finer than a stage: verdicts that were found before a crash are kept in shards and not sought again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.contracts.manifest import digest_of
from hacrl_core.verification import Verdict, VerdictKind, verify_batch
from stages.partial import read_shard, write_shard
from stages.spec import Context

# Verdicts do not depend on their batch, so shards are cut by the clock; a fraction of a second is not worth a file.
FIRST_SHARD, SHARD_SECONDS, WORTH_SECONDS = 16, 5.0, 0.5


def verify_resumable(
    responses: Sequence[str],
    golds: Sequence[str],
    config: VerifyConfig,
    context: Context,
    *,
    token_counts: Sequence[int] | None = None,
) -> list[Verdict]:
    """Verify in shards of some seconds each. A verifier's own failures are not kept: the next run tries them again."""
    asked = [digest_of(pair)[:16] for pair in zip(responses, golds, strict=True)]
    found = _verdicts_on_disk(context.partial, asked)
    missing = [index for index in range(len(responses)) if index not in found]
    size, unsaved, worth = FIRST_SHARD, dict[int, Verdict](), 0.0
    while missing:
        part, missing = missing[:size], missing[size:]
        begun = time.perf_counter()
        verdicts = verify_batch(
            [responses[i] for i in part],
            [golds[i] for i in part],
            config,
            token_counts=None if token_counts is None else [token_counts[i] for i in part],
            on_progress=_checked(context, len(found), len(responses)),
        )
        seconds = time.perf_counter() - begun
        unsaved |= dict(zip(part, verdicts, strict=True))
        found |= unsaved
        worth += seconds
        if worth > WORTH_SECONDS and context.partial is not None:
            _save_verdicts(context.partial, asked, unsaved)
            unsaved, worth = {}, 0.0
        size = max(1, min(4 * size, int(size * SHARD_SECONDS / max(seconds, 1e-9))))
    return [found[index] for index in range(len(responses))]


def _verdicts_on_disk(folder: Path | None, asked: Sequence[str]) -> dict[int, Verdict]:
    """What earlier runs found out, by index; only where response and gold are still the same."""
    found: dict[int, Verdict] = {}
    for path in sorted(folder.glob("verdicts-*.json")) if folder is not None else ():
        for index, question, row in read_shard(path, "verdicts") or ():
            if index < len(asked) and asked[index] == question:
                found[index] = Verdict(**{**row, "verdict": VerdictKind(row["verdict"])})
    return found


def _save_verdicts(folder: Path, asked: Sequence[str], verdicts: dict[int, Verdict]) -> None:
    rows = [[i, asked[i], asdict(v)] for i, v in verdicts.items() if v.verdict is not VerdictKind.ERROR]
    if rows:
        write_shard(folder / f"verdicts-{rows[0][0]:07d}.json", "verdicts", rows)


def _checked(context: Context, before: int, total: int) -> Callable[[int, int], None]:
    """Verdicts come one by one and fast; ten times a second is enough for a bar."""
    told = time.perf_counter()

    def report(done: int, of: int) -> None:
        nonlocal told
        if done == of or time.perf_counter() - told > 0.1:
            told = time.perf_counter()
            context.progress(before + done, total, "checked")

    return report
