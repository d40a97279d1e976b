"""Human feedback on rollouts, read back from MLflow: verdicts that a person gave, beside the verifier's.

It is a list of its own in the campaign's folder. No artifact changes: verdicts are cached by their content, and what an
agent learned from them cannot be taken back.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hacrl_core.artifacts.files import replace_synced

NAME = "feedback.json"
RIGHT, WRONG = "correct", "incorrect"


@dataclass(frozen=True)
class Label:
    """What one person said about one rollout. Its iteration counts from 1."""

    rollout: str
    agent: str
    iteration: int
    # The verifier's verdict, and the person's.
    said: str
    verdict: str
    who: str
    # Seconds since the epoch.
    at: float
    rationale: str
    trace: str
    # MLflow's id of the assessment.
    id: str

    @property
    def is_miss(self) -> bool:
        """Say whether the verifier rewarded a wrong answer, or did not reward a right one."""
        return (self.said == RIGHT) != (self.verdict == RIGHT)


def read_labels(folder: Path) -> list[Label]:
    """Return the human verdicts of a campaign; none where there are none, or where the file cannot be read."""
    try:
        return [Label(**line) for line in json.loads((folder / NAME).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def write_labels(folder: Path, labels: Sequence[Label]) -> Path:
    """Replace the human verdicts of a campaign."""
    lines = [asdict(label) for label in sorted(labels, key=lambda label: (label.iteration, label.agent, label.rollout))]
    replace_synced(folder / NAME, json.dumps(lines, indent=1, ensure_ascii=False) + "\n")
    return folder / NAME


def by_rollout(labels: Sequence[Label]) -> dict[str, Label]:
    """Return each rollout's newest label."""
    return {label.rollout: label for label in sorted(labels, key=lambda label: label.at)}


def counted(labels: Sequence[Label]) -> str:
    """Say in one line how often people and verifier disagree."""
    newest = by_rollout(labels).values()
    rejected = sum(label.is_miss and label.verdict == RIGHT for label in newest)
    accepted = sum(label.is_miss and label.verdict != RIGHT for label in newest)
    return (
        f"{len(newest)} labelled: {len(newest) - rejected - accepted} agree with the verifier, "
        f"{rejected} right but not rewarded, {accepted} wrong but rewarded"
    )
