"""Who comes next where one call at a time can run: in a worker process, or on a device that several share."""

import heapq
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stages.spec import StageCall

Urgency = tuple[int, int]


def urgency_of(call: object) -> Urgency:
    """Return a call's place in a line; lower comes first.

    Stages of an earlier iteration go before those of a later one, and the benchmarks of an iteration after its stages:
    an evaluation waits one iteration at most.
    """
    if not isinstance(call, StageCall):
        return (0, 0)
    iteration = -1 if call.iteration is None else call.iteration
    return (iteration, 1 if call.stage == "evaluate" else 0)


class Line:
    """Lets one call at a time through: the most urgent of those that wait, and of equals the one that came first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[Urgency, int]] = []
        self._numbers = itertools.count()
        self._busy = False

    @contextmanager
    def turn(self, urgency: Urgency) -> Iterator[None]:
        """Wait for one's turn and hold it inside."""
        with self._changed:
            mine = (urgency, next(self._numbers))
            heapq.heappush(self._waiting, mine)
            try:
                self._changed.wait_for(lambda: not self._busy and self._waiting[0] == mine)
                self._busy = True
            finally:
                self._waiting.remove(mine)
                heapq.heapify(self._waiting)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
