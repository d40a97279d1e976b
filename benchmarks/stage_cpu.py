"""CPU seconds of a command's stages, however busy the machine is: manifests have only the clock's seconds.

    python -m benchmarks.stage_cpu FILE COMMAND …

runs the command and writes twice a second how many CPU seconds its processes used: begin, end, seconds. A second run
appends to FILE. ``by_stage`` joins the rows with the times of stages. It fits commands that run one stage at a time.
"""

import csv
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

SECONDS = 0.5


class Slice(NamedTuple):
    """CPU seconds that were used between two times."""

    begin: float
    end: float
    cpu: float


class Ran(NamedTuple):
    """When a stage ran."""

    name: str
    begin: float
    end: float


def by_stage(slices: Sequence[Slice], ran: Iterable[Ran]) -> dict[str, float]:
    """Return the CPU seconds by name of stage, each slice evenly over its time; "" has what lies outside of stages."""
    found: dict[str, float] = {"": sum(s.cpu for s in slices)}
    for stage in ran:
        for s in slices:
            both = min(s.end, stage.end) - max(s.begin, stage.begin)
            if both > 0:
                share = s.cpu * both / (s.end - s.begin)
                found[stage.name] = found.get(stage.name, 0.0) + share
                found[""] -= share
    return found


def read(file: Path) -> list[Slice]:
    """Read what earlier runs wrote."""
    with file.open() as lines:
        return [Slice(*(float(value) for value in row)) for row in csv.reader(lines)]


def _used(root: psutil.Process) -> dict[int, float]:
    """Return the CPU seconds of the process and of all below it."""
    used = {}
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
            used[process.pid] = times.user + times.system
        except psutil.Error:
            pass  # it has just ended
    return used


def main() -> int:
    """Run the command under observation; returns its exit code."""
    child = subprocess.Popen(sys.argv[2:])
    root, known, last, total = psutil.Process(child.pid), dict[int, float](), time.time(), 0.0
    with Path(sys.argv[1]).open("a") as out:
        while child.poll() is None:
            time.sleep(SECONDS)
            try:
                used = _used(root)
            except psutil.Error:
                break
            new = sum(max(0.0, cpu - known.get(pid, 0.0)) for pid, cpu in used.items())
            known, begin, last, total = {**known, **used}, last, time.time(), total + new
            print(f"{begin:.3f},{last:.3f},{new:.3f}", file=out, flush=True)
        code = child.wait()
        # What processes used after they were last looked at.
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        rest = max(0.0, spent.ru_utime + spent.ru_stime - total)
        print(f"{last:.3f},{time.time():.3f},{rest:.3f}", file=out)
    return code


if __name__ == "__main__":
    sys.exit(main())
