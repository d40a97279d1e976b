"""The built-in arithmetic task: which kinds of problem, how hard, in which proportions."""

from typing import Literal

from pydantic import Field, PositiveFloat

from hacrl_core.config.base import StrictConfig

Kind = Literal["addition", "subtraction", "multiplication", "story"]
Level = Literal["easy", "medium", "hard"]

KINDS: tuple[Kind, ...] = ("addition", "subtraction", "multiplication", "story")
LEVELS: tuple[Level, ...] = ("easy", "medium", "hard")


class ArithmeticConfig(StrictConfig):
    """Problems are drawn kind first, then level, each in proportion to its weight."""

    kind: Literal["arithmetic"] = "arithmetic"
    kinds: dict[Kind, PositiveFloat] = Field(
        default={"addition": 1.0, "subtraction": 1.0},
        min_length=1,
        description="Weight of each kind: addition, subtraction, multiplication (by one digit), "
        "story (an addition or subtraction told in a sentence). A kind left out does not occur.",
    )
    levels: dict[Level, PositiveFloat] = Field(
        default={"medium": 1.0},
        min_length=1,
        description="Weight of each level: easy, medium and hard numbers have one, two and three digits.",
    )
