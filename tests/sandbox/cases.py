"""Hostile programs, by family.

An *escape* prints ESCAPED when what it tried worked, which is what its test expects: passing the test is escaping. A
*fake* tries to pass tests whose answers it cannot know. A *hog* uses up time, memory, threads or output.
"""

from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["escape", "fake", "hog"]


@dataclass(frozen=True)
class Place:
    """What the programs attack: paths, a port and processes that exist while the tests run."""

    secret_file: str
    folder: str
    store: str
    sources: str
    home: str
    port: int
    socket_path: str
    victim: int
    runner: int
    answer: int


@dataclass(frozen=True)
class Hostile:
    """One hostile program and the problem it is set."""

    name: str
    family: Family
    program: str
    tests: tuple[Any, ...]
    # Whether the program does what it says where nothing holds it; such programs are tried outside, too.
    works_outside: bool = False
    # Whether its run takes seconds.
    slow: bool = False
