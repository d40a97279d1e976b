"""adopt: an existing checkpoint (folder, hub id or GGUF file) → a first agent in the store, plain safetensors."""

from collections.abc import Mapping
from typing import Any

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.config.base import StrictConfig
from stages.spec import Context, OutFolder, Result, Stage


class AdoptSlice(StrictConfig):
    """What adoption reads of the config."""

    checkpoint: CheckpointConfig
    source_digest: str  # of the files; for a hub id its name and revision, so pin a commit
    chat_template: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return the checkpoint's settings beside the others, not nested: keys of before must stay valid."""
        nested = super().identity()
        checkpoint: dict[str, Any] = nested.pop("checkpoint")
        return checkpoint | nested


def run(
    inputs: Mapping[str, ArtifactRef], config: AdoptSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Write the checkpoint as a plain one that every stage reads alike."""
    from hacrl_core.agents.adoption import adopt_checkpoint

    origin, parameters = adopt_checkpoint(config.checkpoint, out.path, config.chat_template)
    stops = origin.tokenizer.convert_ids_to_tokens(list(origin.stop_token_ids))
    details = {"source": config.checkpoint.path, "stop_tokens": stops}
    if origin.commit:
        details["commit"] = origin.commit  # what a branch or an empty revision stood for
    return Result({"adopt/parameters": float(parameters)}, details)


STAGE = Stage("adopt", 2, AdoptSlice, run)
