"""The goal of a campaign's last run, where the run was asked for so many more iterations: a file in its folder."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "goal.json"
TERMINAL = "terminal"


@dataclass(frozen=True)
class Goal:
    """The number of iterations that a run is to reach."""

    run: str  # a Prefect flow run's id, or TERMINAL
    more: int
    iterations: int


def read_goal(folder: Path) -> Goal | None:
    """Return the goal of the campaign's last run; None if it had none."""
    try:
        return Goal(**json.loads((folder / NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_goal(folder: Path, goal: Goal) -> None:
    """Keep the goal of the run that begins."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / "goal.draft"
    draft.write_text(json.dumps(asdict(goal)))
    os.replace(draft, folder / NAME)


def grows_by(folder: Path, iterations: int) -> int | None:
    """Return how many iterations each scheduled run adds, where the last of them set this number of iterations."""
    goal = read_goal(folder)
    return goal.more if goal is not None and goal.run != TERMINAL and goal.iterations == iterations else None
