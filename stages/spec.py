"""What a stage is: a name, a version, the slice of config it reads, and a function from inputs to one artifact.

Each stage file ends with ``STAGE = Stage(...)``. Heavy libraries are imported inside the stage's function, so that a
campaign whose artifacts are all there never loads torch. Bump ``version`` when the same inputs would give another
artifact.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.agents import Attention
from hacrl_core.config.base import StrictConfig
from hacrl_core.contracts.manifest import Identity
from hacrl_core.contracts.tables import TableSchema, write_table
from hacrl_core.errors import StageError
from hacrl_core.place import module
from hacrl_core.warm import WarmModels

Metrics = dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """What came of a stage call: its artifact, and whether it had to be computed."""

    ref: ArtifactRef
    cached: bool
    seconds: float  # of running it now; 0 when cached
    metrics: Metrics


class Handle(Protocol):
    """A stage call that was submitted; its outcome may still be on its way."""

    @property
    def call(self) -> "StageCall":
        """The call that was submitted."""

    def outcome(self) -> Outcome:
        """Wait for the stage and return its outcome; raises what the stage raised."""

    def done(self) -> bool:
        """Whether it has ended, well or badly."""


@dataclass(frozen=True)
class StageCall:
    """One stage to be run: what decides its artifact (stage, config, inputs, seed) and what people call it.

    A call is planned while some of its inputs are handles, and bound when all of them are artifacts. A bound call is
    plain data: it can be pickled and run in another process or on another machine that reaches the store.
    """

    stage: str
    config: StrictConfig  # the stage's own slice of the campaign's settings
    inputs: Mapping[str, "ArtifactRef | Handle"] = field(default_factory=dict)  # role → artifact, e.g. "rollouts/alice"
    seed: int | None = None
    agent: str = ""
    iteration: int | None = None
    variant: str = ""  # tells calls of one stage, agent and iteration apart, e.g. a benchmark's name
    restore: bool = False  # the files are needed, not only the manifest: evicted files are made again

    @property
    def label(self) -> str:
        """The name under which the campaign's record keeps the call; its iterations count from 0."""
        number = "" if self.iteration is None else f"#{self.iteration}"
        return " ".join(part for part in (self.stage, self.agent, self.variant, number) if part)

    @property
    def title(self) -> str:
        """The name that people read: ``update ada iteration 7``, and then ``evaluate ada math after iteration 7``."""
        if self.iteration is None:
            return self.label
        if self.stage != "evaluate":
            when = f"iteration {self.iteration + 1}"
        else:
            when = f"after iteration {self.iteration}" if self.iteration else "before iteration 1"
        return " ".join(part for part in (self.stage, self.agent, self.variant, when) if part)

    def bound(self) -> "StageCall":
        """Return the call with artifacts in place of handles; waits for those that are still running."""
        inputs = {
            role: item if isinstance(item, ArtifactRef) else item.outcome().ref for role, item in self.inputs.items()
        }
        return replace(self, inputs=inputs)

    @property
    def artifacts(self) -> dict[str, ArtifactRef]:
        """The inputs of a bound call."""
        found = {role: item for role, item in self.inputs.items() if isinstance(item, ArtifactRef)}
        if len(found) != len(self.inputs):
            pending = ", ".join(sorted(self.inputs.keys() - found.keys()))
            raise StageError(f"{self.title}: the inputs {pending} are not resolved; call bound() first")
        return found


class OutFolder:
    """Where a stage writes its artifact; remembers what kind of table each file is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables: dict[str, tuple[str, int, bool]] = {}

    def write(
        self, schema: TableSchema, columns: Mapping[str, Sequence[Any]], *, name: str = "", measured: bool = False
    ) -> None:
        """Write a table of this schema. A ``measured`` one holds times and the like, which stay out of the digest."""
        file = f"{name or schema.name}.parquet"
        rows = write_table(self.path / file, schema, columns)
        self.tables[file] = (schema.tag, rows, measured)


@dataclass
class Context:
    """What a stage may use but what never changes its result: progress, devices, things kept warm between calls."""

    progress: Callable[[int, int, str], None] = lambda done, total, note: None
    warn: Callable[[str], None] = lambda message: None
    partial: Path | None = None  # a folder that outlives a crash, for work finer than a stage
    judgements: Path | None = None  # answers of judges, kept by what was asked
    warm: WarmModels = field(default_factory=WarmModels)  # kept between stages of one process
    device: str = "cpu"
    attention: Attention = "auto"


@dataclass(frozen=True)
class Result:
    """What a stage's function returns beside the files that it wrote."""

    metrics: Metrics
    details: dict[str, Any] = field(default_factory=dict)
    # Called with the artifact once it is published: what was just trained can be kept warm under its digest.
    published: Callable[[ArtifactRef], None] | None = None


@dataclass(frozen=True)
class Stage:
    """A stage: raise its version when the same inputs would give another artifact."""

    name: str
    version: int
    config: type[StrictConfig]
    run: Callable[[Mapping[str, ArtifactRef], Any, int | None, OutFolder, Context], Result]

    def identity(self, call: StageCall) -> Identity:
        """Return what decides the artifact of a bound call: the hash of this is its key."""
        if not isinstance(call.config, self.config):
            raise StageError(
                f"{call.title}: its config is a {type(call.config).__name__}, not a {self.config.__name__}"
            )
        return Identity(
            stage=self.name,
            stage_version=self.version,
            config=call.config.identity(),
            inputs={role: ref.digest for role, ref in sorted(call.artifacts.items())},
            seed=call.seed,
        )


def find_stage(name: str) -> Stage:
    """Import the stage of this name."""
    stage: Stage = importlib.import_module(module(f"stages.{name}")).STAGE
    return stage


def required_seed(stage: str, seed: int | None) -> int:
    """Return the seed of a stage that cannot run without one."""
    if seed is None:
        raise StageError(f"{stage}: the call has no seed; plan it with one")
    return seed
