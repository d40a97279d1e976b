"""A discrete-event simulation of a stage graph: when each call starts and ends, and what the end waits for.

A worker runs one call at a time, the most urgent first and of equals the one that was ready first, as in
``flows/run/line.py``. A benchmark does not begin between an agent's score and update on the same GPUs. Calls of the
campaign's own process are light and never wait for one another.
"""

import heapq
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flows.plan.graph import Task
from flows.plan.rates import Rates, Workload, stage_gpus, stage_seconds
from flows.run.line import Urgency, urgency_of
from stages.spec import StageCall


@dataclass(frozen=True)
class Interval:
    """When a call ran, and the call whose end it waited for last (None: it could start at once)."""

    call: StageCall
    start: float
    end: float
    gpus: int
    after: int | None

    @property
    def seconds(self) -> float:
        """How long the call took."""
        return self.end - self.start


@dataclass(frozen=True)
class Simulation:
    """The simulated run of a campaign."""

    intervals: tuple[Interval, ...]

    @property
    def seconds(self) -> float:
        """The time until everything has ended."""
        return max(interval.end for interval in self.intervals)

    @property
    def stage_seconds(self) -> float:
        """The sum over all calls."""
        return sum(interval.seconds for interval in self.intervals)

    def iteration_ends(self) -> list[float]:
        """Return when every agent of an iteration has its new version, in the order of iterations."""
        ends: dict[int, float] = {}
        for interval in self.intervals:
            if interval.call.stage == "update" and interval.call.iteration is not None:
                number = interval.call.iteration
                ends[number] = max(ends.get(number, 0.0), interval.end)
        return [ends[number] for number in sorted(ends)]

    @property
    def iteration_seconds(self) -> float:
        """The time of one iteration: the median distance of two ends, or all there is with a single iteration."""
        return statistics.median(self._gaps() or [self.seconds])

    @property
    def mean_iteration_seconds(self) -> float:
        """The mean distance of two ends: above the median, because benchmarks and gradient cosines come seldom."""
        return statistics.fmean(self._gaps() or [self.seconds])

    @property
    def typical_iteration(self) -> int:
        """The last iteration that takes about the median time; 0 with a single iteration."""
        gaps = list(enumerate(self._gaps(), 1))
        return min(reversed(gaps), key=lambda gap: round(abs(gap[1] - self.iteration_seconds), 6), default=(0, 0.0))[0]

    def _gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.iteration_ends())]

    def idle_share(self, gpus: int) -> float:
        """Return the share of the GPUs' time in which no stage used them, while the campaign iterates."""
        begun = min((i.start for i in self.intervals if i.call.stage == "generate"), default=0.0)
        ended = max(self.iteration_ends(), default=self.seconds)
        busy = sum(i.gpus * max(0.0, min(i.end, ended) - max(i.start, begun)) for i in self.intervals)
        return max(0.0, 1.0 - busy / (gpus * (ended - begun))) if gpus and ended > begun else 0.0

    def critical_path(self, iteration: int) -> list[Interval]:
        """Return the chain of calls that the end of an iteration's last update waited for, within that iteration."""
        updates = [
            n for n, i in enumerate(self.intervals) if i.call.stage == "update" and i.call.iteration == iteration
        ]
        number: int | None = max(updates, key=lambda n: self.intervals[n].end)
        path: list[Interval] = []
        while number is not None and self.intervals[number].call.iteration == iteration:
            path.append(self.intervals[number])
            number = self.intervals[number].after
        return path[::-1]


def simulate(tasks: Sequence[Task], work: Workload, rates: Rates) -> Simulation:
    """Run the graph with the seconds of the table of rates."""
    return run_events(tasks, lambda call: stage_seconds(call, work, rates), lambda call: stage_gpus(call, work))


def run_events(
    tasks: Sequence[Task], seconds_of: Callable[[StageCall], float], gpus_of: Callable[[StageCall], int]
) -> Simulation:
    """Run the graph with any cost; a task needs only tasks before it."""
    left = [len(task.needs) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for need in task.needs:
            followers[need].append(number)
    waiting: dict[str, list[tuple[Urgency, float, int]]] = {}
    learning: set[tuple[str, int | None]] = set()  # worker and iteration: score has begun, update has not ended
    holder: dict[str, int] = {}  # worker → the call that it ran last
    busy: set[str] = set()
    ready_after: list[int | None] = [None] * len(tasks)
    found: list[Interval | None] = [None] * len(tasks)
    events: list[tuple[float, int]] = []

    def start(number: int, now: float) -> None:
        task, after = tasks[number], ready_after[number]
        if task.worker:
            before = holder.get(task.worker)
            ready = 0.0 if after is None else _ended(found[after])
            if before is not None and _ended(found[before]) > ready:
                after = before  # it was ready, and waited for its worker
            holder[task.worker] = number
            busy.add(task.worker)
            if task.call.stage == "score" and gpus_of(task.call):
                learning.add((task.worker, task.call.iteration))
        end = now + seconds_of(task.call)
        found[number] = Interval(task.call, now, end, gpus_of(task.call), after)
        heapq.heappush(events, (end, number))

    def put_off(number: int) -> bool:
        task = tasks[number]
        return task.call.stage == "evaluate" and any(worker == task.worker for worker, _ in learning)

    def offer(number: int, now: float) -> None:
        worker = tasks[number].worker
        if worker and (worker in busy or put_off(number)):
            heapq.heappush(waiting.setdefault(worker, []), (urgency_of(tasks[number].call), now, number))
        else:
            start(number, now)

    def next_of(worker: str, now: float) -> None:
        """Start the most urgent call that waits for a worker and may begin."""
        chosen = next((item for item in sorted(waiting.get(worker, ())) if not put_off(item[2])), None)
        if chosen is not None:
            waiting[worker].remove(chosen)
            heapq.heapify(waiting[worker])
            start(chosen[2], now)

    for number, open_needs in enumerate(left):
        if not open_needs:
            offer(number, 0.0)
    while events:
        now, number = heapq.heappop(events)
        worker = tasks[number].worker
        for follower in followers[number]:
            left[follower] -= 1
            if not left[follower]:
                ready_after[follower] = number
        if worker:
            busy.discard(worker)
            if tasks[number].call.stage == "update":
                learning.discard((worker, tasks[number].call.iteration))
            next_of(worker, now)
        for follower in followers[number]:
            if not left[follower]:
                offer(follower, now)
    return Simulation(tuple(interval for interval in found if interval is not None))


def _ended(interval: Interval | None) -> float:
    return 0.0 if interval is None else interval.end
