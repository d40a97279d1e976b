"""Processes that cannot be mistaken for others.

A process id counts only with its start time, and every process that ``hacrl up`` started, down to the last grandchild,
carries a token in its environment. So ``hacrl down`` never signals a process that reused an old id, and leaves no
orphan.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

TOKEN = "HACRL_SERVERS_TOKEN"
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# The kernel's own threads are children of this process id and have no environment.
_KERNEL = 2
_BEGINNING = 0.05


@dataclass(frozen=True)
class Process:
    """A process by its id, its start time (clock ticks since boot) and the boot that it belongs to.

    Unlike the time of day, ticks since boot do not change when the clock is adjusted.
    """

    pid: int
    began: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Return the process that has this id now; raise ProcessLookupError where there is none."""
        try:
            return cls(pid, _start_ticks(psutil.Process(pid)), _boot_id())
        except psutil.Error:
            raise ProcessLookupError(pid) from None

    def alive(self) -> bool:
        """Return whether this very process still runs; a zombie does not."""
        try:
            current = psutil.Process(self.pid)
            same = _start_ticks(current) == self.began and current.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return same and _boot_id() == self.boot

    def uptime(self) -> float:
        """Return the seconds since the process started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.began / _TICKS_PER_SECOND

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is alive."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def processes_with_token(token: str) -> list[Process]:
    """Return every living process whose environment holds the token, except this one."""
    found: list[Process] = []
    blank = _add_those_with_token(token, psutil.process_iter(), found)
    if blank:
        # A process has no environment yet for a moment after it began to run another program.
        time.sleep(_BEGINNING)
        _add_those_with_token(token, blank, found)
    return [process for process in found if process.alive()]


def _add_those_with_token(
    token: str, processes: Iterable[psutil.Process], found: list[Process]
) -> list[psutil.Process]:
    """Add the processes that have the token to ``found``; return those of users that have no environment at all."""
    blank = []
    for process in processes:
        # A process may end meanwhile, or belong to another user.
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ() if process.pid != os.getpid() else {TOKEN: ""}
            if environment.get(TOKEN) == token:
                found.append(Process.of(process.pid))
            elif not environment and _KERNEL not in (process.pid, process.ppid()):
                blank.append(process)
    return blank


def process_tree(pid: int) -> list[int]:
    """Return the ids of the process and of all its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


def child_processes() -> list[Process]:
    """Return the processes that this one started and that are still alive."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            found.append(Process.of(child.pid))
    return [process for process in found if process.alive()]


def memory(pids: Iterable[int]) -> int:
    """Return the bytes of RAM that the processes use; shared pages count in proportion (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += int(psutil.Process(pid).memory_full_info().pss)
    return total


def terminate(processes: Iterable[Process], patience: float) -> list[Process]:
    """Ask each process to end, wait ``patience`` seconds, then kill the rest. Return those that had to be killed."""
    left = [process for process in processes if process.alive()]
    for process in left:
        process.signal(signal.SIGTERM)
    left = wait_for_exit(left, patience)
    for process in left:
        process.signal(signal.SIGKILL)
    wait_for_exit(left, 5)
    return left


def wait_for_exit(processes: list[Process], seconds: float) -> list[Process]:
    """Wait until the processes have ended; return those that are still alive after ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if process.alive()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _start_ticks(process: psutil.Process) -> int:
    """psutil adds the time of boot to the kernel's clock ticks; this takes it off again."""
    seconds: float = process.create_time() - psutil.boot_time()
    return round(seconds * _TICKS_PER_SECOND)


def _boot_id() -> str:
    """The kernel's name for this boot; psutil does not offer it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
