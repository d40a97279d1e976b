"""Claims answered with yes, no, no difference or not shown: for the mean over the agents, and for every agent."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flows.sweep.results import BOTH, AgentResult, CellResult
from flows.sweep.statistics import LEVEL, Difference, compare_seeds, holm, largest, seeds_needed, smallest_p

Answer = Literal["yes", "no", "no difference", "not shown", "not run"]
Measure = Callable[[AgentResult], float]


@dataclass(frozen=True)
class Claim:
    """The measure of ``method`` is higher (or lower) than that of ``baseline``: in the mean over the agents, first."""

    text: str
    method: str
    baseline: str
    expected: Literal["higher", "lower"] = "higher"
    measure: Measure = lambda agent: agent.after


@dataclass(frozen=True)
class Answered:
    """A claim, its answers, and the numbers behind them."""

    claim: Claim
    # The primary answer: for the mean over the agents.
    answer: Answer
    # The secondary answer: for every agent at once.
    every: Answer
    seeds: int
    # By agent; the mean over the agents is the first.
    differences: Mapping[str, Difference]
    # After Holm's correction over all claims that are answered together: of the mean, and of the weakest agent.
    p_mean: float | None
    p_every: float | None
    family: int
    # Methods of the claim that have a cell that ended in an error.
    failed: tuple[str, ...] = ()

    def numbers(self, scale: float = 100.0, *, with_p: bool = True) -> str:
        """Write difference and interval of the mean and of every agent, and the corrected p of both answers."""
        parts = [f"{agent} {_numbers(d, scale)}" for agent, d in self.differences.items()]
        if with_p and self.p_mean is not None:
            parts[0] = f"{parts[0][:-1]}, p {_p(self.p_mean)})"
        if with_p and self.p_every is not None:
            parts.append(f"every agent p {_p(self.p_every)}")
        return "; ".join(parts) or "no finished cells"

    def why(self) -> str:
        """Say why it is not shown, if failures or the number of seeds alone decide that."""
        if self.failed:
            return f"cells of {' and '.join(self.failed)} failed: what is left may be what went well"
        if self.answer == "not shown" and self.seeds and self.family * smallest_p(self.seeds) >= LEVEL:
            noun = "seed" if self.seeds == 1 else "seeds"
            return f"{self.seeds} {noun} cannot show yes or no, {seeds_needed(self.family)} could"
        return ""


def answer_claims(
    claims: Sequence[Claim],
    results: Sequence[CellResult],
    agents: Sequence[str],
    failed: Collection[str] = (),
) -> list[Answered]:
    """Answer the claims as one family, with Holm's correction over the claims.

    Yes: the mean over the agents differs as claimed. No: it differs the other way. No difference: it is shown to be
    smaller than one point. The secondary answer asks the same of every agent: its p is the largest of theirs. If cells
    failed, nothing is shown.
    """
    found = [_differences(claim, results, agents) for claim in claims]
    primary = answers([_part(d, [BOTH], c) for c, d in zip(claims, found, strict=True)])
    every = answers([_part(d, agents, c) for c, d in zip(claims, found, strict=True)])
    family = sum(BOTH in d and d[BOTH].p is not None for d in found)
    answered = []
    for claim, differences, (answer, p), (answer_every, p_every) in zip(claims, found, primary, every, strict=True):
        lost = tuple(name for name in (claim.method, claim.baseline) if name in failed)
        seeds = differences[BOTH].seeds if differences else 0
        if lost:
            answer = answer_every = "not shown"
        answered.append(Answered(claim, answer, answer_every, seeds, differences, p, p_every, family, lost))
    return answered


@dataclass(frozen=True)
class Part:
    """What one claim's answer depends on: p of a difference and of sameness, and the directions that were found."""

    p: float | None
    p_same: float | None
    # True for each outcome (the mean, or every agent) that differs as claimed.
    as_claimed: tuple[bool, ...]


def answers(parts: Sequence[Part]) -> list[tuple[Answer, float | None]]:
    """Answer a family of claims and return the corrected p of each: Holm over differences, and Holm over sameness."""
    found: list[tuple[Answer, float | None]] = []
    corrected, same = holm([part.p for part in parts]), holm([part.p_same for part in parts])
    for part, p, p_same in zip(parts, corrected, same, strict=True):
        answer: Answer = "not shown"
        if not part.as_claimed:
            answer = "not run"
        elif p is not None and p < LEVEL and len(set(part.as_claimed)) == 1:
            answer = "yes" if part.as_claimed[0] else "no"
        elif p_same is not None and p_same < LEVEL:
            answer = "no difference"
        found.append((answer, p))
    return found


def _part(differences: Mapping[str, Difference], outcomes: Sequence[str], claim: Claim) -> Part:
    """Return the part of a claim about all of some outcomes: its p is the largest of theirs."""
    there = [differences[o] for o in outcomes if o in differences]
    as_claimed = tuple((d.mean > 0) == (claim.expected == "higher") for d in there)
    return Part(largest([d.p for d in there]), largest([d.p_same for d in there]), as_claimed)


def _differences(claim: Claim, results: Sequence[CellResult], agents: Sequence[str]) -> dict[str, Difference]:
    """Return the difference of the mean over the agents, then of each, on the seeds that both methods have."""
    found = {}
    for outcome, of in ((BOTH, agents), *((agent, (agent,)) for agent in agents)):
        mine, theirs = (
            {
                r.seed: float(np.mean([claim.measure(r.agents[a]) for a in of]))
                for r in results
                if r.variant == variant and all(a in r.agents for a in of)
            }
            for variant in (claim.method, claim.baseline)
        )
        difference = compare_seeds(mine, theirs)
        if difference is not None:
            found[outcome] = difference
    return found


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.0005 else "<0.001"


def _numbers(d: Difference, scale: float) -> str:
    interval = f"{scale * d.low:+.1f} to {scale * d.high:+.1f}" if d.seeds > 1 else "no interval"
    return f"{scale * d.mean:+.1f} ({interval}; {d.higher} of {d.seeds} seeds up)"


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
    Claim("Agents end better under HACPO than under GSPO", "hacpo", "gspo"),
    Claim("Agents end better under HACPO than under GSPO×2, at half its rollouts", "hacpo", "gspo_x2"),
    Claim("Naive sharing (foreign responses as one's own) is worse than GSPO", "naive", "gspo", "lower"),
    Claim("Naive sharing (ratio to the sampler) is worse than GSPO", "naive_sampler_ratio", "gspo", "lower"),
)
REMOVALS = tuple(Claim(f"Removing {what} hurts", name, "hacpo", "lower") for name, what in _MECHANISMS.items())
STABILITY = (
    Claim(
        "Without clipping training is unstable: the reward falls further from its best",
        "no_clipping",
        "hacpo",
        "higher",
        drawdown,
    ),
    Claim("Without clipping, agents end worse", "no_clipping", "hacpo", "lower"),
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
# Written down in docs/results/protocol.md before even.yaml ran: agents that were taught the same. One family.
EVEN = (
    Claim("HACPO ends higher than GSPO", "hacpo", "gspo"),
    Claim("HACPO ends higher than GSPO×2, at half its responses", "hacpo", "gspo_x2"),
    Claim("Shared GSPO ends higher than GSPO", "shared_gspo", "gspo"),
    Claim("Shared GSPO ends higher than GSPO×2, at half its responses", "shared_gspo", "gspo_x2"),
    Claim("Shared GSPO ends higher than HACPO", "shared_gspo", "hacpo"),
    Claim("Naive sharing (foreign responses as one's own) ends lower than GSPO", "naive", "gspo", "lower"),
)
