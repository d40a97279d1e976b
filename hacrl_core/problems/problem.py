"""One question with a verifiable answer, whatever its source: a dataset, a benchmark or the built-in task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """A question as messages, with its answer."""

    # A function of the content, without "/": rollout ids are built from it.
    problem_id: str
    messages: tuple[Message, ...]
    answer: str
    source: str
    # E.g. kind and level, to break accuracies down by.
    tags: Mapping[str, str] = field(default_factory=dict)
    # Whatever else a task's verifier reads: JSON values by name.
    columns: Mapping[str, Any] = field(default_factory=dict)
