"""The processes that run what may hang, grow or crash.

The *spawner* is a fresh interpreter (never a fork of the caller, whose threads and torch would come along). It imports
the task's module once and forks a worker per request, so that replacing a killed worker takes milliseconds. The spawner
reads nothing hostile. When its control socket closes, the caller is gone: it kills its workers and ends. When the
spawner itself is killed, the kernel kills the workers.

A worker leads a session of its own and is killed with its whole process group. It sits in a jail (``jail/``), whose
process 1 takes everything in it along when it is killed. Where there are no namespaces, a process that left the group
is inherited by the spawner (Linux), which kills it when a worker ends.
"""

import contextlib
import errno
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from hacrl_core.place import module
from hacrl_core.verification.jail import cgroups, client, kernel
from hacrl_core.verification.jail.enter import Jail, fork_jailed
from hacrl_core.verification.jail.layers import SandboxRefusedError
from hacrl_core.verification.state import remember, same_chances

_LENGTH = struct.Struct(">I")
# No result is as long as this; a header that says so was not written by the worker.
_MOST_BYTES = 64 << 20
# Processes and threads that a user may have beyond those of now. The kernel counts all of the user's, not a worker's,
# except in a jail with a user namespace.
_MORE_PROCESSES = 4096
_MORE_PROCESSES_JAILED = 256
# A program's threads, and what its jail has besides: process 1, the worker, the zygote, a checker.
_PROGRAMS_THREADS = 72
# A jail holds the worker and its copies: a zygote, a program, a checker. Their shared pages count once.
_JAILS_SHARE = 2
_SYMBOLIC = module("hacrl_core.verification.symbolic")
_jailed = False


def send(connection: socket.socket, message: Any) -> None:
    """Send one length-prefixed JSON message; with pickle, a worker that ran hostile input could reach its caller."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Return the next message; raise EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return json.loads(_exactly(connection, length))


def take_message(received: bytearray) -> Any | None:
    """Remove the first whole message from the bytes of a worker and return it; None while it is incomplete.

    Raise ValueError where the bytes are no message: the user's code wrote to the worker's descriptors.
    """
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    end = _LENGTH.size + length
    if len(received) < end:
        return None
    message = json.loads(bytes(received[_LENGTH.size : end]))
    del received[:end]
    return message


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def run_spawner(control: socket.socket) -> None:
    """Serve ``spawn`` (with the worker's end of a socket) and ``kill`` until the caller goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if kernel.LINUX:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    # Workers, each with process 1 of its jail (0: it has none).
    children: dict[int, int] = {}
    # For all workers, which are forked from this process: loading it takes each of them a moment otherwise.
    importlib.import_module(module("hacrl_core.tasks.worker"))
    preloaded = {""}
    try:
        while True:
            readable, _, _ = select.select([control], [], [], 1.0)
            _reap(children)
            if not readable:
                continue
            request = receive(control)
            if "kill" in request:
                if request["kill"] in children:
                    _kill_group(request["kill"], children[request["kill"]])
                continue
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            sys.path[:] = request["path"]
            if request["preload"] not in preloaded:
                importlib.import_module(request["preload"]).warm_up()
                preloaded.add(request["preload"])
            send(control, _spawn(control, socket.socket(fileno=descriptors[0]), request, children))
    except (EOFError, OSError):
        pass
    finally:
        for pid, init in children.items():
            _kill_group(pid, init)
        for pid in [pid for pair in children.items() for pid in pair if pid]:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        _kill_strangers(set())
        for pid in children:
            cgroups.release(pid)


def _spawn(
    control: socket.socket, connection: socket.socket, request: dict[str, Any], children: dict[int, int]
) -> dict[str, Any]:
    """Fork a worker into its jail; return its process id and the layers of the jail."""

    def become_worker(layers: dict[str, str]) -> None:
        control.close()
        _become_worker(connection, request, layers)

    # Counted here: the jail does not show the machine's processes.
    request["processes"] = processes_of_this_user() if kernel.LINUX else 0
    memory = _JAILS_SHARE * (request["memory_mb"] << 20)
    most = _MORE_PROCESSES_JAILED + _PROGRAMS_THREADS
    pid, init, layers = fork_jailed(Jail.from_json(request["jail"]), become_worker, memory, most)
    children[pid] = init
    connection.close()
    return {"pid": pid, "layers": layers}


def _reap(children: dict[int, int]) -> None:
    """Collect workers that have ended, with what they started."""
    ended = [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]]
    for pid in ended:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if init := children.pop(pid):
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)
    if ended:
        _kill_strangers({pid for pair in children.items() for pid in pair})
    for pid in ended:
        cgroups.release(pid)


