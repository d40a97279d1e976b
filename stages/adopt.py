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
    chat_template: str | None = None

    def identity(self) -> dict[str, Any]:
        own = self.checkpoint.model_dump(
            mode="json", include={"gguf_file", "stop_tokens", "add_bos", "trust_remote_code"}
        )
        return {"source_digest": self.source_digest, "chat_template": self.chat_template, **own}


def run(
    inputs: Mapping[str, ArtifactRef], config: AdoptSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    from hacrl_core.agents.adoption import adopt_checkpoint

    origin, parameters = adopt_checkpoint(config.checkpoint, out.path, config.chat_template)
    stops = origin.tokenizer.convert_ids_to_tokens(list(origin.stop_token_ids))
    details = {"source": config.checkpoint.path, "stop_tokens": stops}
    if origin.commit:
        details["commit"] = origin.commit  # what a branch or an empty revision stood for
    return Result({"adopt/parameters": float(parameters)}, details)


STAGE = Stage("adopt", 2, AdoptSlice, run)
