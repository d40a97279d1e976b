"""What a rule finds."""

from dataclasses import dataclass, field
from enum import IntEnum


class Weight(IntEnum):
    """How near to the root a cause is: what comes first in this order explains what comes later."""

    BROKEN = 0  # the verifier, the gold answers or the numbers themselves
    ASKED_WRONGLY = 1  # template, BOS, EOS
    CUT_OR_UNREAD = 2  # truncation, the form of the answer
    TRAINING = 3  # learning rate, mismatch
    SHARING = 4  # windows, weights
    SIGNAL = 5  # groups that teach nothing
    DRIFT = 6  # entropy, length, reward
    MEASURING = 7  # benchmarks


@dataclass(frozen=True)
class Finding:
    """One cause: where it is seen, what it is, and one thing to do about it."""

    rule: str
    agent: str
    weight: Weight
    # Between 0 and 1: the more, the surer.
    strength: float
    what: str
    cause: str
    remedy: str
    evidence: list[str] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, float, str, str]:
        """The place among all findings: roots first, then the surer ones."""
        return int(self.weight), -self.strength, self.rule, self.agent
