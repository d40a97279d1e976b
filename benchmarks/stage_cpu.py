"""CPU seconds of a command's stages, however busy the machine is: manifests have only the clock's seconds.

    python -m benchmarks.stage_cpu FILE COMMAND …

runs the command and writes twice a second how many CPU seconds each of its processes used: begin, end, process and
seconds. A second run appends to FILE. ``by_stage`` joins the rows with the times and processes of stages, which their
manifests have. It fits commands whose processes run one stage at a time.
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
    """CPU seconds that a process used between two times."""

    begin: float
    end: float
    process: str
    cpu: float


class Ran(NamedTuple):
    """When and in which process a stage ran."""

    name: str
    begin: float
    end: float
    process: str


def by_stage(slices: Sequence[Slice], ran: Iterable[Ran]) -> dict[str, float]:
    """Return the CPU seconds by name of stage, each slice evenly over its time; "" has what lies outside of stages."""
    found: dict[str, float] = {"": sum(s.cpu for s in slices)}
    for stage in ran:
        for s in slices:
            both = min(s.end, stage.end) - max(s.begin, stage.begin)
            if both > 0 and s.process == stage.process:
                share = s.cpu * both / (s.end - s.begin)
                found[stage.name] = found.get(stage.name, 0.0) + share
                found[""] -= share
    return found


def read(file: Path) -> list[Slice]:
    """Read what earlier runs wrote."""
    with file.open() as lines:
        return [Slice(float(begin), float(end), pid, float(cpu)) for begin, end, pid, cpu in csv.reader(lines)]


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
            begin, last = last, time.time()
            for pid, cpu in used.items():
                new = max(0.0, cpu - known.get(pid, 0.0))
                total += new
                if new > 0:
                    print(f"{begin:.3f},{last:.3f},{pid},{new:.3f}", file=out, flush=True)
            known |= used
        code = child.wait()
        # What processes used after they were last looked at.
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        rest = max(0.0, spent.ru_utime + spent.ru_stime - total)
        print(f"{last:.3f},{time.time():.3f},,{rest:.3f}", file=out)
    return code


if __name__ == "__main__":
    sys.exit(main())
