"""The verdict on one response, and the protocol of the verifiers that give it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from hacrl_core.config.verification import VerifyConfig


class VerdictKind(StrEnum):
    CORRECT = "correct"
    INCORRECT = "incorrect"
    UNPARSEABLE = "unparseable"
    """No answer was found, or the answer is not one that a verifier may examine (see the gates)."""
    TIMEOUT = "timeout"
    ERROR = "error"
    """The verifier failed. Says nothing about the response: credit leaves it out and counts it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    reward: float
    """Finite. An ``error`` carries 0.0, which is not to be learned from."""
    verdict: VerdictKind
    extracted_answer: str
    milliseconds: float
    verifier: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a verifier says in this process, without a worker; ``kind`` None asks for a worker."""

    kind: VerdictKind | None
    answer: str


class Verifier(Protocol):
    """Cheap and safe comparisons happen here; whatever may hang, grow or crash is left to ``task`` in a worker."""

    name: str
    task: str | None
    """Entry point ``module:function`` that a worker calls with (gold, answer, config); None if never needed."""

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement: ...
