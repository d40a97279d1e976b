"""Variants against the baseline, paired by seed, and what may be said about it in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flows.sweep.results import BOTH, CellResult
from flows.sweep.statistics import Difference, compare, holm, seeds_needed

LEVEL = 0.05
Verdict = Literal["better", "worse", "not shown"]


@dataclass(frozen=True)
class Comparison:
    """One variant, one outcome (an agent's accuracy, or the mean of all agents)."""

    variant: str
    agent: str
    mean: float
    deviation: float | None  # standard deviation over seeds
    seeds: tuple[int, ...]
    difference: Difference | None  # None for the baseline itself, or where no seed is common
    p_corrected: float | None
    compared: int  # comparisons in the family that was corrected for

    @property
    def verdict(self) -> Verdict:
        if self.difference is None or self.p_corrected is None or self.p_corrected >= LEVEL:
            return "not shown"
        return "better" if self.difference.mean > 0 else "worse"

    def words(self) -> str:
        """What the seeds allow to say, and what they do not."""
        d = self.difference
        if d is None:
            return "baseline" if self.seeds else "no finished cells"
        if d.p is None:
            return "one seed: nothing can be said about chance"
        if self.verdict != "not shown":
            return self.verdict
        if self.compared * d.smallest_p >= LEVEL:
            hint = "interval excludes 0, but " if d.low > 0 or d.high < 0 else ""
            return (
                f"not shown: {hint}{d.seeds} seeds cannot show it (smallest possible p {d.smallest_p:.3g} × {self.compared} "
                f"comparisons; {seeds_needed(self.compared)} seeds could)"
            )
        return "not shown"


def compare_variants(
    results: Sequence[CellResult], variants: Sequence[str], baseline: str, agents: Sequence[str]
) -> list[Comparison]:
    """For each outcome, all variants; Holm's correction runs over the variants of one outcome.

    A claim about every agent needs each of them to pass, which is stricter than a correction over agents would be.
    """
    found: list[Comparison] = []
    for agent in (*agents, BOTH):
        values = {v: {r.seed: _after(r, agent, agents) for r in results if r.variant == v} for v in variants}
        differences = {v: _paired(values[v], values[baseline]) if v != baseline else None for v in variants}
        corrected = dict(zip(variants, holm([d.p if d else None for d in differences.values()]), strict=True))
        family = sum(d is not None and d.p is not None for d in differences.values())
        for variant in variants:
            mine = list(values[variant].values())
            found.append(
                Comparison(
                    variant,
                    agent,
                    float(np.mean(mine)) if mine else float("nan"),
                    float(np.std(mine, ddof=1)) if len(mine) > 1 else None,
                    tuple(values[variant]),
                    differences[variant],
                    corrected[variant],
                    family,
                )
            )
    return found


def _paired(mine: dict[int, float], theirs: dict[int, float]) -> Difference | None:
    common = [seed for seed in mine if seed in theirs]
    return compare([mine[s] for s in common], [theirs[s] for s in common]) if common else None


def _after(result: CellResult, agent: str, agents: Sequence[str]) -> float:
    return float(np.mean([result.agents[a].after for a in (agents if agent == BOTH else (agent,))]))
