"""Tests written as Python (``assert f(2) == 3``), run beside the program instead of inside it.

The simple ones become calls whose results the verifier compares. The others run in a *checker*, a process that never
ran the program: each name that the program defines is a stand-in there, which asks the program's process. The program
sees arguments and returns plain data. It never sees what is expected, and its objects never decide a comparison.
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hacrl_core.verification.jail import client, values, zygote
from hacrl_core.verification.jail.client import Call, ProgramLimits, Run

_LENGTH = struct.Struct(">I")
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Expectation:
    """A call and the value that it should return."""

    call: Call
    expected: Any


def simple(test: str) -> Expectation | None:
    """Read ``assert f(1, [2]) == 3``, with literals only; None where a test says more than that."""
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if len(body) != 1 or not isinstance(body[0], ast.Assert) or not isinstance(body[0].test, ast.Compare):
        return None
    compare = body[0].test
    called = compare.left
    if len(compare.ops) != 1 or not isinstance(compare.ops[0], ast.Eq) or not isinstance(called, ast.Call):
        return None
    if not isinstance(called.func, ast.Name) or hasattr(builtins, called.func.id):
        return None
    if any(keyword.arg is None for keyword in called.keywords):
        return None
    try:
        arguments = tuple(ast.literal_eval(argument) for argument in called.args)
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in called.keywords}
        expected = ast.literal_eval(compare.comparators[0])
        values.encode([list(arguments), named, expected])
        return Expectation(Call(called.func.id, arguments, named), expected)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None


def run_checks(source: str, checks: Sequence[str], limits: ProgramLimits) -> tuple[Run, list[str]]:
    """Run tests in a checker against a program; return how the program ended, and per test "" or why it failed."""
    with client.serving(source, limits) as (connection, ended), _answers() as answers:
        checker = os.fork()
        if checker == 0:
            try:
                _check(connection, checks, answers)
            finally:
                os._exit(0)
        # The checker holds the only end of the socket now: a program that ends ends its questions too.
        connection.close()
        end = zygote.watch(checker, limits.cpu_seconds, limits.wall_seconds)
        with contextlib.suppress(ValueError):
            found = [str(line) for line in json.loads(os.pread(answers, _MOST_BYTES, 0) or b"[]")]
    reason = "the test took too long" if end["late"] else "the test ended early"
    return ended[0], [*found, *[reason] * (len(checks) - len(found))][: len(checks)]


@contextlib.contextmanager
def _answers() -> Iterator[int]:
    descriptor = os.memfd_create("answers", os.MFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check(connection: socket.socket, checks: Sequence[str], answers: int) -> None:
    """Run each test; write down all that is known after each, so that a test that hangs costs only the rest."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = _Link(connection)
    found: list[str] = []
    namespace: dict[str, Any] = {"__name__": "tests"}
    for test in checks:
        found.append(_outcome(test, link, namespace))
        data = json.dumps(found).encode()
        os.pwrite(answers, data, 0)
        os.ftruncate(answers, len(data))


def _outcome(test: str, link: "_Link", namespace: dict[str, Any]) -> str:
    try:
        tree = ast.parse(test)
        for name in _unknown_names(tree, namespace):
            namespace[name] = _module(tree, name) or link.ask({"name": name})
        exec(compile(tree, "<test>", "exec"), namespace)
        return ""
    except _GoneError:
        return "the program ended"
    except AssertionError as error:
        return f"assertion failed{f': {error}' if str(error) else ''}"[:300]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]


def _unknown_names(tree: ast.AST, known: dict[str, Any]) -> list[str]:
    """Return the names that a test reads and neither defines nor finds among the built-in ones."""
    read, defined = dict[str, None](), set(dir(builtins)) | set(known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                read[node.id] = None
            else:
                defined.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return [name for name in read if name not in defined]


# Modules that tests use without importing them. The program's own would let it decide: math.isclose = always true.
_MODULES = {name: name for name in ("math", "cmath", "re", "json", "itertools", "functools", "collections", "operator")}
_MODULES |= {name: name for name in ("random", "string", "statistics", "decimal", "fractions", "datetime", "unittest")}
_MODULES |= {"np": "numpy", "numpy": "numpy"}


def _module(tree: ast.AST, name: str) -> Any:
    """Return the real module where a test uses such a name for nothing but its attributes; else None."""
    if name not in _MODULES:
        return None
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    if any(id(use) not in bases for use in uses):
        return None
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError:
        return None


class _GoneError(BaseException):
    """The program's process has ended."""


class _Link:
    """Questions to the program's process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def ask(self, question: dict[str, Any]) -> Any:
        """Return plain data, or a stand-in for anything else; raise what the program raised, as a built-in type."""
        data = json.dumps(question).encode()
        try:
            self.connection.sendall(_LENGTH.pack(len(data)) + data)
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if length > _MOST_BYTES:
                raise _GoneError
            answer = json.loads(self._exactly(length))
        except (OSError, ValueError, RecursionError):
            raise _GoneError from None
        if not isinstance(answer, dict):
            raise _GoneError
        if "value" in answer:
            return values.decode(answer["value"])
        if isinstance(answer.get("object"), int):
            return Remote(self, answer["object"], str(answer.get("kind")))
        raise _raised(answer)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.connection.recv(count - len(data))
            if not part:
                raise _GoneError
            data += part
        return data


# StopIteration would end the test's own map() or filter() before it has compared anything.
_NOT_RAISED = (AssertionError, OSError, StopIteration, StopAsyncIteration)


def _raised(answer: dict[str, Any]) -> Exception:
    kinds = answer.get("kinds")
    for name in kinds if isinstance(kinds, list) else ():
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_RAISED):
            with contextlib.suppress(TypeError):
                return kind(str(answer.get("text", "")))
    return RuntimeError(f"{answer.get('error')}: {answer.get('text')}")


class Remote:
    """Stands for an object in the program's process. It equals only itself: compare its data instead."""

    def __init__(self, link: _Link, number: int, kind: str) -> None:
        self._link, self._number, self._kind = link, number, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sent = {"args": [_sent(a) for a in args], "kwargs": {name: _sent(value) for name, value in kwargs.items()}}
        return self._link.ask({"object": self._number, **sent})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask({"object": self._number, "attribute": name})

    def _operation(self, name: str, *args: Any) -> Any:
        return self._link.ask({"object": self._number, "operation": name, "args": [_sent(a) for a in args]})

    def __len__(self) -> int:
        return int(self._operation("len"))

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self._operation("item", key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._operation("list"))

    def __contains__(self, item: Any) -> bool:
        # The program's own answer would decide the test.
        return any(item == each for each in self)

    def __str__(self) -> str:
        return str(self._operation("text"))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _sent(value: Any) -> Any:
    return {"object": value._number} if isinstance(value, Remote) else values.encode(value)
