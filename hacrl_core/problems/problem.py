"""One question with a checkable answer, whatever its source: a dataset, a benchmark or the built-in task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict


class Message(TypedDict):
    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    problem_id: str  # a function of the content, without "/" (rollout ids are built from it)
    messages: tuple[Message, ...]
    answer: str
    source: str
    tags: Mapping[str, str] = field(default_factory=dict)  # e.g. kind and level, to break accuracies down by
