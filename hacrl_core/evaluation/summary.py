"""One benchmark's outcome as metrics, overall and by tag."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hacrl_core.errors import ContractError
from hacrl_core.evaluation.metrics import Floats, avg_at_k, best_at_k, maj_at_k, pass_at_k, wilson_interval


@dataclass(frozen=True)
class Outcomes:
    """Every sample of every problem of one benchmark, problems × samples."""

    rewards_PS: Floats  # NaN where the verifier failed
    answers_PS: tuple[tuple[str, ...], ...]  # extracted answers, empty where there is none
    tokens_PS: NDArray[np.int64]  # length of the response
    truncated_PS: NDArray[np.bool_]  # cut off at max_tokens
    tags_P: tuple[Mapping[str, str], ...]

    def __post_init__(self) -> None:
        shape = np.shape(self.rewards_PS)
        shapes = [np.shape(self.tokens_PS), np.shape(self.truncated_PS), (len(self.answers_PS), *shape[1:])]
        if len(shape) != 2 or any(other != shape for other in shapes) or len(self.tags_P) != shape[0]:
            raise ContractError(
                f"evaluation: rewards {shape}, tokens, truncated, answers and tags differ in shape: {shapes}"
            )

    def select(self, problems: Sequence[int]) -> "Outcomes":
        rows = list(problems)
        return Outcomes(
            self.rewards_PS[rows],
            tuple(self.answers_PS[p] for p in rows),
            self.tokens_PS[rows],
            self.truncated_PS[rows],
            tuple(self.tags_P[p] for p in rows),
        )


def summarise(outcomes: Outcomes, ks: Sequence[int]) -> dict[str, float]:
    """avg@S with its Wilson interval; pass@k, best@k, maj@k for each k; tokens; shares cut off and not verified.

    A metric that no problem supports (all verifications failed) is left out rather than reported as NaN.
    """
    problems, samples = outcomes.rewards_PS.shape
    if problems == 0:
        return {"problems": 0.0, "samples": float(samples)}
    avg_P = avg_at_k(outcomes.rewards_PS)
    known_P = avg_P[~np.isnan(avg_P)]
    # Shaped rewards may leave [0, 1]; an interval of a share would then mean nothing.
    interval = wilson_interval(float(known_P.sum()), len(known_P)) if _are_shares(known_P) else None
    metrics = {
        "problems": float(problems),
        "samples": float(samples),
        f"avg@{samples}": _mean(known_P),
        f"avg@{samples}/low": interval.low if interval else None,
        f"avg@{samples}/high": interval.high if interval else None,
        "tokens_mean": float(outcomes.tokens_PS.mean()),
        "tokens_max": float(outcomes.tokens_PS.max()),
        "tokens_total": float(outcomes.tokens_PS.sum()),
        "truncated_share": float(outcomes.truncated_PS.mean()),
        "unverified_share": float(np.isnan(outcomes.rewards_PS).mean()),
    }
    for k in dict.fromkeys(ks):
        metrics[f"pass@{k}"] = _mean(pass_at_k(outcomes.rewards_PS, k))
        metrics[f"best@{k}"] = _mean(best_at_k(outcomes.rewards_PS, k))
        metrics[f"maj@{k}"] = _mean(maj_at_k(outcomes.rewards_PS, outcomes.answers_PS, k))
    return {name: value for name, value in metrics.items() if value is not None}


def by_tag(outcomes: Outcomes, ks: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    """The same metrics for each value of each tag, e.g. ``["level"]["5"]["avg@1"]``; values sorted, numbers as numbers."""
    members: dict[str, dict[str, list[int]]] = {}
    for index, tags in enumerate(outcomes.tags_P):
        for name, value in tags.items():
            members.setdefault(name, {}).setdefault(value, []).append(index)
    return {
        name: {value: summarise(outcomes.select(values[value]), ks) for value in sorted(values, key=_natural)}
        for name, values in sorted(members.items())
    }


def _natural(value: str) -> tuple[int, int, str]:
    return (0, int(value), "") if value.isascii() and value.isdigit() else (1, 0, value)


def _are_shares(values: Floats) -> bool:
    return bool(len(values) and values.min() >= 0 and values.max() <= 1)


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
