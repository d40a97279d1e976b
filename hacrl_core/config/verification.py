"""How responses are verified: the verifier, where answers are found, the limits of a worker, the reward."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, StringConstraints, model_validator

from hacrl_core.config.base import IdentityUnlessDefault, NotIdentity, StrictConfig
from hacrl_core.config.judge import JudgeConfig

Fallback = Literal["unclosed_box", "phrase", "last", "whole"]

Form = Literal["auto", "pair", "problem", "batch", "trl", "trl_chat", "verl", "verl_batch"]

TASK = "task"
JUDGE = "judge"
_BUILT_IN = ("strict", "math", "exact", "numeric", TASK, JUDGE)
# module:function, library:task, module:package.module, a file, a file's function, a package's folder.
_OWN = re.compile(r"[A-Za-z_][\w.]*:[\w.\-]+|[^:]*\.py(:[A-Za-z_]\w*)?|[^:]*/[^:]*")


def _known_verifier(value: str) -> str:
    if value not in _BUILT_IN and value != "code" and not _OWN.fullmatch(value):
        raise ValueError(
            f"verifier {value!r} is unknown; use one of {', '.join(_BUILT_IN)}, a task (my_task.py) or a function "
            "('my_module:my_fn', 'my_rewards.py:my_fn')"
        )
    return value


def _rising(value: tuple[float, float]) -> tuple[float, float]:
    if not value[0] < value[1]:
        raise ValueError(f"{list(value)} is no range; write [lowest, highest]")
    return value


VerifierName = Annotated[str, AfterValidator(_known_verifier)]
RewardRange = Annotated[tuple[float, float], AfterValidator(_rising)]
# Names become parts of metric names.
RewardName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=60)]


def _check_judge(verifier: str, judge: JudgeConfig | None) -> None:
    if (verifier == JUDGE) != (judge is not None):
        wrong = "judge is missing; name its url and model" if judge is None else "judge is set; set verifier: judge"
        raise ValueError(f"verifier {verifier}: {wrong}")


class RewardConfig(StrictConfig):
    """One of several rewards that are added up with their weights."""

    verifier: VerifierName = Field(
        description="As verify.verifier: a built-in one, task, my_module:my_fn, my_rewards.py:my_fn. Reward functions "
        "written for TRL and verl run as they are.",
    )
    weight: float = Field(default=1.0, description="Factor of this reward in the sum; below 0 it is a penalty.")
    range: RewardRange | None = Field(
        default=None, description="Lowest and highest reward. Empty: what the task declares, else [0, 1]."
    )
    form: Form = Field(
        default="auto", description="How the function is called; auto goes by its parameters (docs/tasks.md)."
    )
    judge: JudgeConfig | None = Field(default=None, description="The language model behind the verifier judge.")

    @model_validator(mode="after")
    def _a_judge_has_settings(self) -> Self:
        _check_judge(self.verifier, self.judge)
        return self


class OverlongConfig(StrictConfig):
    """A penalty that grows linearly over the last tokens before the limit, so that length has a slope and no cliff."""

    max_tokens: PositiveInt = Field(description="Length in tokens at which the whole penalty applies.")
    buffer_tokens: PositiveInt = Field(description="The penalty starts this many tokens before max_tokens.")
    penalty: float = Field(default=1.0, gt=0, le=1, description="Subtracted at max_tokens; rewards never go below 0.")

    @model_validator(mode="after")
    def _buffer_fits(self) -> "OverlongConfig":
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens {self.buffer_tokens} is larger than max_tokens {self.max_tokens}; lower it"
            )
        return self


class VerifyConfig(StrictConfig):
    """Settings of the verify stage."""

    verifier: VerifierName = Field(
        default="strict",
        description="'strict', 'math' (lenient, for campaigns begun with it), 'exact', 'numeric', 'task' (each problem "
        "set's own), or the user's own function as 'my_module:my_fn' or 'my_rewards.py:my_fn'.",
    )
    form: Annotated[Form, IdentityUnlessDefault] = Field(
        default="auto",
        description="How the user's own function is called; auto goes by its parameters (docs/tasks.md).",
    )
    reward_range: Annotated[RewardRange | None, IdentityUnlessDefault] = Field(
        default=None,
        description="Lowest and highest reward of the user's own function. Empty: what the task declares, else [0, 1].",
    )
    judge: Annotated[JudgeConfig | None, IdentityUnlessDefault] = Field(
        default=None, description="The language model behind the verifier judge (docs/tasks.md)."
    )
    rewards: Annotated[dict[RewardName, RewardConfig], IdentityUnlessDefault] = Field(
        default_factory=dict,
        description="Several rewards by name, instead of verifier: their weighted sum is learned from. The first one "
        "decides whether a response counts as correct.",
    )
    fallbacks: tuple[Fallback, ...] | None = Field(
        default=None,
        description="Where to look, in this order, when the response has no complete \\boxed{}; []: a box or nothing. "
        "Left out: phrase, last, whole; for the rewards of training under strict without last, which pays for numbers "
        "that stand at the end by chance.",
    )
    truncated: Annotated[Literal["auto", "judge", "complete_only"], NotIdentity] = Field(
        default="auto",
        description="A response that its length limit cut off: judge it like any other, or (complete_only) reward it "
        "only for an answer in a complete box. auto is complete_only under strict and judge under the other verifiers. "
        "The user's own function judges as it does.",
    )
    tolerance: float = Field(
        default=1e-6,
        ge=0,
        lt=1,
        description="Relative tolerance when either side is a decimal; exact forms must be equal exactly.",
    )
    timeout_seconds: PositiveFloat = Field(
        default=2.0, description="CPU seconds one answer may use in a worker before it is killed."
    )
    wall_timeout_seconds: PositiveFloat | None = Field(
        default=None,
        description="Wall-clock limit of one answer that sleeps instead of computing; default ten times "
        "timeout_seconds.",
    )
    memory_mb: int = Field(default=1024, ge=256, description="Address space of one worker process.")
    environment: Annotated[tuple[str, ...], IdentityUnlessDefault] = Field(
        default=(),
        description="Environment variables that the workers see besides PATH, HOME, the locale and the like. Name what "
        "your own function needs; secrets are not passed on otherwise.",
    )
    sandbox: Annotated[Literal["required", "best", "off"] | None, NotIdentity] = Field(
        default=None,
        description="What happens where this machine cannot hold a verifier or a program (docs/sandbox.md): required "
        "refuses, best goes on with what holds, off builds no sandbox. Empty: best for verifiers, required for the "
        "programs that agents write.",
    )
    sandbox_read: Annotated[tuple[str, ...], IdentityUnlessDefault] = Field(
        default=(),
        description="Files and folders that the user's own verifier may read, besides its own folder and the Python "
        "installation.",
    )
    sandbox_network: Annotated[bool, IdentityUnlessDefault] = Field(
        default=False, description="Whether the user's own verifier may use the network. Programs never may."
    )
    workers: Annotated[int, NotIdentity] = Field(
        default=0, ge=0, description="Worker processes; 0: one per usable core, at most 8."
    )
    max_error_share: Annotated[float, NotIdentity] = Field(
        default=0.05,
        ge=0,
        le=1,
        description="More 'error' verdicts than this share of a batch (and more than one) fail the stage.",
    )
    max_answer_chars: PositiveInt = Field(
        default=600, description="Longer extracted answers are compared as text only, never symbolically."
    )
    format_reward: float = Field(
        default=0.0, ge=0, lt=1, description="Reward of a wrong answer that is at least in a complete box."
    )
    overlong: OverlongConfig | None = Field(
        default=None, description="Soft penalty for long responses; off by default."
    )

    @property
    def places(self) -> tuple[Fallback, ...]:
        """Where to look for an answer that is in no complete box."""
        return ("phrase", "last", "whole") if self.fallbacks is None else self.fallbacks

    def for_training(self) -> Self:
        """Return the settings for rewards that are learned from: under strict the last number is no answer.

        Benchmarks look for an answer wherever it stands: nothing is learned from what they find.
        """
        strict = "strict" in ([r.verifier for r in self.rewards.values()] or [self.verifier])
        return self.model_copy(update={"fallbacks": ("phrase", "whole")}) if strict and self.fallbacks is None else self

    @property
    def complete_only(self) -> bool:
        """Whether a response that was cut off is rewarded only for an answer in a complete box."""
        return self.truncated == "complete_only" or (self.truncated == "auto" and self.verifier == "strict")

    def identity(self) -> dict[str, Any]:
        """Return what decides verdicts: what becomes of cut-off responses counts where they are not judged as others.

        So verdicts of before, when every verifier judged them, keep their keys. Fallbacks that were left out count as
        if they were named.
        """
        places = {"fallbacks": list(self.places)}
        return {**super().identity(), **places, **({"truncated": "complete_only"} if self.complete_only else {})}

    @property
    def judges(self) -> tuple[JudgeConfig, ...]:
        """The judges behind the verifier or the rewards."""
        found = [reward.judge for reward in self.rewards.values()] if self.rewards else [self.judge]
        return tuple(judge for judge in found if judge is not None)

    @model_validator(mode="after")
    def _rewards_can_differ(self) -> Self:
        _check_judge(self.verifier, self.judge)
        if self.rewards and not any(reward.weight for reward in self.rewards.values()):
            raise ValueError("rewards: every weight is 0; give at least one reward a weight")
        return self
