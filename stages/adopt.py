"""adopt: an existing checkpoint (folder, hub id or GGUF file) → a first agent in the store, plain safetensors."""

from collections.abc import Mapping
from typing import Any

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.config.base import StrictConfig
from stages.spec import Context, OutFolder, Result, Stage


class AdoptSlice(StrictConfig):
    checkpoint: CheckpointConfig
    source_digest: str  # of the files; for a hub id its name and revision, so pin a commit

    def identity(self) -> dict[str, Any]:
        return {"source_digest": self.source_digest, "gguf_file": self.checkpoint.gguf_file}


def run(
    inputs: Mapping[str, ArtifactRef], config: AdoptSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    from hacrl_core.engines.adoption import adopt_checkpoint

    return Result(adopt_checkpoint(config.checkpoint, out.path))


STAGE = Stage("adopt", 1, AdoptSlice, run)
