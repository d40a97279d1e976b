"""The processes that run what may hang, grow or crash.

The *spawner* is a fresh interpreter (never a fork of the caller, whose threads and torch would come along). It imports
the task's module once and forks a worker per request, so that replacing a killed worker takes milliseconds. The spawner
reads nothing hostile. When its control socket closes, the caller is gone: it kills its workers and ends. When the
spawner itself is killed, the kernel kills the workers.
"""

import ctypes
import importlib
import json
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

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct(">I")


def send(connection: socket.socket, message: Any) -> None:
    """Send one length-prefixed JSON message; with pickle, a worker that ran hostile input could reach its caller."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Return the next message; raise EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return json.loads(_exactly(connection, length))


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
    children: set[int] = set()
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
                    os.kill(request["kill"], signal.SIGKILL)
                continue
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            sys.path[:] = request["path"]
            if request["preload"] not in preloaded:
                importlib.import_module(request["preload"]).warm_up()
                preloaded.add(request["preload"])
            pid = os.fork()
            if pid == 0:
                control.close()
                _become_worker(socket.socket(fileno=descriptors[0]), request)
            children.add(pid)
            os.close(descriptors[0])
            send(control, {"pid": pid})
    except (EOFError, OSError):
        pass
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.discard(pid)


def _become_worker(connection: socket.socket, request: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # The spawner died between fork and prctl.
            if os.getppid() == 1:
                os._exit(1)
        limit = request["memory_mb"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # What user code prints must not mix with the caller's output.
        os.dup2(2, 1)
        serve(connection)
        code = 0
    except (EOFError, OSError, KeyboardInterrupt):
        code = 0
    finally:
        os._exit(code)


def serve(connection: socket.socket) -> None:
    """Answer groups of answers to one gold, one result each, in the main thread; a MemoryError ends the worker."""
    while True:
        group = receive(connection)
        sys.path[:] = group["path"]
        try:
            module, function = _entry_point(group["task"])
        except BaseException as error:
            send(connection, {"fatal": f"{type(error).__name__}: {error}"})
            continue
        if hasattr(module, "prepare_gold"):
            _guarded(module.prepare_gold, group["pairs"][0][0], "", {})
        send(connection, {"ready": True})
        for gold, answer in group["pairs"]:
            started = time.process_time()
            result = _guarded(function, gold, answer, group["options"])
            result["milliseconds"] = (time.process_time() - started) * 1000
            send(connection, result)
            if result.pop("exhausted", False):
                # The heap may still be full: a fresh worker is cheaper than a clean-up.
                os._exit(3)


def _guarded(
    function: Callable[[str, str, dict[str, Any]], Any], gold: str, answer: str, options: dict[str, Any]
) -> dict[str, Any]:
    try:
        return dict(function(gold, answer, options) or {})
    except MemoryError:
        return {"verdict": "error", "message": "out of memory", "exhausted": True}
    except RecursionError:
        return {"verdict": "unparseable", "message": "nested too deeply"}
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"verdict": "error", "message": f"{type(error).__name__}: {error}"[:500]}


def _entry_point(task: str) -> tuple[ModuleType, Callable[[str, str, dict[str, Any]], Any]]:
    module_name, _, name = task.partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{task} is not a function")
    if module_name == "hacrl_core.verification.symbolic":
        return module, function
    from hacrl_core.verification.verifiers import call_user_function

    return module, lambda gold, answer, options: call_user_function(function, answer, gold)
