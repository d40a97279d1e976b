"""Processes by what cannot be mistaken: a process id counts only with its start time, and everything that ``hacrl up`` started, down to
the last grandchild, carries a token in its environment. So ending is exact: never a stranger who got an old number, never an orphan.

Reads Linux' /proc; a few lines do what is needed, and the supervisor stays small.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TOKEN = "HACRL_SERVERS_TOKEN"
_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A process, for good: its number, when it began (clock ticks since boot) and which boot that was."""

    pid: int
    began: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Raises ProcessLookupError where there is none."""
        fields = _stat(pid)
        if fields is None:
            raise ProcessLookupError(pid)
        return cls(pid, int(fields[19]), boot_id())

    def alive(self) -> bool:
        fields = _stat(self.pid)
        return fields is not None and fields[0] != "Z" and int(fields[19]) == self.began and boot_id() == self.boot

    def uptime(self) -> float:
        with (_PROC / "uptime").open() as file:
            return float(file.read().split()[0]) - self.began / _TICKS

    def signal(self, number: signal.Signals) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def carrying(token: str) -> list[Process]:
    """Every living process of ours whose environment holds the token, ourselves left out."""
    mark = f"{TOKEN}={token}".encode()
    found = []
    for pid in _pids():
        try:
            environment = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if pid != os.getpid() and mark in environment:
                found.append(Process.of(pid))
        except (OSError, ProcessLookupError):  # gone meanwhile, or somebody else's
            continue
    return [process for process in found if process.alive()]


def tree(pid: int) -> list[int]:
    """The process and all that descend from it."""
    below: dict[int, list[int]] = {}
    for each in _pids():
        if (fields := _stat(each)) is not None:
            below.setdefault(int(fields[1]), []).append(each)
    found, open_ = [], [pid]
    while open_:
        found.append(open_.pop())
        open_ += below.get(found[-1], [])
    return found


def children(pid: int) -> list[Process]:
    """The processes that it started itself and that still live."""
    below = [Process.of(each) for each in _pids() if (fields := _stat(each)) is not None and int(fields[1]) == pid]
    return [process for process in below if process.alive()]


def memory(pids: Iterable[int]) -> int:
    """Bytes of RAM, shared pages counted in proportion (PSS)."""
    total = 0
    for pid in pids:
        try:
            lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def end(processes: Iterable[Process], patience: float) -> list[Process]:
    """Ask each to end, wait, then make it; returns those that had to be killed."""
    left = [process for process in processes if process.alive()]
    for process in left:
        process.signal(signal.SIGTERM)
    left = wait(left, patience)
    for process in left:
        process.signal(signal.SIGKILL)
    wait(left, 5)
    return left


def wait(processes: list[Process], seconds: float) -> list[Process]:
    """For their end; returns those that still live."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if process.alive()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit())


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/pid/stat from the state on (man proc's number minus 3); the name before them may hold anything."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
