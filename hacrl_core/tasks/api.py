"""What a task is written with: ``Problem``, ``Verdict``, ``Example``. Plain Python, so that importing it is free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Problem:
    """One question: what the agents are asked, the answer, and any further columns that the verifier reads.

    ``Problem("2+2=?", answer="4", level="easy", tests=[1, 2])`` has the columns ``level`` and ``tests``; read them as
    ``problem.tests`` or ``problem["tests"]``. A column is anything that JSON can hold. ``tags`` break accuracies down
    in tables and charts. The column ``solution`` is what a warm start teaches and what ``hacrl task check`` expects to
    pass.
    """

    __slots__ = ("answer", "columns", "id", "messages", "source", "tags")

    def __init__(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        answer: str = "",
        *,
        id: str = "",
        tags: Mapping[str, str] | None = None,
        source: str = "",
        **columns: Any,
    ) -> None:
        """``prompt`` is the user's message, or a list of chat messages with ``role`` and ``content``."""
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        self.messages: list[dict[str, str]] = [{"role": m["role"], "content": m["content"]} for m in given]
        self.answer = answer
        self.id = id
        self.tags = dict(tags or {})
        self.source = source
        self.columns = columns

    @property
    def prompt(self) -> str:
        """The text of the last message."""
        return self.messages[-1]["content"] if self.messages else ""

    @property
    def solution(self) -> str:
        """A response that passes, where the task gives one; else the answer."""
        return str(self.columns.get("solution") or self.answer)

    def __getitem__(self, name: str) -> Any:
        """Return a column, or one of the fields by name."""
        if name in self.columns:
            return self.columns[name]
        if name in ("answer", "id", "messages", "prompt", "source", "tags"):
            return getattr(self, name)
        raise KeyError(name)

    def __getattr__(self, name: str) -> Any:
        """Return a column as an attribute."""
        if name.startswith("__") or name in Problem.__slots__:
            raise AttributeError(name)
        try:
            return self.columns[name]
        except KeyError:
            known = ", ".join(["answer", "id", "messages", "prompt", "source", "tags", *self.columns])
            raise AttributeError(f"the problem has no column {name!r}; it has {known}") from None

    def get(self, name: str, default: Any = None) -> Any:
        """Return a column or field, or ``default`` where there is none."""
        try:
            return self[name]
        except KeyError:
            return default

    def __repr__(self) -> str:
        return f"Problem({self.prompt!r}, answer={self.answer!r}, columns={sorted(self.columns)})"


@dataclass(frozen=True)
class Verdict:
    """What a verifier says about one response."""

    reward: float | None = None
    """In the task's ``reward_range``, [0, 1] unless it declares another. None with ``parts``: their sum. None without:
    no answer was found, which earns the lowest reward."""
    correct: bool | None = None
    """Whether the response counts as solved in accuracies. None: the reward is the highest of the range."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, for tables and charts."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers worth watching that are no reward."""
    answer: str = ""
    """The answer that was found in the response."""


@dataclass(frozen=True)
class Example:
    """Responses to a problem whose verdicts are known; ``hacrl task check`` runs them."""

    problem: Problem
    right: Sequence[str] = ()
    """Must be judged correct."""
    wrong: Sequence[str] = ()
    """Must not be judged correct."""
    hostile: Sequence[str] = ()
    """Must neither be judged correct nor stop the verifier."""
