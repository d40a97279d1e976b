"""Where problems come from: the built-in arithmetic, a dataset of one's own, or a well-known dataset by name."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from hacrl_core.config.base import IdentityUnlessDefault, StrictConfig

FILE_TYPES = (".parquet", ".jsonl", ".csv")
BOXED_PROMPT = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."

PresetName = Literal["math", "gsm8k", "gsm8k_test", "math500", "aime2025", "amc2023", "minerva_math", "olympiadbench"]
AnswerFormat = Literal["plain", "boxed", "after_hashes"]
Kind = Literal["addition", "subtraction", "multiplication", "story"]
Level = Literal["easy", "medium", "hard"]

KINDS: tuple[Kind, ...] = ("addition", "subtraction", "multiplication", "story")
LEVELS: tuple[Level, ...] = ("easy", "medium", "hard")


class ArithmeticConfig(StrictConfig):
    """Which arithmetic problems are drawn: first the kind, then the level, each in proportion to its weight."""

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


class ArithmeticProblems(ArithmeticConfig):
    """Problems made by code: new ones in every iteration, or a fixed number of them."""

    kind: Literal["arithmetic"] = Field(default="arithmetic", description="The built-in arithmetic task.")
    split: Literal["training", "held_out"] = Field(
        default="training",
        description="training and held_out share no arithmetic fact, whatever the seed; evaluate on held_out.",
    )
    size: PositiveInt | None = Field(
        default=None,
        description="Number of problems. Empty: training draws new ones in every iteration; held_out needs a number.",
    )

    @model_validator(mode="after")
    def _held_out_is_finite(self) -> Self:
        if self.split == "held_out" and self.size is None:
            raise ValueError("held_out arithmetic needs a size, e.g. size: 200")
        return self


class Columns(StrictConfig):
    """Which column holds what."""

    problem: str = Field(default="problem", description="Column with the text of the problem.")
    answer: str = Field(
        default="answer",
        description="Column with the answer, or with the solution that contains it (see answer_format).",
    )
    messages: str | None = Field(
        default=None,
        description="Column with chat messages (list of role and content) instead of a problem text; prompt and system "
        "do not apply.",
    )
    context: str | None = Field(
        default=None, description="Column with text that goes before the problem where it is not empty."
    )
    id: str | None = Field(
        default=None, description="Column with a unique name of the row. Empty: a digest of the content."
    )
    tags: dict[str, str] = Field(
        default_factory=dict, description="Tag name to column, e.g. level: level; results are broken down by tags."
    )
    extra: Annotated[tuple[str, ...], IdentityUnlessDefault] = Field(
        default=(), description="Further columns that a task's verifier or a reward function reads."
    )


class ProblemFilters(StrictConfig):
    """What is left out. Rows without an answer and exact repeats are always left out."""

    min_characters: NonNegativeInt = Field(default=0, description="Shortest problem text that is kept, in characters.")
    max_characters: PositiveInt | None = Field(
        default=None, description="Longest problem text that is kept, in characters."
    )
    tags: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="Values to keep by tag, e.g. level: ['4', '5']; a row without the tag is left out.",
    )
    max_problems: PositiveInt | None = Field(
        default=None, description="Keep only the first so many, in the order of the file."
    )

    @field_validator("tags", mode="before")
    @classmethod
    def _values_are_text(cls, tags: Any) -> Any:
        """YAML reads ``level: [4, 5]`` as numbers; tags are text."""
        if not isinstance(tags, dict):
            return tags
        listed = {name: values if isinstance(values, list | tuple) else [values] for name, values in tags.items()}
        return {name: tuple(str(value) for value in values) for name, values in listed.items()}


class DatasetProblems(StrictConfig):
    """A dataset of the Hugging Face hub, or a local Parquet, JSONL or CSV file."""

    kind: Literal["dataset"] = Field(default="dataset", description="A dataset of the hub or a local file.")
    hub: str | None = Field(default=None, description="Name on the hub, e.g. openai/gsm8k. Give either this or path.")
    subset: str | None = Field(default=None, description="The hub dataset's configuration, e.g. main.")
    split: str = Field(default="train", description="Split of the hub dataset.")
    revision: str | None = Field(
        default=None, description="Commit, tag or branch of the hub dataset. A commit makes the run repeatable."
    )
    path: Path | None = Field(
        default=None, description="Local .parquet, .jsonl or .csv file, or a pattern with * for several."
    )
    columns: Columns = Field(default_factory=Columns)
    answer_format: AnswerFormat = Field(
        default="plain",
        description="plain: the column is the answer; boxed: the last \\boxed{} in it; after_hashes: what follows "
        "'####'.",
    )
    prompt: str = Field(
        default=BOXED_PROMPT, description="The user's message; {problem} is replaced by the text of the problem."
    )
    system: str | None = Field(default=None, description="System message before it.")
    source: str | None = Field(
        default=None, description="Name of the source in tables and results. Empty: the hub name or the file name."
    )
    filters: ProblemFilters = Field(default_factory=ProblemFilters)

    @model_validator(mode="after")
    def _names_one_source(self) -> Self:
        if (self.hub is None) == (self.path is None):
            raise ValueError("a dataset has either hub (a name on the hub) or path (a local file); give exactly one")
        if self.path is not None and (self.subset is not None or self.revision is not None):
            raise ValueError("subset and revision belong to a hub dataset; leave them out beside path")
        if self.path is not None and self.path.suffix not in FILE_TYPES:
            raise ValueError(f"path {self.path} is not a {', '.join(FILE_TYPES)} file; convert it")
        return self

    @field_validator("prompt")
    @classmethod
    def _prompt_has_the_problem(cls, prompt: str) -> str:
        if "{problem}" not in prompt:
            raise ValueError("prompt does not contain {problem}; put it where the text of the problem belongs")
        return prompt


class PresetProblems(StrictConfig):
    """A well-known dataset by name; ``problems: math500`` is short for ``{kind: preset, name: math500}``."""

    kind: Literal["preset"] = Field(default="preset", description="A well-known dataset.")
    name: PresetName = Field(description="Which one; docs/datasets.md lists hub name, split and columns of each.")
    path: Path | None = Field(
        default=None, description="A local copy in the layout of the hub's files, read instead of the hub."
    )
    revision: str | None = Field(default=None, description="Another revision of the hub dataset than the preset's.")
    prompt: str | None = Field(
        default=None, description="Another user message than the preset's; must contain {problem}."
    )
    system: str | None = Field(default=None, description="System message before it.")
    filters: ProblemFilters = Field(default_factory=ProblemFilters)


class TaskProblems(StrictConfig):
    """The problems of a task: a Python file of one's own, or a task of a library."""

    kind: Literal["task"] = Field(default="task", description="A task with problems and a verifier of its own.")
    task: str = Field(
        min_length=1,
        description="A file (my_task.py), a package's folder, a module (module:my_package.tasks), or a library's task "
        "(reasoning_gym:chain_sum).",
    )
    split: Literal["training", "held_out", "all"] = Field(
        default="training",
        description="training and held_out share no question: a fifth of all questions, chosen by a hash of their "
        "text, is held out, unless the task has splits of its own.",
    )
    size: PositiveInt | None = Field(
        default=None,
        description="Number of problems. Empty: all of a finite task; a task that takes a seed makes new ones in "
        "every iteration.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the task's problems(), e.g. the difficulty."
    )


# A bare word that is a task and no preset: a file, a folder, a task of a library, a task that comes with HACRL.
_TASK_NAME = re.compile(r".*\.py|.*/.*|(reasoning_gym|verifiers|module):.+|code")


def is_task(raw: Any) -> bool:
    """Return whether problems, as a config file writes them, are those of a task."""
    if isinstance(raw, dict):
        return raw.get("kind") == "task"
    return isinstance(raw, TaskProblems) or (isinstance(raw, str) and bool(_TASK_NAME.fullmatch(raw)))


def _from_name(value: Any) -> Any:
    """Read a bare string as the name of a preset or a task; arithmetic counts as a preset."""
    if not isinstance(value, str):
        return value
    if _TASK_NAME.fullmatch(value):
        return {"kind": "task", "task": value}
    return {"kind": "arithmetic"} if value == "arithmetic" else {"kind": "preset", "name": value}


ProblemsConfig = Annotated[
    Annotated[ArithmeticProblems | DatasetProblems | PresetProblems | TaskProblems, Field(discriminator="kind")],
    BeforeValidator(_from_name),
]
