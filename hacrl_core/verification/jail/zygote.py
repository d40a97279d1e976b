"""The zygote: a process of the worker's jail that forks one process per program, watches it and tells how it ended.

It is forked before the worker knows any problem, and passes descriptors on without reading them. So its memory, which
every program inherits, never holds a program, an input, an output or what a test expects.
"""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import time
from typing import Any, NoReturn

from hacrl_core.verification.jail import kernel, landlock, program, seccomp
from hacrl_core.verification.jail.enter import program_paths
from hacrl_core.verification.jail.program import Confinement, Request

MESSAGE_BYTES = 4096
_MOST_DESCRIPTORS = 8
_TICK = 0.002
# A process that used less than this share of the time slept; a loaded machine leaves more to one that computes.
_ASLEEP = 0.02
_LONGEST_SLEEP = 10
# Process 1, the worker, the zygote, a checker.
_OF_THE_JAIL = 4


def start(layers: dict[str, str], processes: int, *, off: bool) -> socket.socket:
    """Fork the zygote and return the socket to it; ``processes`` of this user are none of the jail's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            ours.close()
            _serve(theirs, _confinement(layers, processes, off=off))
        finally:
            os._exit(0)
    theirs.close()
    return ours


def _confinement(layers: dict[str, str], processes: int, *, off: bool) -> Confinement:
    held = not off and layers.get("Landlock") == ""
    ruleset = landlock.ruleset(program_paths(), (), network=False) if held else None
    calls = seccomp.program_filter() if not off and layers.get("seccomp") == "" else None
    return Confinement(ruleset, calls, processes + _OF_THE_JAIL, _address_space())


def _serve(connection: socket.socket, confinement: Confinement) -> NoReturn:
    kernel.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_room()
    program.fresh_interpreter()
    if confinement.calls is not None:
        seccomp.install(seccomp.zygote_filter())
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not data:
            os._exit(0)
        sent = json.loads(data)
        request, wall_seconds = Request(**sent["request"]), sent["wall_seconds"]
        pid = os.fork()
        if pid == 0:
            program.run(request, descriptors, confinement)
        for descriptor in descriptors:
            os.close(descriptor)
        ended = watch(pid, request.cpu_seconds, wall_seconds)
        connection.send(json.dumps(ended).encode())


def watch(pid: int, cpu_seconds: float, wall_seconds: float) -> dict[str, Any]:
    """Wait for a child's end, or kill it at a limit; return how it ended and the CPU seconds it used.

    The limit counts CPU time, so that a loaded machine changes no verdict. The wall clock ends what sleeps.
    """
    clock = ~pid << 3 | 2
    started = time.monotonic()
    late = False
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    cores = os.cpu_count() or 1
    try:
        while True:
            used = _used(clock)
            elapsed = time.monotonic() - started
            slept = elapsed >= wall_seconds and used < _ASLEEP * elapsed
            if used >= cpu_seconds or slept or elapsed >= _LONGEST_SLEEP * max(wall_seconds, cpu_seconds):
                late = True
                os.kill(pid, signal.SIGKILL)
            wait = min((cpu_seconds - used) / cores, max(wall_seconds - elapsed, 0.1))
            if poll.poll(1000 * max(_TICK, wait)):
                break
    finally:
        os.close(ended)
    _, status, usage = os.wait4(pid, 0)
    spent = usage.ru_utime + usage.ru_stime
    return {"code": os.waitstatus_to_exitcode(status), "late": late, "cpu_seconds": spent}


def _used(clock: int) -> float:
    with contextlib.suppress(OSError):
        return time.clock_gettime(clock)
    return 0.0


def _leave_room() -> None:
    """Lift this process's own limit of CPU time; each program gets one."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _address_space() -> int:
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 256 << 20
