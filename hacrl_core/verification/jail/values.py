"""Plain data: how a value leaves the process of a program, and how it is compared with what a test expects.

Only values of exactly the built-in types travel, as JSON. What arrives is made of fresh built-in objects: nothing that
a program defined, an ``__eq__`` least of all, takes part in the comparison.
"""

import base64
import json
import math
from typing import Any

_DEEPEST = 100

Encoded = Any


class NotPlainError(TypeError):
    """A value is of a type that does not travel."""


def encode(value: Any, depth: int = 0) -> Encoded:
    """Return the JSON form of a value; raise NotPlainError for anything but data of built-in types."""
    kind = type(value)
    if depth > _DEEPEST:
        raise NotPlainError("it is nested too deeply")
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < 1 << 64 else ["i", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["f", repr(value)]
    if kind is complex:
        return ["c", [encode(value.real), encode(value.imag)]]
    if kind is bytes or kind is bytearray:
        return ["b", base64.b64encode(value).decode()]
    if kind in _TAGS:
        return [_TAGS[kind], [encode(item, depth + 1) for item in value]]
    if kind is range:
        return ["l", list(value[:100_000])]
    if kind is dict:
        return ["d", [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]]
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1)
    raise NotPlainError(f"a value of type {kind.__name__} is not plain data")


_TAGS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "s"}


def decode(encoded: Encoded) -> Any:
    """Return the value of a JSON form; raise ValueError where it is none."""
    if encoded is None or isinstance(encoded, bool | int | float | str):
        return encoded
    try:
        tag, body = encoded
        return _DECODERS[tag](body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("not the form of a value") from error


_DECODERS: dict[str, Any] = {
    "i": lambda body: int(body, 16),
    "f": float,
    "c": lambda body: complex(*(decode(part) for part in body)),
    "b": lambda body: base64.b64decode(body),
    "l": lambda body: [decode(item) for item in body],
    "t": lambda body: tuple(decode(item) for item in body),
    "s": lambda body: {decode(item) for item in body},
    "d": lambda body: {decode(key): decode(item) for key, item in body},
}


def read(data: bytes) -> Any:
    """Return the value in bytes that a program wrote; raise ValueError where they are none."""
    try:
        return decode(json.loads(data))
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError("not the form of a value") from error


def same(expected: Any, value: Any, tolerance: float = 0.0) -> bool:
    """Return whether a program's value is what a test expects.

    Numbers compare by value, booleans only with booleans. A list that is expected also accepts a tuple, since JSON has
    no tuples. ``tolerance`` is relative, and absolute below 1, where a float is involved.
    """
    if isinstance(expected, bool) or isinstance(value, bool) or expected is None or value is None:
        return type(expected) is type(value) and expected == value
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return _same_number(expected, value, tolerance)
    if isinstance(expected, list | tuple):
        fits = isinstance(value, tuple) or (isinstance(expected, list) and isinstance(value, list))
        if not fits or len(expected) != len(value):
            return False
        return all(same(*pair, tolerance) for pair in zip(expected, value, strict=True))
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and expected.keys() == value.keys()
            and all(same(item, value[key], tolerance) for key, item in expected.items())
        )
    return type(expected) is type(value) and bool(expected == value)


def _same_number(expected: int | float, value: int | float, tolerance: float) -> bool:
    if expected == value or (expected != expected and value != value):
        return True
    if not tolerance or not (isinstance(expected, float) or isinstance(value, float)):
        return False
    try:
        return math.isclose(expected, value, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False
