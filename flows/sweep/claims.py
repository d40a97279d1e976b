"""Claims answered with yes, no or not shown: each is a difference between two methods that must hold for every agent."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flows.sweep.comparison import LEVEL
from flows.sweep.results import AgentResult, CellResult
from flows.sweep.statistics import Difference, compare, holm, seeds_needed

Answer = Literal["yes", "no", "not shown", "not run"]
Measure = Callable[[AgentResult], float]


@dataclass(frozen=True)
class Claim:
    text: str
    method: str
    baseline: str
    expected: Literal["higher", "lower"] = "higher"
    measure: Measure = lambda agent: agent.after


@dataclass(frozen=True)
class Answered:
    claim: Claim
    answer: Answer
    seeds: int
    differences: Mapping[str, Difference]  # by agent
    corrected: Mapping[str, float | None]  # p by agent, after Holm's correction over all claims answered together
    family: int
    failed: tuple[str, ...] = ()  # methods of the claim of which a cell ended in an error

    def numbers(self, scale: float = 100.0, *, with_p: bool = True) -> str:
        parts = []
        for agent, d in self.differences.items():
            p = self.corrected[agent]
            tail = "" if p is None or not with_p else f", p {p:.3f}"
            interval = f"{scale * d.low:+.1f} to {scale * d.high:+.1f}" if d.seeds > 1 else "no interval"
            parts.append(f"{agent} {scale * d.mean:+.1f} ({interval}; {d.higher} of {d.seeds} seeds up{tail})")
        return "; ".join(parts) or "no finished cells"

    def why(self) -> str:
        """Why it is not shown, where failures or the number of seeds alone decide that."""
        if self.failed:
            return f"cells of {' and '.join(self.failed)} failed: what is left may be what went well"
        if self.answer == "not shown" and self.seeds and self.family * 2.0 ** (1 - self.seeds) >= LEVEL:
            noun = "seed" if self.seeds == 1 else "seeds"
            return f"{self.seeds} {noun} cannot show it, {seeds_needed(self.family)} could"
        return ""


def answer_claims(
    claims: Sequence[Claim],
    results: Sequence[CellResult],
    agents: Sequence[str],
    failed: Collection[str] = (),
) -> list[Answered]:
    """All claims given together are one family. Yes: every agent differs as claimed. No: some agent differs the other way (corrected
    for the number of agents, as any of them would do), none as claimed. Where cells failed, neither."""
    found = [{a: d for a in agents if (d := _difference(c, results, a)) is not None} for c in claims]
    corrected: list[dict[str, float | None]] = [{} for _ in claims]
    for agent in agents:
        ps = [differences[agent].p if agent in differences else None for differences in found]
        for place, p in enumerate(holm(ps)):
            corrected[place][agent] = p
    answered = []
    for claim, differences, ps_of in zip(claims, found, corrected, strict=True):
        signs = [_sign(differences[a], ps_of[a], claim.expected, len(differences)) for a in differences]
        seeds = min((d.seeds for d in differences.values()), default=0)
        family = sum(any(d.p is not None for d in differences.values()) for differences in found)
        lost = tuple(name for name in (claim.method, claim.baseline) if name in failed)
        answer = "not shown" if lost else _answer(signs)
        answered.append(Answered(claim, answer, seeds, differences, ps_of, family, lost))
    return answered


def _answer(signs: list[int]) -> Answer:
    if not signs:
        return "not run"
    if all(sign == 1 for sign in signs):
        return "yes"
    return "no" if -1 in signs and 1 not in signs else "not shown"


def _sign(difference: Difference, p: float | None, expected: str, agents: int) -> int:
    """1: as claimed, −1: the other way, 0: chance cannot be excluded."""
    as_claimed = (difference.mean > 0) == (expected == "higher")
    if p is None or (p if as_claimed else p * agents) >= LEVEL:
        return 0
    return 1 if as_claimed else -1


def _difference(claim: Claim, results: Sequence[CellResult], agent: str) -> Difference | None:
    mine, theirs = (
        {r.seed: claim.measure(r.agents[agent]) for r in results if r.variant == variant and agent in r.agents}
        for variant in (claim.method, claim.baseline)
    )
    common = [seed for seed in mine if seed in theirs]
    return compare([mine[s] for s in common], [theirs[s] for s in common]) if common else None


def drawdown(agent: AgentResult, width: int = 5) -> float:
    """How far the reward, smoothed over ``width`` iterations, ever fell below its best so far: 0 for training that only rises."""
    values = np.array([agent.reward[step] for step in sorted(agent.reward)])
    if len(values) < width:
        return 0.0
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    return float(np.max(np.maximum.accumulate(smooth) - smooth))
