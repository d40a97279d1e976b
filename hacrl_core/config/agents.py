"""Where an agent comes from, and what is its own: objective, engine, training, devices, template."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hacrl_core.config.base import Device, NotIdentity, StrictConfig
from hacrl_core.config.warmstart import WarmstartConfig

Attention = Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"]


def _no_bare_preset(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"{value!r} is not a group of settings; set the key below it: algorithm.preset={value}")
    return value


AlgorithmSettings = Annotated[dict[str, Any], BeforeValidator(_no_bare_preset)]


class CheckpointConfig(StrictConfig):
    """An existing model: a folder, a hub id, or a GGUF file in either. A digest identifies it, not its path."""

    path: Annotated[str, NotIdentity] = Field(
        min_length=1,
        description="Folder of a transformers checkpoint, a hub id such as Qwen/Qwen3-1.7B-Base, or package:NAME for "
        "the "
        "folder of an installed Python package.",
    )
    revision: Annotated[str | None, NotIdentity] = Field(
        None,
        description="Commit, branch or tag of the hub id; a commit makes the campaign repeatable. Empty: the main "
        "branch; the "
        "commit it stood for is recorded.",
    )
    gguf_file: str | None = Field(None, description="Name of a GGUF file in that folder; it is dequantised to float32.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the checkpoint. Only for sources you trust."
    )
    stop_tokens: tuple[str, ...] = Field(
        (),
        description="Tokens that end a response besides the model's own end tokens, e.g. ['<|im_end|>'] for a base "
        "model with "
        "a chat template. The first one also ends other agents' responses in this agent's tokens.",
    )
    add_bos: bool = Field(
        False,
        description="Start every prompt with BOS, for a model that needs it and whose tokenizer and template omit it.",
    )


class AgentConfig(StrictConfig):
    """One agent: its origin, its own settings, its devices, and when it takes part."""

    warmstart: WarmstartConfig | None = Field(None, description="Make a tiny agent by supervised training.")
    checkpoint: CheckpointConfig | None = Field(None, description="Start from an existing model.")
    chat_template: str | None = Field(None, description="A Jinja chat template that replaces the tokenizer's.")

    template_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Values for the chat template, e.g. {enable_thinking: false} for Qwen3 without its thinking.",
    )

    algorithm: AlgorithmSettings = Field(
        default_factory=dict,
        description="This learner's own values of any setting below `algorithm`, e.g. cross_clip_delta.",
    )
    generate: dict[str, Any] = Field(
        default_factory=dict,
        description="This agent's own values of any setting below `generate`, e.g. {engine: {dtype: bfloat16}}. "
        "Another "
        "engine.kind replaces the campaign's engine settings as a whole.",
    )
    score: dict[str, Any] = Field(
        default_factory=dict, description="This learner's own values of any setting below `score`."
    )
    update: dict[str, Any] = Field(
        default_factory=dict,
        description="This learner's own values of any setting below `update`, e.g. learning_rate, or lora: {rank: 16, "
        "alpha: 32}.",
    )

    device: Device = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Where it scores and learns: 'auto' takes a GPU if there is one; or cpu, cuda, cuda:1 (counted "
        "among `gpus`).",
    )
    gpus: tuple[NonNegativeInt, ...] = Field(
        (),
        description="GPUs that this agent's worker sees, its engine included. Empty: all. Agents whose GPUs overlap "
        "take turns.",
    )
    gpus_for: dict[Literal["sample", "evaluate"], tuple[NonNegativeInt, ...]] = Field(
        default_factory=dict,
        description="GPUs of single roles where they are others than `gpus`, each role with a process of its own: "
        "{evaluate: [7]} runs benchmarks on a spare GPU beside training, {sample: [4, 5]} samples apart from learning.",
    )
    resources: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="What this agent asks of a Ray cluster besides CPUs and GPUs, e.g. {accelerator_type:H100: 0.001}.",
    )
    attention: Attention = Field(
        "auto", description="Attention of transformers while scoring and learning; auto takes its best for the model."
    )

    joins: NonNegativeInt = Field(
        0,
        description="First iteration the agent takes part in; a later one lets it join a campaign that has run "
        "already.",
    )
    leaves: PositiveInt | None = Field(
        None, description="First iteration the agent no longer takes part in. Empty: it stays."
    )

    @property
    def template_override(self) -> str | None:
        """The template that replaces the tokenizer's; an adopted checkpoint's tokenizer already has it."""
        return self.chat_template if self.checkpoint is None else None

    @property
    def own_code(self) -> bool:
        """Whether the agent's checkpoint may run Python code of its own."""
        return self.checkpoint is not None and self.checkpoint.trust_remote_code

    def takes_part(self, iteration: int) -> bool:
        """Return whether the agent takes part in an iteration."""
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
