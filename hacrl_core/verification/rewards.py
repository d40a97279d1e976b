"""Several rewards for one response: the weighted sum, its parts, and the verdict that follows."""

from collections.abc import Mapping, Sequence

from hacrl_core.config.verification import RewardConfig
from hacrl_core.verification.verdict import Verdict, VerdictKind


def combine(found: Mapping[str, Sequence[Verdict]], rewards: Mapping[str, RewardConfig]) -> list[Verdict]:
    """Return one verdict per response from the verdicts of each reward.

    The sum Σ weight·reward is scaled to [0, 1] by its lowest and highest possible value. A reward that does not apply
    to a response is left out of its sum. A reward that failed makes the whole verdict an ``error``: nothing is learned
    from half a sum. The first reward that applies decides between correct and incorrect.
    """
    ranges = {name: _range(verdicts, rewards[name]) for name, verdicts in found.items()}
    ends = [sorted(rewards[name].weight * end for end in ranges[name]) for name in found]
    low, high = sum(end[0] for end in ends), sum(end[1] for end in ends)
    rows = zip(*found.values(), strict=True)
    return [_one(dict(zip(found, row, strict=True)), rewards, ranges, low, high) for row in rows]


def _one(
    row: Mapping[str, Verdict],
    rewards: Mapping[str, RewardConfig],
    ranges: Mapping[str, tuple[float, float]],
    low: float,
    high: float,
) -> Verdict:
    verifier = "+".join(row)
    milliseconds = sum(verdict.milliseconds for verdict in row.values())
    applied = {name: verdict for name, verdict in row.items() if not verdict.absent}
    failed = next(((n, v) for n, v in applied.items() if v.verdict is VerdictKind.ERROR), None)
    if not applied or failed is not None:
        message = f"{failed[0]}: {failed[1].message}" if failed else "no reward applies"
        return Verdict(0.0, VerdictKind.ERROR, "", milliseconds, verifier, message=message)
    parts = {name: _raw(verdict, ranges[name]) for name, verdict in applied.items()}
    raw = sum(rewards[name].weight * value for name, value in parts.items())
    first = next(iter(applied.values()))
    metrics = {f"{name}/{metric}": value for name, v in applied.items() for metric, value in v.metrics.items()}
    inner = {f"{name}/{part}": value for name, v in applied.items() for part, value in v.parts.items()}
    return Verdict(
        min(1.0, max(0.0, (raw - low) / (high - low))),
        first.verdict,
        first.extracted_answer,
        milliseconds,
        verifier,
        raw_reward=raw,
        parts={**parts, **inner},
        metrics=metrics,
        raw_range=(low, high),
    )


def _raw(verdict: Verdict, ends: tuple[float, float]) -> float:
    """A reward in its own range; what earned nothing (no answer, no time) has the lowest."""
    return ends[0] + verdict.reward * (ends[1] - ends[0]) if verdict.raw_reward is None else verdict.raw_reward


def _range(verdicts: Sequence[Verdict], reward: RewardConfig) -> tuple[float, float]:
    """The range of a reward: as the config says, else as its task declares, else [0, 1]."""
    return reward.range or next((v.raw_range for v in verdicts if v.raw_range is not None), (0.0, 1.0))
