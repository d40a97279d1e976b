"""What a hostile party makes of its tables of a round, for ``exchange.py``. Every attack is signed and well formed."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Rows = list[dict[str, Any]]


@dataclass
class Tables:
    """One round of the hostile sampler. It knows the right answers, and what the learner answered and thinks."""

    iteration: int
    answers: Rows
    right: dict[str, str]  # prompt → right answer
    others: Rows  # the learner's answers
    true_claims: Rows = field(default_factory=list)
    claims: Rows = field(default_factory=list)
    learner: dict[str, float] = field(default_factory=dict)  # rollout → the learner's mean log-prob of the text
    # rollout → the rollout whose text it carries now
    source: dict[str, str] = field(default_factory=dict)

    def is_right(self, row: dict[str, Any]) -> bool:
        """Whether an answer is right, as far as its box says."""
        return f"\\boxed{{{self.right[row['prompt_id']]}}}" in row["response_text"]

    def put(self, row: dict[str, Any], other: dict[str, Any]) -> None:
        """Give a row the text of another one."""
        row.update({name: other[name] for name in ("response_text", "finish_reason", "tokens")})
        self.source[row["rollout_id"]] = other["rollout_id"]


def _nothing(tables: Tables) -> None:
    return None


def _true_claims(tables: Tables) -> None:
    """Claim of each text what the sampler's own model says of it."""
    known = {row["rollout_id"]: row["mean_logprob"] for row in tables.true_claims}
    _claim(tables, lambda row: known.get(tables.source.get(row["rollout_id"], row["rollout_id"])))


def _claim(tables: Tables, value: Callable[[dict[str, Any]], float | None]) -> None:
    tables.claims = [
        {"rollout_id": row["rollout_id"], "mean_logprob": min(float(claimed), 0.0), "tokens": row["tokens"]}
        for row in tables.answers
        if row["tokens"] and (claimed := value(row)) is not None
    ]


def _shifted(points: float) -> Callable[[Tables], None]:
    """Claim log-probs that are too low, so that answers seem rarer than they are."""

    def claims(tables: Tables) -> None:
        _true_claims(tables)
        for row in tables.claims:
            row["mean_logprob"] -= points

    return claims


def _as_the_learner(tables: Tables) -> None:
    """Claim what the learner itself would say, so that every answer lies inside its window: the worst case."""
    _claim(tables, lambda row: tables.learner.get(row["rollout_id"], -0.1))


def _fitting_where_changed(tables: Tables) -> None:
    """Claim the truth, except for texts that the sampler did not write: of these what the learner would say."""
    _true_claims(tables)
    made = {row["rollout_id"] for row in tables.answers if row["response_text"].startswith("\\boxed")}
    known = {row["rollout_id"]: row for row in tables.claims}
    _claim(
        tables,
        lambda row: (
            tables.learner.get(row["rollout_id"], -0.1)
            if row["rollout_id"] in made or row["rollout_id"] not in known
            else known[row["rollout_id"]]["mean_logprob"]
        ),
    )


def _as_often_as_shown(tables: Tables) -> None:
    """Claim of each text the probability that its frequency suggests."""
    counts = Counter((row["prompt_id"], row["response_text"]) for row in tables.answers)
    sizes = Counter(row["prompt_id"] for row in tables.answers)

    def value(row: dict[str, Any]) -> float:
        share = counts[row["prompt_id"], row["response_text"]] / (sizes[row["prompt_id"]] + 1)
        return float(np.log(share)) / row["tokens"]

    _claim(tables, value)


def _copy(tables: Tables) -> None:
    """Publish the learner's own answers."""
    for row, other in zip(tables.answers, tables.others, strict=True):
        tables.put(row, dict(other))


def _only(*, right: bool) -> Callable[[Tables], None]:
    """Publish only right, or only wrong answers where a prompt has one."""

    def answers(tables: Tables) -> None:
        chosen: dict[str, Rows] = defaultdict(list)
        for row in tables.answers:
            if row["finish_reason"] == "stop" and tables.is_right(row) == right:
                chosen[row["prompt_id"]].append(dict(row))
        for place, row in enumerate(tables.answers):
            if pool := chosen[row["prompt_id"]]:
                tables.put(row, pool[place % len(pool)])

    return answers


def _repeat(tables: Tables) -> None:
    """Publish the first answer to each prompt again and again."""
    first: dict[str, dict[str, Any]] = {}
    for row in tables.answers:
        tables.put(row, first.setdefault(row["prompt_id"], dict(row)))


def _terse(tables: Tables, one_of: int = 1) -> None:
    """Publish the right answer without the working that leads to it: true, rewarded, and a bad habit."""
    for row in tables.answers:
        if row["sample_index"] % one_of:
            continue
        text = f"\\boxed{{{tables.right[row['prompt_id']]}}}"
        row.update(response_text=text, finish_reason="stop", tokens=len(text))


def _terse_and_cut(tables: Tables) -> None:
    """The same, and say of each answer that it was cut off at the limit."""
    _terse(tables)
    for row in tables.answers:
        row["finish_reason"] = "length"


def _one_token_each(tables: Tables) -> None:
    """Say that each text is one token: its probability is claimed as it is, its mean log-prob is far too low."""
    for row in tables.answers:
        row["tokens"] = 1


def _whole_as_one(tables: Tables) -> None:
    _true_claims(tables)
    lengths = {row["rollout_id"]: row["tokens"] for row in tables.true_claims}
    for row in tables.claims:
        row["mean_logprob"] *= lengths[row["rollout_id"]]


@dataclass(frozen=True)
class Attack:
    """What is done to the answers, to the claims, and whether rewards are lied about."""

    name: str
    answers: Callable[[Tables], None] = _nothing
    claims: Callable[[Tables], None] = _true_claims
    lies_about_rewards: bool = False


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack("lies about rewards", lies_about_rewards=True),
        Attack("claims far too low", claims=_shifted(2.0)),
        Attack("claims a little too low", claims=_shifted(0.02)),
        Attack("copies the learner's answers", _copy, _as_the_learner),
        Attack("publishes right answers only", _only(right=True)),
        Attack("right answers only, claims made to fit", _only(right=True), _as_often_as_shown),
        Attack("publishes wrong answers only", _only(right=False)),
        Attack("repeats one answer", _repeat),
        Attack("right answers without working, claims made to fit", _terse, _as_the_learner),
        Attack("right answers without working, marked as cut off", _terse_and_cut, _as_the_learner),
        Attack("says that each answer is one token", _one_token_each, _whole_as_one),
        Attack(
            "one answer in eight without working, claims made to fit",
            lambda tables: _terse(tables, 8),
            _fitting_where_changed,
        ),
    )
}
