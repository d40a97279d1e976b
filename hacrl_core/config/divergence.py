"""When training goes wrong in its numbers, and what to do then."""

from typing import Literal

from pydantic import Field, PositiveInt

from hacrl_core.config.base import StrictConfig


class CollapseConfig(StrictConfig):
    """When an agent's rewards have collapsed: mean rewards of several iterations in a row far below its best stretch."""

    share: float = Field(0.2, gt=0, lt=1, description="Below this share of its best window's mean reward is too low.")
    window: PositiveInt = Field(5, description="Iterations in a window.")
    iterations: PositiveInt = Field(5, description="So many iterations in a row must be too low.")
    action: Literal["warn", "stop"] = Field("warn", description="warn: once; stop: before the next update.")


class DivergenceConfig(StrictConfig):
    """What happens when training goes wrong in its numbers. The last good version stays current in every case."""

    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="NaN or infinity in loss, gradient or weights: stop the campaign, or publish the version unchanged and go on.",
    )
    on_verifier_failure: Literal["stop", "skip"] = Field(
        "stop",
        description="More than verify.max_error_share of an agent's answers ended in a verifier's error: stop, or skip the updates that "
        "would learn from them.",
    )
    collapse: CollapseConfig | None = Field(CollapseConfig(), description="Watch for collapsing rewards; null: do not.")
