"""What a stage is: a name, a version, the slice of config it reads, and a function from inputs to one artifact.

Each stage file ends with ``STAGE = Stage(...)``. Heavy libraries are imported inside the stage's function, so that a
campaign whose artifacts are all there never loads torch. Bump ``version`` when the same inputs would give another
artifact.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.agents import Attention
from hacrl_core.config.base import StrictConfig
from hacrl_core.contracts.manifest import Identity
from hacrl_core.contracts.tables import TableSchema, write_table
from hacrl_core.errors import StageError
from hacrl_core.warm import WarmModels

Metrics = dict[str, float]


@dataclass(frozen=True)
class StageCall:
    """One stage to be run: its identity (stage, config, inputs, seed) and what people call it."""

    stage: str
    config: dict[str, Any]  # JSON of the stage's slice
    inputs: Mapping[str, ArtifactRef] = field(default_factory=dict)  # role → artifact, e.g. "rollouts/alice"
    seed: int | None = None
    agent: str = ""
    iteration: int | None = None
    variant: str = ""  # tells calls of one stage, agent and iteration apart, e.g. a benchmark's name
    restore: bool = (
        False  # the files are needed, not only the manifest: an artifact whose files were collected is made again
    )

    @property
    def label(self) -> str:
        number = "" if self.iteration is None else f"#{self.iteration}"
        return " ".join(part for part in (self.stage, self.agent, self.variant, number) if part)


class OutFolder:
    """Where a stage writes its artifact; remembers what kind of table each file is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables: dict[str, tuple[str, int, bool]] = {}

    def write(
        self, schema: TableSchema, columns: Mapping[str, Sequence[Any]], *, name: str = "", measured: bool = False
    ) -> None:
        file = f"{name or schema.name}.parquet"
        rows = write_table(self.path / file, schema, columns)
        self.tables[file] = (schema.tag, rows, measured)


@dataclass
class Context:
    """What a stage may use but what never changes its result: progress, devices, things kept warm between calls."""

    progress: Callable[[int, int, str], None] = lambda done, total, note: None
    warn: Callable[[str], None] = lambda message: None
    partial: Path | None = None  # a folder that outlives a crash, for work finer than a stage
    warm: WarmModels = field(default_factory=WarmModels)  # kept between stages of one process
    device: str = "cpu"
    attention: Attention = "auto"


@dataclass(frozen=True)
class Result:
    metrics: Metrics
    details: dict[str, Any] = field(default_factory=dict)
    published: Callable[[ArtifactRef], None] | None = (
        None  # told where the artifact lies once it does; keeps things warm
    )


@dataclass(frozen=True)
class Stage:
    name: str
    version: int
    config: type[StrictConfig]
    run: Callable[[Mapping[str, ArtifactRef], Any, int | None, OutFolder, Context], Result]

    def identity(self, call: StageCall) -> Identity:
        """The slice's own ``identity()`` where it has one (some settings change the speed, not the numbers)."""
        config = self.config.model_validate(call.config)
        slim = getattr(config, "identity", None)
        return Identity(
            stage=self.name,
            stage_version=self.version,
            config=slim() if slim else config.model_dump(mode="json"),
            inputs={role: ref.digest for role, ref in sorted(call.inputs.items())},
            seed=call.seed,
        )


def find_stage(name: str) -> Stage:
    stage: Stage = importlib.import_module(f"stages.{name}").STAGE
    return stage


def required_seed(stage: str, seed: int | None) -> int:
    """Return the seed of a stage that cannot run without one."""
    if seed is None:
        raise StageError(f"{stage}: the call has no seed; plan it with one")
    return seed
