"""Sample rollouts for the report: prompts on which agents differ, then some on which all are right or all are wrong."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from flows.record.history import History
from flows.record.record import Entry
from flows.views.rollouts import responses_of, tags_of
from hacrl_core.contracts.tables import PROMPTS, read_table
from hacrl_core.errors import ArtifactError, ContractError

MOST_CHARACTERS = 4000


@dataclass(frozen=True)
class Response:
    """A response of one agent to one prompt, and how many times the agent gave exactly this text."""

    verdict: str
    text: str
    times: int
    # It ended because it was too long.
    cut: bool
    # Triples of (learner, whether the response is its own, advantage).
    advantages: tuple[tuple[str, bool, float], ...]


@dataclass(frozen=True)
class Answers:
    """One agent's responses to a prompt. ``number`` is that of the agent."""

    agent: str
    number: int
    right: int
    total: int
    responses: tuple[Response, ...]

    @property
    def others(self) -> str:
        """Say what is not shown: responses in other words than the most frequent right and the most frequent wrong."""
        shown = {
            right: sum(r.times for r in self.responses if (r.verdict == "correct") == right) for right in (True, False)
        }
        more = {"right": self.right - shown[True], "wrong": self.total - self.right - shown[False]}
        parts = [f"{count} {kind}" for kind, count in more.items() if count > 0]
        return f"and {' and '.join(parts)} in other words" if parts else ""


@dataclass(frozen=True)
class Example:
    """A prompt with what the agents answered. ``kind`` says why it was chosen."""

    kind: str
    question: str
    answer: str
    tags: str
    answers: tuple[Answers, ...]


def examples(history: History, most: int = 6) -> tuple[int | None, list[Example]]:
    """Return the last finished iteration whose rollouts still exist, and examples from it. Deterministic."""
    entries = {
        (h.entry.stage, h.entry.agent, h.entry.iteration): h.entry for h in history.finished if not h.entry.variant
    }
    for iteration in range(history.done - 1, -1, -1):
        agents = history.config.present(iteration)
        if all(("verify", agent, iteration) in entries for agent in agents) and ("sample", "", iteration) in entries:
            try:
                return iteration, _chosen(history, entries, agents, iteration, most)
            except (ArtifactError, ContractError, FileNotFoundError):
                # Deleted by a clean-up; an older iteration may have been kept.
                continue
    return None, []


def _chosen(history: History, entries: dict[Any, Entry], agents: list[str], iteration: int, most: int) -> list[Example]:
    groups = responses_of(history.store, entries, agents, iteration, agents)
    key = entries["sample", "", iteration].key
    history.store.fetch("sample", key)
    folder = history.store.folder("sample", key)
    prompts = read_table(folder / "prompts.parquet", PROMPTS).to_pylist()
    found = [_example(history, prompt, groups.get(prompt["prompt_id"], []), agents) for prompt in prompts]
    # Prompts on which agents differ most come first; each kind in turn, so that every kind is shown.
    ranked = sorted((e for e in found if e.answers), key=_spread, reverse=True)
    by_kind: dict[str, list[Example]] = {}
    for example in ranked:
        by_kind.setdefault(example.kind, []).append(example)
    chosen: list[Example] = []
    while len(chosen) < most and any(by_kind.values()):
        for waiting in by_kind.values():
            if waiting and len(chosen) < most:
                chosen.append(waiting.pop(0))
    return chosen


def _example(history: History, prompt: dict[str, Any], rows: list[dict[str, Any]], agents: list[str]) -> Example:
    answers = tuple(
        Answers(
            agent,
            history.agents.index(agent),
            sum(r["verdict"] == "correct" for r in rows if r["agent_id"] == agent),
            sum(r["agent_id"] == agent for r in rows),
            _one_right_one_wrong(rows, agent),
        )
        for agent in agents
        if any(r["agent_id"] == agent for r in rows)
    )
    shares = [a.right / a.total for a in answers]
    best = max(answers, key=lambda a: a.right / a.total, default=None)
    if not answers or best is None:
        kind = ""
    elif max(shares) == 0:
        kind = "nobody was right"
    elif min(shares) == 1:
        kind = "everybody was always right"
    elif len(answers) > 1 and max(shares) - min(shares) >= 0.25:
        kind = f"{best.agent} knows better"
    else:
        kind = "sometimes right"
    question = "\n".join(message["content"] for message in prompt["messages"])
    return Example(kind, question, prompt["answer"], tags_of(prompt["tags"]), answers)


def _one_right_one_wrong(rows: list[dict[str, Any]], agent: str) -> tuple[Response, ...]:
    """Return the agent's most frequent correct response and its most frequent other one."""
    own = [r for r in rows if r["agent_id"] == agent]
    times = Counter(r["response_text"] for r in own)
    shown: list[Response] = []
    for right in (True, False):
        fitting = [r for r in own if (r["verdict"] == "correct") == right]
        if fitting:
            row = max(fitting, key=lambda r: (times[r["response_text"]], r["rollout_id"]))
            shown.append(
                Response(
                    row["verdict"],
                    row["response_text"][:MOST_CHARACTERS],
                    times[row["response_text"]],
                    row["finish_reason"] == "length",
                    tuple((who, c["is_own"], c["advantage"]) for who, c in row["credits"].items()),
                )
            )
    return tuple(shown)


def _spread(example: Example) -> float:
    shares = [a.right / a.total for a in example.answers]
    return max(shares) - min(shares)
