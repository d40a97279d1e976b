"""A language model as verifier: where it answers, what it is asked, how its answer becomes a reward."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from hacrl_core.config.base import NotIdentity, StrictConfig

SCORE_TEMPLATE = (
    "Rate the response to the task below from 0 (useless) to 10 (perfect).\n\nTask:\n{problem}\n\nReference answer:\n"
    "{answer}\n\nResponse:\n{response}\n\nEnd with a line of the form 'Score: N'."
)
PAIR_TEMPLATE = (
    "Which of two responses to the task below is better?\n\nTask:\n{problem}\n\nResponse A:\n{first}\n\nResponse B:\n"
    "{second}\n\nEnd with a line of the form 'Better: A', 'Better: B' or 'Better: tie'."
)


class JudgeConfig(StrictConfig):
    """A judge behind an OpenAI-compatible endpoint, or another agent of the campaign; it answers at temperature 0."""

    url: Annotated[str | None, NotIdentity] = Field(
        default=None, description="The endpoint up to and with /v1, e.g. http://localhost:8000/v1."
    )
    model: str = Field(default="", description="The model's name at the endpoint; part of what a cached answer is for.")
    agent: str | None = Field(
        default=None, description="An agent of the campaign that judges, in its first version, instead of an endpoint."
    )
    mode: Literal["score", "pair"] = Field(
        default="score",
        description="score: a number for each response. pair: the response against the reference (the column "
        "reference, else the answer), asked in both orders; 1 if it wins both, 0 if it loses both, else 0.5.",
    )
    template: str = Field(
        default="",
        description="What the judge is asked. score: with {problem}, {response} and, if wanted, {answer}; pair: with "
        "{problem}, {first} and {second}. Empty: a plain one.",
    )
    pattern: str = Field(
        default="",
        description="A regular expression whose group finds the score, or A, B or tie, in the judge's answer; its last "
        "match counts. Empty: 'Score: N' or 'Better: A'.",
    )
    range: tuple[float, float] = Field(default=(0.0, 10.0), description="Lowest and highest score; a pair has [0, 1].")
    correct_from: float | None = Field(
        default=None, description="Score from which a response counts as correct. Empty: the highest one."
    )
    max_tokens: PositiveInt = Field(default=256, description="Longest answer of the judge, in tokens.")
    timeout_seconds: Annotated[PositiveFloat, NotIdentity] = Field(
        default=120.0, description="Longest wait for one answer."
    )
    tries: Annotated[PositiveInt, NotIdentity] = Field(
        default=3, description="How often a request is made before the verdict is an error."
    )
    concurrency: Annotated[PositiveInt, NotIdentity] = Field(default=16, description="Requests at the same time.")
    key_variable: Annotated[str | None, NotIdentity] = Field(
        default=None, description="Environment variable with the endpoint's key, e.g. OPENAI_API_KEY."
    )

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups if pattern else 1
        except re.error as problem:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {problem}") from None
        if groups < 1:
            raise ValueError(f"pattern {pattern!r} has no group; put the score into parentheses")
        return pattern

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.url is None) == (self.agent is None):
            raise ValueError("judge: give either url (an OpenAI-compatible endpoint) or agent; exactly one")
        if self.url is not None and not self.model:
            raise ValueError("judge: model is missing; name the endpoint's model")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"judge.url {self.url} is no address; write http://host:port/v1")
        needed = ("{problem}", "{response}") if self.mode == "score" else ("{problem}", "{first}", "{second}")
        missing = [name for name in needed if name not in self.asked]
        if missing:
            raise ValueError(f"judge.template does not contain {missing[0]}; put it where that text belongs")
        if not self.range[0] < self.range[1]:
            raise ValueError(f"judge.range {list(self.range)} is no range; write [lowest, highest]")
        return self

    @property
    def asked(self) -> str:
        """The template, the default filled in."""
        return self.template or (SCORE_TEMPLATE if self.mode == "score" else PAIR_TEMPLATE)
