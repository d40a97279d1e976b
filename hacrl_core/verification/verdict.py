"""The verdict on one response, the protocol of the verifiers that give it, and the reward that follows from it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from hacrl_core.config.verification import OverlongConfig, VerifyConfig


class VerdictKind(StrEnum):
    """What a verifier found out about a response."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    UNPARSEABLE = "unparseable"
    """No answer was found, or the answer is not one that a verifier may examine (see the gates)."""
    TIMEOUT = "timeout"
    ERROR = "error"
    """The verifier failed. This says nothing about the response: credit counts it and leaves it out."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one response with its reward."""

    reward: float
    """In [0, 1], what is learned from. An ``error`` carries 0.0, from which nothing is learned."""
    verdict: VerdictKind
    extracted_answer: str
    milliseconds: float
    verifier: str
    raw_reward: float | None = None
    """As the user's own function gave it, in its own range; None: the reward itself."""
    raw_range: tuple[float, float] | None = None
    """The lowest and highest reward of that function, where it is known."""
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    message: str = ""
    """Why the verifier failed."""
    absent: bool = False
    """The reward does not apply to this response; one of several rewards is then left out of the sum."""

    @property
    def raw(self) -> float:
        """The reward in the verifier's own range."""
        return self.reward if self.raw_reward is None else self.raw_reward


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a verifier decides in this process; ``kind`` None leaves the decision to a worker."""

    kind: VerdictKind | None
    answer: str


class Verifier(Protocol):
    """Judge what is cheap and safe in this process; leave what may hang, grow or crash to ``task`` in a worker."""

    name: str
    task: str | None
    """Entry point ``module:function`` that a worker calls with (gold, answer, options); None if never needed."""

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        """Judge one response, or ask for a worker."""
        ...


def metric_name(name: str) -> str:
    """Return the name of a part or metric as MLflow accepts it."""
    return re.sub(r"[^A-Za-z0-9_./-]+", "_", name)[:80] or "_"


def base_reward(kind: VerdictKind, *, well_formed: bool, format_reward: float) -> float:
    """Return 1 for a correct answer and ``format_reward`` for a wrong one in a complete box, else 0."""
    if kind is VerdictKind.CORRECT:
        return 1.0
    if kind is VerdictKind.ERROR:
        return 0.0
    return format_reward if well_formed else 0.0


def overlong_penalty(tokens: int, config: OverlongConfig) -> float:
    """Return 0 up to ``max_tokens − buffer_tokens``, then a linear rise to ``penalty`` at ``max_tokens`` and beyond."""
    start = config.max_tokens - config.buffer_tokens
    return config.penalty * min(1.0, max(0.0, (tokens - start) / config.buffer_tokens))


def shaped_reward(reward: float, tokens: int | None, overlong: OverlongConfig | None) -> float:
    """Subtract the overlong penalty, never below 0.

    An agent's capability is a mean of rewards, and the ratio of two capabilities must stay positive.
    """
    if overlong is None or tokens is None:
        return reward
    return max(0.0, reward - overlong_penalty(tokens, overlong))
