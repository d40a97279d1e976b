"""What happens in the process of one program, from its fork off the zygote to its end.

The payload (program, input, arguments) arrives in a file in memory that only this process has read. Results leave in
another one. Neither holds what a test expects: there is nothing to find here, and nothing to gain from writing results
oneself, since a result is only what the program says its output is.
"""

import builtins
import contextlib
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from hacrl_core.verification.jail import kernel, landlock, seccomp, values

OK, RAISED, SYNTAX, MEMORY, FORBIDDEN, EXITED, OUTPUT = 0, 103, 104, 105, 106, 107, 108
_MOST_THREADS = 64
_OPEN_FILES = 64
_NOTE_CHARACTERS = 300
# Where descriptors are put aside; the zygote has none between these.
_FIRST_HIGH, _LAST_HIGH = 200, 300
_RESULTS, _RULESET = 4, 5
_LENGTH = struct.Struct(">I")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True, slots=True)
class Confinement:
    """How a program is confined; built once, by the zygote."""

    # A Landlock ruleset, or None where the kernel has none or the sandbox is off.
    ruleset: int | None
    # Packed instructions of a seccomp filter (``seccomp.program_filter``), or None.
    calls: bytes | None
    # Processes and threads of this user that do not belong to a program.
    processes: int
    address_space: int


@dataclass(frozen=True, slots=True)
class Request:
    """One run: what is done with the program, and its limits."""

    kind: str
    test: int
    cpu_seconds: float
    memory_mb: int
    output_bytes: int


def run(request: Request, descriptors: list[int], confinement: Confinement) -> NoReturn:
    """Be the program, then end; ``descriptors`` are the payload, the output, the note and perhaps a socket."""
    code = RAISED
    try:
        code = _run(request, descriptors, confinement)
    except BaseException as error:
        code = _why(error)
    finally:
        os._exit(code)


def _run(request: Request, descriptors: list[int], confinement: Confinement) -> int:
    kernel.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    payload = json.loads(_whole(descriptors[0]))
    is_script = request.kind == "stdin"
    given = os.memfd_create("stdin", 0)
    os.write(given, payload["inputs"][request.test].encode() if is_script else b"")
    os.lseek(given, 0, os.SEEK_SET)
    _arrange(given, descriptors, confinement.ruleset, is_script=is_script)
    _confine(request, confinement)
    gc.enable()
    with _noted():
        code = compile(payload["program"], "<program>", "exec", dont_inherit=True)
    module = ModuleType("__main__" if is_script else "program")
    sys.modules[module.__name__] = module
    with _noted():
        exec(code, module.__dict__)
    if request.kind == "calls":
        _answer_calls(module, payload["calls"])
    elif request.kind == "serve":
        _serve(module, socket.socket(fileno=_RESULTS))
    sys.stdout.flush()
    return OK


def _whole(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    parts = []
    done = 0
    while done < size:
        part = os.pread(descriptor, size - done, done)
        done += len(part)
        parts.append(part)
    return b"".join(parts)


def _arrange(given: int, descriptors: list[int], ruleset: int | None, *, is_script: bool) -> None:
    """Let 0 be the input, 1 a script's output, 2 nothing, 3 the note, 4 results or a socket, 5 the ruleset.

    Everything else is closed, the payload too.
    """
    nowhere = os.open("/dev/null", os.O_WRONLY)
    _, output, note, *connection = descriptors
    results = connection[0] if connection else output
    wanted = [given, output if is_script else nowhere, nowhere, note, results, nowhere if ruleset is None else ruleset]
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_HIGH) for descriptor in wanted]
    for number, descriptor in enumerate(moved):
        os.dup2(descriptor, number)
    os.closerange(_RULESET + 1, _LAST_HIGH)


def _confine(request: Request, confinement: Confinement) -> None:
    limits = {
        resource.RLIMIT_AS: confinement.address_space + (request.memory_mb << 20),
        resource.RLIMIT_FSIZE: request.output_bytes,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 1 << 20,
        resource.RLIMIT_CPU: int(request.cpu_seconds) + 2,
        resource.RLIMIT_NPROC: confinement.processes + _MOST_THREADS,
    }
    for which, limit in limits.items():
        hard = resource.getrlimit(which)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (limit, limit))
    if confinement.ruleset is not None:
        landlock.restrict(_RULESET)
    os.close(_RULESET)
    if confinement.calls is not None:
        seccomp.install(seccomp.for_process(confinement.calls, os.getpid()))


