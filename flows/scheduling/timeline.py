"""The timeline and the log lines of a campaign's run page in Prefect.

One bar stands for one agent and iteration. Iterations that are shorter than a few seconds share a bar, and no bar is
shorter than a small part of the run so far: a campaign of any length has some hundred bars. A stage that takes long has
a bar of its own, which appears while it runs, and so has a stage that failed. Stages found in the store share a bar in
the state Cached. This module only decides what there is to tell; ``pages.py`` sends it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID, uuid4

from flows.run.events import Listener
from stages.spec import Outcome, StageCall

# A stage that runs for longer has a bar of its own.
LONG_SECONDS = 20.0
# Iterations that are shorter share a bar.
SHORT_SECONDS = 15.0
# No bar is shorter than the run so far divided by this.
BARS_SO_FAR = 100
WARNING, INFO, ERROR = 30, 20, 40

State = Literal["Running", "Completed", "Failed", "Cancelled", "Cached"]


@dataclass(frozen=True)
class BarState:
    """A bar and the state that it entered."""

    id: UUID
    # Groups bars in Prefect's lists: an agent, or a stage.
    kind: str
    name: str
    state: State
    began: float
    at: float
    message: str = ""


@dataclass(frozen=True)
class LogLine:
    """A line of the run page's log; ``bar`` is the bar that shows it too."""

    at: float
    level: int
    text: str
    bar: UUID | None = None


@dataclass
class _Bar:
    """A bar that is still open: an agent's iterations since it began."""

    agent: str
    first: int
    began: float
    last: int
    ended: float
    id: UUID = field(default_factory=uuid4)
    seconds: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.agent} {_iterations(self.first, self.last)}"

    def told(self) -> str:
        parts = [f"reward {sum(self.rewards) / len(self.rewards):.3f}"] if self.rewards else []
        return ", ".join([*parts, *(f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items())])


class Timeline(Listener):
    """Gathers what happened into bars and lines; ``take`` returns what is new since it was called last."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._begun = clock()
        self._lock = threading.Lock()
        self._running: dict[str, tuple[StageCall, float]] = {}
        # Label → bar of a stage that runs for long.
        self._long: dict[str, UUID] = {}
        self._bars: dict[str, _Bar] = {}
        self._cached: list[StageCall] = []
        self._states: list[BarState] = []
        self._lines: list[LogLine] = []

    # -- what happens ----------------------------------------------------------------------------------------------

    def stage_started(self, call: StageCall, why: list[str]) -> None:
        """Begin a bar for the agent's iteration, unless the present one is too short to end."""
        now = self._clock()
        with self._lock:
            self._end_cached(now)
            self._running[call.label] = (call, now)
            if why:
                self._lines.append(LogLine(now, INFO, f"{call.title} runs again: {'; '.join(why)}"))
            if call.iteration is None:  # a first version
                self._begin_own(call, now)
            if not call.agent or call.iteration is None:
                return
            bar = self._bars.get(call.agent)
            if bar is not None and call.iteration > bar.last:
                bar.last = call.iteration
                if bar.ended - bar.began >= max(SHORT_SECONDS, (now - self._begun) / BARS_SO_FAR):
                    bar.last = call.iteration - 1
                    self._end(bar, "Completed", bar.ended)
                    bar = None
            if bar is None:
                bar = self._bars[call.agent] = _Bar(call.agent, call.iteration, now, call.iteration, now)
                self._states.append(BarState(bar.id, bar.agent, bar.name, "Running", now, now))

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """Add the stage to its agent's bar, or end its own; one from the store waits for the others of its stretch."""
        now = self._clock()
        with self._lock:
            if outcome.cached and call.label not in self._running:
                self._cached.append(call)
                return
            _, began = self._running.pop(call.label, (call, now))
            if (own := self._long.pop(call.label, None)) is not None:
                self._states.append(BarState(own, call.stage, call.title, "Completed", began, now))
                self._lines.append(LogLine(now, INFO, f"{call.title}: {now - began:.1f} s", own))
            bar = self._bars.get(call.agent)
            if bar is None:
                return
            bar.ended = now
            bar.seconds[call.stage] = bar.seconds.get(call.stage, 0.0) + outcome.seconds
            if "verify/reward_mean" in outcome.metrics:
                bar.rewards.append(outcome.metrics["verify/reward_mean"])

    def stage_failed(self, call: StageCall, problem: BaseException) -> None:
        """Show the stage as a failed bar of its own."""
        now = self._clock()
        with self._lock:
            _, began = self._running.pop(call.label, (call, now))
            own, told = self._long.pop(call.label, None) or uuid4(), str(problem)
            self._states.append(BarState(own, call.stage, call.title, "Failed", began, now, told))
            self._lines.append(LogLine(now, ERROR, told, own))

    def warn(self, message: str) -> None:
        """Write it into the log of the page."""
        with self._lock:
            self._lines.append(LogLine(self._clock(), WARNING, message))

    def end(self, *, complete: bool) -> None:
        """End all bars; those of a campaign that is stopped are cancelled."""
        now = self._clock()
        with self._lock:
            self._end_cached(now)
            for bar in list(self._bars.values()):
                self._end(bar, "Completed" if complete else "Cancelled", now)
            for label, own in self._long.items():
                call, began = self._running[label]
                self._states.append(BarState(own, call.stage, call.title, "Cancelled", began, now))
            self._long.clear()

    # -- what there is to tell -------------------------------------------------------------------------------------

    def take(self) -> tuple[list[BarState], list[LogLine]]:
        """Return what is new; stages that have become long get their bars now."""
        now = self._clock()
        with self._lock:
            for label, (call, began) in self._running.items():
                if now - began > LONG_SECONDS and label not in self._long:
                    self._begin_own(call, began)
            states, self._states = self._states, []
            lines, self._lines = self._lines, []
        return states, lines

    def _begin_own(self, call: StageCall, began: float) -> None:
        own = self._long[call.label] = uuid4()
        self._states.append(BarState(own, call.stage, call.title, "Running", began, began))

    def _end(self, bar: _Bar, state: State, at: float) -> None:
        self._bars.pop(bar.agent, None)
        self._states.append(BarState(bar.id, bar.agent, bar.name, state, bar.began, at, bar.told()))
        self._lines.append(LogLine(at, INFO, f"{bar.name}: {bar.told()}", bar.id))

    def _end_cached(self, now: float) -> None:
        found, self._cached = self._cached, []
        if found:
            name = _name(found)
            self._states.append(BarState(uuid4(), "from the store", name, "Cached", now, now, "found in the store"))
            self._lines.append(LogLine(now, INFO, f"{name}: found in the store"))


def _name(found: list[StageCall]) -> str:
    if len(found) == 1:
        return found[0].title
    numbers = sorted({call.iteration for call in found if call.iteration is not None})
    where = f", {_iterations(numbers[0], numbers[-1])}" if numbers else ""
    return f"{len(found)} stages from the store{where}"


def _iterations(first: int, last: int) -> str:
    """Name iterations, which the record counts from 0, as people count them: from 1."""
    return f"iteration {first + 1}" if first == last else f"iterations {first + 1} to {last + 1}"
