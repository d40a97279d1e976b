"""Imports vLLM once, then forks a worker whenever one is asked for: ``python -m hacrl_vllm_launcher FD PARENT``.

Importing vLLM takes most of a worker's start-up time, so the second agent, and a worker restarted after a crash, are up
in seconds. vLLM starts its own workers by fork in the same way. FD is a socket of whole messages; commands are spawn
(with three file descriptors: commands, results, log) and reap.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
REAP_SECONDS = 20.0


def main() -> None:
    """Import vLLM, say so, and fork workers until the parent is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    libc = ctypes.CDLL(None)
    # The signal comes when the *thread* that started us ends. While we import it waits for us, so its end is the
    # process's end; later the watch in _launch takes over.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # processes of a killed worker become ours to reap
    parent = int(sys.argv[2])
    if os.getppid() != parent:
        return  # it ended before we asked for the signal
    import vllm  # type: ignore[import-not-found]
    import vllm.engine.arg_utils  # type: ignore[import-not-found]
    import vllm.v1.engine.llm_engine  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if current_platform.is_cpu():  # on a GPU these may wake up CUDA, which does not survive a fork
        import vllm.v1.worker.cpu_worker  # type: ignore[import-not-found]

    libc.prctl(PR_SET_PDEATHSIG, 0)
    control.send(json.dumps({"version": vllm.__version__}).encode())
    _launch(control, parent)


def _launch(control: socket.socket, parent: int) -> None:
    workers: set[int] = set()
    while os.getppid() == parent:
        if not select.select([control], [], [], 1.0)[0]:
            continue
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not data:
            break
        command = json.loads(data)
        if command["op"] == "spawn":
            pid = os.fork()
            if pid == 0:
                _become_worker(control, fds, command["environment"])
            _own_group(pid)
            for fd in fds:
                os.close(fd)
            workers.add(pid)
            reply: dict[str, Any] = {"pid": pid}
        else:
            pid = command["pid"]  # reaped once only: afterwards the number may be another process's
            reply = {"status": _reap(pid) if pid in workers else None}
            workers.discard(pid)
        control.send(json.dumps(reply).encode())
    for pid in workers:
        _reap(pid)


def _become_worker(control: socket.socket, fds: list[int], environment: dict[str, str]) -> None:
    try:
        _own_group(0)
        control.close()
        commands, results, log = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        for fd in (commands, results):
            os.set_inheritable(fd, False)
        os.environ.update(environment)
        import hacrl_vllm_worker  # type: ignore[import-not-found]

        hacrl_vllm_worker.serve(commands, results)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _own_group(pid: int) -> None:
    """One signal then ends a worker and all that vLLM starts in it.

    Both sides of the fork do it, because either may run first.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)


def _reap(pid: int) -> int | None:
    """Kill the worker's process group and wait for it; return its exit status (negative: a signal)."""
    status = None
    deadline = time.monotonic() + REAP_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        try:
            found, code = os.waitpid(-pid, os.WNOHANG)
        except ChildProcessError:
            break
        if found == pid:
            status = os.waitstatus_to_exitcode(code)
        if not found:
            time.sleep(0.01)
    return status


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # with all of vLLM imported, an orderly end takes seconds and has nothing to tidy up
