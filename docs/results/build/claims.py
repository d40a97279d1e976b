"""Claims answered with yes, no or not shown: differences between two methods that must hold for every agent."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flows.sweep.results import AgentResult, CellResult
from flows.sweep.statistics import LEVEL, Difference, compare_seeds, holm, seeds_needed, smallest_p

Answer = Literal["yes", "no", "not shown", "not run"]
Measure = Callable[[AgentResult], float]


@dataclass(frozen=True)
class Claim:
    """The measure of ``method`` is higher (or lower) than that of ``baseline``, for every agent."""

    text: str
    method: str
    baseline: str
    expected: Literal["higher", "lower"] = "higher"
    measure: Measure = lambda agent: agent.after


@dataclass(frozen=True)
class Answered:
    """A claim, its answer, and the numbers behind it by agent."""

    claim: Claim
    answer: Answer
    seeds: int
    differences: Mapping[str, Difference]
    # p after Holm's correction over all claims that are answered together.
    corrected: Mapping[str, float | None]
    family: int
    # Methods of the claim that have a cell that ended in an error.
    failed: tuple[str, ...] = ()

    def numbers(self, scale: float = 100.0, *, with_p: bool = True) -> str:
        """Write difference, interval and p of every agent."""
        parts = []
        for agent, d in self.differences.items():
            p = self.corrected[agent]
            tail = "" if p is None or not with_p else f", p {p:.3f}"
            interval = f"{scale * d.low:+.1f} to {scale * d.high:+.1f}" if d.seeds > 1 else "no interval"
            parts.append(f"{agent} {scale * d.mean:+.1f} ({interval}; {d.higher} of {d.seeds} seeds up{tail})")
        return "; ".join(parts) or "no finished cells"

    def why(self) -> str:
        """Say why it is not shown, if failures or the number of seeds alone decide that."""
        if self.failed:
            return f"cells of {' and '.join(self.failed)} failed: what is left may be what went well"
        if self.answer == "not shown" and self.seeds and self.family * smallest_p(self.seeds) >= LEVEL:
            noun = "seed" if self.seeds == 1 else "seeds"
            return f"{self.seeds} {noun} cannot show it, {seeds_needed(self.family)} could"
        return ""


def answer_claims(
    claims: Sequence[Claim],
    results: Sequence[CellResult],
    agents: Sequence[str],
    failed: Collection[str] = (),
) -> list[Answered]:
    """Answer the claims as one family, with Holm's correction.

    Yes: every agent differs as claimed. No: some agent differs the other way (corrected for the number of agents, any
    of which would do) and none as claimed. If cells failed, neither.
    """
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
    """Return 1 for a difference as claimed, −1 for one the other way, 0 where chance cannot be excluded."""
    as_claimed = (difference.mean > 0) == (expected == "higher")
    if p is None or (p if as_claimed else p * agents) >= LEVEL:
        return 0
    return 1 if as_claimed else -1


def _difference(claim: Claim, results: Sequence[CellResult], agent: str) -> Difference | None:
    mine, theirs = (
        {r.seed: claim.measure(r.agents[agent]) for r in results if r.variant == variant and agent in r.agents}
        for variant in (claim.method, claim.baseline)
    )
    return compare_seeds(mine, theirs)


def drawdown(agent: AgentResult, width: int = 5) -> float:
    """Return how far the reward, smoothed over ``width`` iterations, ever fell below its best so far."""
    values = np.array([agent.reward[step] for step in sorted(agent.reward)])
    if len(values) < width:
        return 0.0
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    return float(np.max(np.maximum.accumulate(smooth) - smooth))


# -- the claims of the page -------------------------------------------------------------------------------------------

_MECHANISMS = {
    "no_omega_advantage": "the capability-aware advantage",
    "no_omega_gradient": "ω in the gradient",
    "alpha_0": "the exponent α",
    "no_stepwise": "stepwise clipping",
}
CLAIMS = (
    Claim("Both agents end better under HACPO than under GSPO", "hacpo", "gspo"),
    Claim("Both agents end better under HACPO than under GSPO×2, at half its rollouts", "hacpo", "gspo_x2"),
    Claim("Naive sharing (foreign responses as one's own) is worse than GSPO", "naive", "gspo", "lower"),
    Claim("Naive sharing (ratio to the sampler) is worse than GSPO", "naive_sampler_ratio", "gspo", "lower"),
)
REMOVALS = tuple(
    Claim(f"Removing {what} hurts both agents", name, "hacpo", "lower") for name, what in _MECHANISMS.items()
)
STABILITY = (
    Claim(
        "Without clipping training is unstable: the reward falls further from its best",
        "no_clipping",
        "hacpo",
        "higher",
        drawdown,
    ),
    Claim("Without clipping, both agents end worse", "no_clipping", "hacpo", "lower"),
)
_RIVALS = {
    "hacpo": "HACPO",
    "gspo_x2": "GSPO×2",
    "naive": "Naive (as own)",
    "naive_sampler_ratio": "Naive (ratio to sampler)",
}
_EXTENSIONS = {
    "pessimistic": "Pessimistic",
    "undamped": "Pessimistic with α = 0",
    "closed": "Pessimistic with α = 0 and δ = 0",
    "calibrated": "Calibrated",
    "calibrated_pessimistic": "Calibrated and pessimistic",
}
# A table, and so a family of claims, for each method.
EXTENSIONS = {
    method: tuple(Claim(f"{method} beats {other}", name, against) for against, other in _RIVALS.items())
    for name, method in _EXTENSIONS.items()
}
# Written down before confirm.yaml ran with seeds of its own: what seeds 1 to 8 suggested. One family.
CONFIRMED = (
    Claim("HACPO beats GSPO×2", "hacpo", "gspo_x2"),
    Claim("Pessimistic beats GSPO×2", "pessimistic", "gspo_x2"),
    Claim("Pessimistic beats HACPO", "pessimistic", "hacpo"),
    Claim("Ratio to the sampler (Naive's second reading) beats GSPO×2", "naive_sampler_ratio", "gspo_x2"),
    Claim("Ratio to the sampler beats HACPO", "naive_sampler_ratio", "hacpo"),
    Claim("Pessimistic with α = 0 and δ = 0 beats GSPO×2", "closed", "gspo_x2"),
)
