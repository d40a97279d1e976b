"""Run a program from a verifier: the worker's side of the zygote.

A verifier calls ``run_script``, ``run_calls`` or ``Remote`` objects of ``checks``; the program runs in a process of its
own, and what comes back is text or plain data, which the verifier compares.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hacrl_core.verification.jail import layers as layer_rules
from hacrl_core.verification.jail import program, values, zygote
from hacrl_core.verification.jail.layers import Mode, SandboxRefusedError

Ending = Literal["ok", "error", "syntax", "memory", "forbidden", "timeout", "output", "killed"]
_ENDINGS: dict[int, Ending] = {
    program.OK: "ok",
    program.RAISED: "error",
    program.EXITED: "error",
    program.SYNTAX: "syntax",
    program.MEMORY: "memory",
    program.FORBIDDEN: "forbidden",
    program.OUTPUT: "output",
}


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """What one run of a program may use."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 20.0
    memory_mb: int = 256
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """How one run of a program ended, and what it wrote."""

    ending: Ending
    output: str
    note: str
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function that a program defines, or of a method (``Solution.solve``)."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a call gave: a value of plain data, or the error that it raised."""

    value: Any = None
    error: str = ""
    forbidden: bool = False


_zygote: socket.socket | None = None
_refused = "programs run in a verifier's worker only; call this from verify(response, problem)"


def connect(layers: dict[str, str], mode: Mode | None, processes: int = 0) -> None:
    """Start this worker's zygote; called once, before the worker has seen any problem.

    ``processes`` is how many the user has that do not belong to the jail, where the kernel counts them together.
    """
    global _zygote, _refused
    missing = [] if mode in ("off", "best") else layer_rules.lacking(layers, programs=True)
    if missing:
        _refused = layer_rules.refusal(missing, "programs")
        return
    _zygote = zygote.start(layers, processes, off=mode == "off")


def run_script(source: str, inputs: Sequence[str], limits: ProgramLimits) -> Iterator[Run]:
    """Run a whole program once per input, a fresh process each; yield what it wrote to its standard output."""
    with _memory({"program": source, "inputs": list(inputs)}) as payload:
        for number in range(len(inputs)):
            yield _one_run("stdin", number, payload, limits)


def run_calls(source: str, calls: Sequence[Call], limits: ProgramLimits) -> tuple[Run, list[Result]]:
    """Run a program and then its functions, all in one process; return how it ended and a result per call made."""
    sent = [
        {
            "name": call.name,
            "args": [values.encode(value) for value in call.args],
            "kwargs": {name: values.encode(value) for name, value in (call.kwargs or {}).items()},
        }
        for call in calls
    ]
    with _memory({"program": source, "calls": sent}) as payload:
        run = _one_run("calls", 0, payload, limits)
    lines = run.output.splitlines()[: len(calls)]
    return run, [_result(line) for line in lines]


@contextlib.contextmanager
def serving(source: str, limits: ProgramLimits) -> Iterator[tuple[socket.socket, list[Run]]]:
    """Run a program that answers questions over the socket; the list gets how it ended when the block is left."""
    ended: list[Run] = []
    ours, theirs = socket.socketpair()
    with _memory({"program": source}) as payload, _memory(None) as output, _memory(None) as note:
        try:
            _ask("serve", 0, [payload, output, note, theirs.fileno()], limits)
            theirs.close()
            yield ours, ended
        finally:
            ours.close()
            theirs.close()
            ended.append(_ended(output, note, limits))


def _one_run(kind: str, number: int, payload: int, limits: ProgramLimits) -> Run:
    with _memory(None) as output, _memory(None) as note:
        _ask(kind, number, [payload, output, note], limits)
        return _ended(output, note, limits)


def _ask(kind: str, number: int, descriptors: list[int], limits: ProgramLimits) -> None:
    if _zygote is None:
        raise SandboxRefusedError(_refused)
    request = program.Request(kind, number, limits.cpu_seconds, limits.memory_mb, limits.output_bytes)
    message = json.dumps({"request": asdict(request), "wall_seconds": limits.wall_seconds}).encode()
    socket.send_fds(_zygote, [message], descriptors)


def _ended(output: int, note: int, limits: ProgramLimits) -> Run:
    assert _zygote is not None
    data = _zygote.recv(zygote.MESSAGE_BYTES)
    if not data:
        raise EOFError("the zygote ended")
    end = json.loads(data)
    ending = "timeout" if end["late"] else _ENDINGS.get(end["code"], "killed")
    if end["code"] in (-24, -9) and end["cpu_seconds"] >= limits.cpu_seconds:
        ending = "timeout"
    text = _read(output, limits.output_bytes)
    if len(text) >= limits.output_bytes:
        ending = "output"
    why = _read(note, 4096).decode("utf-8", "replace")
    return Run(ending, text.decode("utf-8", "replace"), why, float(end["cpu_seconds"]))


def _result(line: str) -> Result:
    try:
        sent = json.loads(line)
        if "value" in sent:
            return Result(values.decode(sent["value"]))
        return Result(error=f"{sent['error']}: {sent['text']}", forbidden=sent.get("forbidden") is True)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Result(error="the result is no plain data")


@contextlib.contextmanager
def _memory(content: Any) -> Iterator[int]:
    """A file in memory, with JSON in it unless the content is None."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC)
    try:
        if content is not None:
            data = json.dumps(content).encode()
            while data:
                data = data[os.write(descriptor, data) :]
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int, most: int) -> bytes:
    return os.pread(descriptor, most, 0)