def fresh_interpreter() -> None:
    """Let nothing of the worker show to programs: its streams, arguments, environment. Called once, by the zygote.

    The streams belong to descriptors 0 to 2, which each program has its own of.
    """
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", newline="\n", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr, argv=["program.py"])
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)


@contextlib.contextmanager
def _noted() -> Any:
    """Write down why the program failed, and end with a code that says so."""
    try:
        yield
    except SystemExit as error:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(OK if error.code in (None, 0) else EXITED)
    except BaseException as error:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        code = _why(error)
        with contextlib.suppress(Exception):
            os.write(3, f"{type(error).__name__}: {error}"[:_NOTE_CHARACTERS].encode())
        os._exit(code)


def _why(error: BaseException) -> int:
    if isinstance(error, MemoryError):
        return MEMORY
    if isinstance(error, PermissionError):
        return FORBIDDEN
    if isinstance(error, SyntaxError | RecursionError) and error.__traceback__ is not None:
        deepest = error.__traceback__
        while deepest.tb_next:
            deepest = deepest.tb_next
        if deepest.tb_frame.f_code.co_filename != "<program>":
            return SYNTAX if isinstance(error, SyntaxError) else RAISED
    if isinstance(error, OSError) and error.errno == 27:
        return OUTPUT
    return RAISED


def find(module: ModuleType, name: str) -> Any:
    """Return what a test calls: a function, or a method (``Solution.solve``) of a class whose instance is made here."""
    first, *rest = name.split(".")
    found = module.__dict__[first] if first in module.__dict__ else getattr(builtins, first)
    for part in rest:
        found = getattr(found() if isinstance(found, type) else found, part)
    return found


def _answer_calls(module: ModuleType, calls: list[dict[str, Any]]) -> None:
    """Call the program's functions and write a line for each result."""
    for call in calls:
        try:
            arguments = [values.decode(argument) for argument in call["args"]]
            named = {name: values.decode(value) for name, value in call.get("kwargs", {}).items()}
            line = {"value": values.encode(find(module, call["name"])(*arguments, **named))}
        except MemoryError:
            raise
        except BaseException as error:
            line = _failure(error)
        os.write(_RESULTS, json.dumps(line).encode() + b"\n")


def _failure(error: BaseException) -> dict[str, Any]:
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    try:
        text = str(error)[:_NOTE_CHARACTERS]
    except BaseException:
        text = ""
    return {
        "error": type(error).__name__,
        "kinds": kinds,
        "text": text,
        "forbidden": isinstance(error, PermissionError),
    }


def _serve(module: ModuleType, connection: socket.socket) -> None:
    """Answer a checker's questions: names, calls, attributes and items. What is no plain data gets a number."""
    objects: list[Any] = []

    def reply(value: Any) -> dict[str, Any]:
        try:
            return {"value": values.encode(value)}
        except values.NotPlainError:
            objects.append(value)
            return {"object": len(objects) - 1, "kind": type(value).__name__}

    def argument(sent: Any) -> Any:
        return objects[sent["object"]] if isinstance(sent, dict) else values.decode(sent)

    def answer(question: dict[str, Any]) -> Any:
        if "name" in question:
            return find(module, question["name"])
        subject = objects[question["object"]]
        if "attribute" in question:
            return getattr(subject, question["attribute"])
        if "operation" in question:
            arguments = [argument(sent) for sent in question["args"]]
            return _OPERATIONS[question["operation"]](subject, *arguments)
        named = {name: argument(sent) for name, sent in question["kwargs"].items()}
        return subject(*(argument(sent) for sent in question["args"]), **named)

    while question := _receive(connection):
        try:
            line = reply(answer(question))
        except MemoryError:
            raise
        except BaseException as error:
            line = _failure(error)
        data = json.dumps(line).encode()
        connection.sendall(_LENGTH.pack(len(data)) + data)


_OPERATIONS: dict[str, Any] = {
    "len": len,
    "item": lambda subject, key: subject[key],
    "list": lambda subject: [item for item, _ in zip(subject, range(100_000), strict=False)],
    "text": str,
}


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    header = _exactly(connection, _LENGTH.size)
    if header is None:
        return None
    data = _exactly(connection, _LENGTH.unpack(header)[0])
    return None if data is None else dict(json.loads(data))


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            return None
        data += part
    return data
