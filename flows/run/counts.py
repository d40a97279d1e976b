"""What a run of a campaign did, in numbers: stages that ran, stages that were found, seconds."""

from dataclasses import dataclass

from flows.run.events import Listener
from stages.spec import Outcome, StageCall


@dataclass(frozen=True)
class Counts:
    """How many stages ran, how many were in the store already, and the seconds from the command to the last stage."""

    ran: int
    cached: int
    seconds: float


class Counter(Listener):
    """Counts stages that ran and stages that were found."""

    def __init__(self) -> None:
        """``seconds`` is set when the last stage is done, so that the terminal and the log say the same."""
        # A campaign that is walked again meets stages twice.
        self._ran: dict[str, bool] = {}
        self.seconds = 0.0

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """Count the stage."""
        self._ran[call.label] = self._ran.get(call.label, False) or not outcome.cached

    def counts(self) -> Counts:
        """Return the numbers so far."""
        ran = sum(self._ran.values())
        return Counts(ran, len(self._ran) - ran, self.seconds)