def _kill_group(pid: int, init: int) -> None:
    """Kill a worker with its jail and its process group, which it may not lead yet."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if init:
        with contextlib.suppress(ProcessLookupError):
            os.kill(init, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill_strangers(workers: set[int]) -> None:
    """Kill children of this process that are no workers: it inherits what a worker started and left behind."""
    while strangers := [pid for pid in children_of(os.getpid()) if pid not in workers]:
        for pid in strangers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children_of(parent: int) -> list[int]:
    """Return the processes that this one started and that have not ended (Linux)."""
    found = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                found.append(int(name))
    return found


def _become_worker(connection: socket.socket, request: dict[str, Any], layers: dict[str, str]) -> NoReturn:
    code = 1
    try:
        global _jailed
        _jailed = not request["jail"]["off"]
        os.setsid()
        connection.set_inheritable(False)
        own_count = layers.get("namespaces") == ""
        processes = 0 if own_count else request["processes"]
        _limit(request["memory_mb"] << 20, processes + (_MORE_PROCESSES_JAILED if own_count else _MORE_PROCESSES))
        # What user code prints must not mix with the caller's output.
        os.dup2(2, 1)
        # Before this process has seen any problem: the programs' processes inherit its memory.
        client.connect(layers, request["sandbox"], processes)
        serve(connection)
        code = 0
    except (EOFError, OSError, KeyboardInterrupt):
        code = 0
    finally:
        os._exit(code)


def _limit(memory: int, processes: int) -> None:
    """Limit this process and those it starts: address space, size of a file, number of processes, no core dumps."""
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: memory, resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":
        limits[resource.RLIMIT_NPROC] = processes
    for which, limit in limits.items():
        hard = resource.getrlimit(which)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(which, (limit, limit))


def processes_of_this_user() -> int:
    """Count this user's threads, as RLIMIT_NPROC does."""
    user, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.stat(f"/proc/{int(name)}").st_uid == user:
                count += os.stat(f"/proc/{name}/task").st_nlink - 2
    return count


def _limit_cpu(seconds: float) -> None:
    """Let this process, and each that it starts from now on, use so many more CPU seconds."""
    with contextlib.suppress(OSError, ValueError):  # user code may have lowered the limit itself
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))


def serve(connection: socket.socket) -> None:
    """Answer groups of answers to one gold, one result each, in the main thread; a MemoryError ends the worker.

    All groups have one verifier. Before each answer the random numbers begin anew, and a verifier of ours gets the
    settings back that its process had after the import. A user's function may want to keep what it has set up.
    """
    restore: Callable[[], None] | None = None
    while True:
        group = receive(connection)
        sys.path[:] = group["path"]
        try:
            module, function = _entry_point(group["task"], group["options"])
        except BaseException as error:
            send(connection, {"fatal": f"{type(error).__name__}: {error}{_denied(error)}"})
            continue
        if restore is None:
            # After the import, so that what a library sets when it is loaded holds for every answer.
            restore = remember() if _is_ours(group["task"]) else _nothing
        if module is not None and hasattr(module, "prepare_gold"):
            _start_alike(restore)
            _guarded(module.prepare_gold, group["pairs"][0][0], "", {})
        send(connection, {"ready": True})
        for index, (gold, answer) in enumerate(group["pairs"]):
            _start_alike(restore)
            started = time.process_time()
            _limit_cpu(group["cpu_seconds"])
            result = _guarded(function, gold, answer, group["options"])
            result["index"] = index
            result["milliseconds"] = (time.process_time() - started) * 1000
            send(connection, result)
            if result.pop("exhausted", False):
                # The heap may still be full: a fresh worker is cheaper than a clean-up.
                os._exit(3)


def _start_alike(restore: Callable[[], None]) -> None:
    same_chances()
    restore()


def _nothing() -> None:
    """Restore nothing."""


def _is_ours(task: str) -> bool:
    """Return whether a verifier is this project's or a library's, not a function of the user's."""
    from hacrl_core.tasks.loading import LIBRARIES

    return task.partition(":")[0] in (_SYMBOLIC, *LIBRARIES)


def _guarded(
    function: Callable[[str, str, dict[str, Any]], Any], gold: str, answer: str, options: dict[str, Any]
) -> dict[str, Any]:
    try:
        return dict(function(gold, answer, options) or {})
    except MemoryError:
        return {"verdict": "error", "message": "out of memory", "exhausted": True}
    except RecursionError:
        return {"verdict": "unparseable", "message": "nested too deeply"}
    except SandboxRefusedError as error:
        return {"refused": str(error)}
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"verdict": "error", "message": f"{type(error).__name__}: {error}"[:500] + _denied(error)}


_NETWORK_ERRORS = (errno.ENETUNREACH, errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.EAFNOSUPPORT)
_FILE_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EROFS)


def _denied(error: BaseException) -> str:
    """Return what to set where the sandbox may be the reason of an error; empty where it cannot be."""
    if not _jailed:
        return ""
    reason = getattr(error, "reason", None) or error.__cause__
    cause = reason if isinstance(reason, OSError) else error
    if isinstance(cause, socket.gaierror) or (isinstance(cause, OSError) and cause.errno in _NETWORK_ERRORS):
        return " (the sandbox gives a verifier no network; allow it with verify.sandbox_network: true)"
    hidden = isinstance(cause, OSError) and cause.errno in _FILE_ERRORS and cause.filename is not None
    if hidden or isinstance(error, ModuleNotFoundError):
        return (
            " (the sandbox shows a verifier its own folder and the Python installation, nothing else, and only /tmp "
            "can be written; allow a path with verify.sandbox_read)"
        )
    return ""


def _entry_point(
    task: str, options: dict[str, Any]
) -> tuple[ModuleType | None, Callable[[str, str, dict[str, Any]], Any]]:
    """Return our own symbolic comparison, or the user's verifier or task, loaded."""
    module_name, _, name = task.partition(":")
    if module_name == _SYMBOLIC:
        module = importlib.import_module(module_name)
        return module, getattr(module, name)
    from hacrl_core.tasks.worker import load_verifier

    return None, load_verifier(task, options)
