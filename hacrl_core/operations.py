"""torch's operations as spans of a profile."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hacrl_core.spans import RECORDER, Span

_MARK = "hacrl: the profile begins"
# A process that loses its core between two looks at the clocks would shift all operations, so it looks several times.
_MARKS = 5


@contextmanager
def operations() -> Iterator[None]:
    """Record torch's operations inside, each as a span of the kind ``op``."""
    from torch.profiler import ProfilerActivity, profile, record_function

    marks = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        # The profiler's times have a zero of their own; these operations are seen by both clocks.
        for _ in range(_MARKS):
            before = time.time()
            with record_function(_MARK):
                pass
            marks.append((time.time() - before, before))
        yield
    events = profiler.events() or []
    zero, began = _common_moment(marks, [event.time_range.start for event in events if event.name == _MARK])
    found = [
        (int(event.thread), event.time_range.start - zero, event.time_range.end - zero, str(event.name))
        for event in events
        if event.name != _MARK
    ]
    RECORDER.add([Span(name, "op", began + a / 1e6, began + b / 1e6, who, 0) for who, a, b, name in nested(found)])


def _common_moment(marks: list[tuple[float, float]], starts: list[float]) -> tuple[float, float]:
    """Return one moment by the profiler's clock and by ours: that of the mark that took least time."""
    if len(starts) != len(marks):  # the profiler has lost some
        return (starts[0] if starts else 0.0), marks[0][1]
    best = min(range(len(marks)), key=lambda number: marks[number][0])
    return sorted(starts)[best], marks[best][1]


def nested(events: list[tuple[int, float, float, str]]) -> list[tuple[int, float, float, str]]:
    """Sort (thread, start, end, name) by thread and start, and end none later than the one around it.

    The profiler's clock lets an operation end a microsecond after the one that called it.
    """
    around: list[tuple[int, float]] = []
    fitted = []
    for thread, start, end, name in sorted(events, key=lambda one: (one[0], one[1], -one[2])):
        while around and (around[-1][0] != thread or around[-1][1] <= start):
            around.pop()
        inside = min(end, around[-1][1]) if around else end
        around.append((thread, inside))
        fitted.append((thread, start, inside, name))
    return fitted
