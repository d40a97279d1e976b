"""A bench for single stages: a store, input tables made by hand, and slices of config for tiny agents and prompts."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.config.base import StrictConfig
from hacrl_core.config.problems import ArithmeticConfig, ArithmeticProblems
from hacrl_core.config.warmstart import WarmstartConfig
from hacrl_core.contracts.manifest import Identity, Provenance
from hacrl_core.contracts.tables import SCHEMAS, read_table
from hacrl_core.problems import load_problems
from stages.runner import run_stage
from stages.sample import SampleSlice
from stages.spec import Context, Outcome, OutFolder, StageCall
from stages.warmstart import WarmstartSlice

TASK = ArithmeticProblems(kinds={"addition": 1.0}, levels={"easy": 1.0})
LLAMA: dict[str, Any] = {
    "architecture": "llama",
    "hidden_size": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "intermediate_size": 24,
}


def warmstart_slice(**changes: Any) -> WarmstartSlice:
    """A tiny agent that learns easy additions for a few steps."""
    settings = {
        "model": LLAMA,
        "tokenizer": {"kind": "characters"},
        "mixture": {"addition": 1.0},
        "corpus_problems": 64,
        "steps": 30,
        "learning_rate": 1e-2,
    }
    corpus = ArithmeticConfig(kinds={"addition": 1.0}, levels={"easy": 1.0})
    return WarmstartSlice(warmstart=WarmstartConfig.model_validate({**settings, **changes}), corpus=corpus)


@dataclass
class Bench:
    """A store to run single stages in."""

    store: Store
    context: Context = field(default_factory=Context)
    _numbers: Any = field(default_factory=itertools.count)

    def run(
        self, stage: str, config: StrictConfig, inputs: Mapping[str, ArtifactRef] | None = None, seed: int | None = 0
    ) -> Outcome:
        """Run a stage, or find its artifact in the store."""
        call = StageCall(stage, config, inputs or {}, seed)
        return run_stage(self.store, call, self.context)

    def publish(self, stage: str, **tables: Mapping[str, Sequence[Any]]) -> ArtifactRef:
        """Publish tables made by hand, as if a stage had written them."""
        identity = Identity(stage=stage, stage_version=0, config={"number": next(self._numbers)}, inputs={})
        out = OutFolder(self.store.stage_folder(identity.key))
        for name, columns in tables.items():
            out.write(SCHEMAS[name], columns)
        return self.store.publish(out.path, identity, out.tables, {}, {}, Provenance(started=0, finished=0, seconds=0))

    def rows(self, ref: ArtifactRef, table: str) -> list[dict[str, Any]]:
        """Return the rows of one of an artifact's tables."""
        rows: list[dict[str, Any]] = read_table(ref.path / f"{table}.parquet", SCHEMAS[table]).to_pylist()
        return rows


def sample_slice(**changes: Any) -> SampleSlice:
    """The problems of iteration 0."""
    problems = changes.pop("problems", TASK)
    settings = {"iteration": 0, "prompts": 4, "content_digest": load_problems(problems).content_digest, **changes}
    return SampleSlice(problems=problems, **settings)
