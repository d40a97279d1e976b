"""Where an agent comes from, and what is its own: objective, device, template."""

from typing import Any, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from hacrl_core.config.base import StrictConfig
from hacrl_core.config.warmstart import WarmstartConfig


class CheckpointConfig(StrictConfig):
    """An existing model: a folder, a hub id, or a GGUF file inside either."""

    path: str = Field(description="Folder of a transformers checkpoint, or a hub id such as Qwen/Qwen3-1.7B-Base.")
    revision: str | None = Field(
        None, description="Commit, branch or tag of the hub id; pin it for a repeatable campaign."
    )
    gguf_file: str | None = Field(None, description="Name of a GGUF file in that folder; it is dequantised to float32.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the checkpoint. Only for sources you trust."
    )


class AgentConfig(StrictConfig):
    warmstart: WarmstartConfig | None = Field(None, description="Make a tiny agent by supervised training.")
    checkpoint: CheckpointConfig | None = Field(None, description="Start from an existing model.")
    algorithm: dict[str, Any] = Field(
        default_factory=dict,
        description="This learner's own values of any setting below `algorithm`, e.g. cross_clip_delta.",
    )
    chat_template: str | None = Field(None, description="A Jinja chat template that replaces the tokenizer's.")
    device: str = Field("auto", description="'auto' takes a GPU where there is one; or cpu, cuda, cuda:1.")

    joins: NonNegativeInt = Field(
        0,
        description="First iteration the agent takes part in; a later one lets it join a campaign that has run already.",
    )
    leaves: PositiveInt | None = Field(
        None, description="First iteration the agent no longer takes part in. Empty: it stays."
    )

    def takes_part(self, iteration: int) -> bool:
        return self.joins <= iteration and (self.leaves is None or iteration < self.leaves)

    @model_validator(mode="after")
    def _joins_before_it_leaves(self) -> Self:
        if self.leaves is not None and self.leaves <= self.joins:
            raise ValueError(f"leaves {self.leaves} is not after joins {self.joins}; the agent would never take part")
        return self

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.warmstart is None) == (self.checkpoint is None):
            raise ValueError("give either warmstart or checkpoint: an agent has one origin")
        return self
