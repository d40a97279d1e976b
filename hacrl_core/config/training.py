"""Settings of the stages that run the learner's weights: score and update."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hacrl_core.config.base import IdentityUnlessDefault, NotIdentity, StrictConfig

Autocast = Literal["none", "bf16"]
HeadPrecision = Literal["fp32", "tf32"]
# Files of the training state of several ranks: their number must not depend on the number of ranks.
_STATE_FILES = 8


class ScoreConfig(StrictConfig):
    """How responses are scored. Numbers that matter (temperature, autocast) must equal those of the update."""

    token_budget: Annotated[PositiveInt, NotIdentity] = Field(
        4096, description="Padded tokens per forward pass; memory, not results, depends on it."
    )
    temperature: PositiveFloat = Field(1.0, description="Logits are divided by it before the softmax.")
    autocast: Autocast = Field(
        "none", description="bf16: the body of the model runs in bfloat16 (CUDA), the head in float32."
    )
    own: Annotated[Literal["scored", "sampled"], IdentityUnlessDefault] = Field(
        "scored",
        description="sampled: take the log-probs of the learner's own responses from sampling instead of a pass of "
        "their own; "
        "built-in engine in float32 only. Saves that pass, gives up the check of sampling against scoring.",
    )
    boundary: Annotated[Literal["auto", "settled", "as_written"], NotIdentity] = Field(
        "auto",
        description="settled: other agents' responses get the learner's own beginning and end; as_written: they keep "
        "their writer's white space and get the learner's first end token. auto settles them unless all agents are "
        "warm starts without stop strings, which begin and end alike.",
    )
    max_logits_mb: Annotated[PositiveInt, NotIdentity] = Field(
        256, description="Largest logits held for one response before it is split by tokens."
    )


class LoraConfig(StrictConfig):
    """Low-rank adapters through peft instead of full fine-tuning."""

    rank: PositiveInt = Field(description="Rank of the adapters.")
    alpha: PositiveFloat = Field(description="The adapter's output is scaled by alpha / rank.")
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the linear layers that get an adapter; never the output head."
    )


class UpdateConfig(StrictConfig):
    """How the learner is updated. The trainer knows nothing of the algorithm; its loss is an argument."""

    learning_rate: PositiveFloat = Field(description="Peak learning rate of AdamW.")
    minibatch_prompts: PositiveInt = Field(64, description="Prompts per optimizer step.")
    epochs: PositiveInt = Field(1, description="Passes over the iteration's responses.")
    minibatch_order: Literal["own_first", "mixed"] = Field(
        "own_first",
        description="own_first: the learner's own responses, then the foreign ones (paper); mixed: both in each "
        "minibatch.",
    )
    token_budget: Annotated[PositiveInt, NotIdentity] = Field(
        1024, description="Padded tokens per microbatch; memory, not results, depends on it."
    )
    temperature: PositiveFloat = Field(1.0, description="Logits are divided by it before the softmax; as in score.")
    gradient_norm: PositiveFloat = Field(1.0, description="The gradient of a minibatch is clipped to this norm.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay rates of AdamW's two moments.")
    epsilon: PositiveFloat = Field(1e-8, description="Added to the denominator of AdamW.")
    weight_decay: NonNegativeFloat = Field(0.01, description="Decoupled weight decay of AdamW.")
    warmup_updates: NonNegativeInt = Field(
        0, description="Updates over which the learning rate rises linearly, counted over the campaign."
    )
    gradient_checkpointing: Annotated[bool, NotIdentity] = Field(
        False, description="Recompute each layer in the backward pass: less memory, a third more time."
    )
    autocast: Autocast = Field(
        "none", description="bf16: the body of the model runs in bfloat16 (CUDA); weights and head stay float32."
    )
    boundary: Annotated[Literal["auto", "settled", "as_written"], NotIdentity] = Field(
        "auto",
        description="settled: other agents' responses get the learner's own beginning and end; as_written: they keep "
        "their writer's white space and get the learner's first end token. auto settles them unless all agents are "
        "warm starts without stop strings, which begin and end alike.",
    )
    max_logits_mb: Annotated[PositiveInt, NotIdentity] = Field(
        256, description="Largest logits held for one response before it is split by tokens."
    )
    entropy: bool = Field(
        False, description="Also report the mean entropy of the learner's distribution along each response."
    )
    lora: LoraConfig | None = Field(None, description="Train adapters only; none trains every weight.")
    head_precision: Annotated[HeadPrecision, IdentityUnlessDefault] = Field(
        "fp32",
        description="The head's products on CUDA, in score and update alike: fp32 is exact; tf32 uses tensor cores and "
        "keeps 10 bits of each factor.",
    )
    ranks: Annotated[PositiveInt, IdentityUnlessDefault] = Field(
        1,
        description="Processes that score and train this model together, each with its share of weights, gradient and "
        "optimizer (FSDP2). One GPU of the agent's `gpus` each; on the CPU any number.",
    )
    ranks_until: Annotated[dict[PositiveInt, PositiveInt], NotIdentity] = Field(
        default_factory=dict,
        description="For a campaign that goes on with another number of ranks: {30: 8} says that the first 30 "
        "iterations had 8. They keep their keys, and the training state of 8 ranks is read by as many as `ranks` says.",
    )
    offload: Annotated[Literal["none", "optimizer"], NotIdentity] = Field(
        "none",
        description="optimizer: weights, gradient and moments wait in the host's memory and AdamW runs there; needs "
        "several ranks.",
    )
    state_files: Annotated[PositiveInt | None, IdentityUnlessDefault] = Field(
        None,
        description="Files that AdamW's moments are split into, by parameter. Empty: 1 with one rank, 8 with several.",
    )

    def at(self, iteration: int) -> "UpdateConfig":
        """Return the settings of one iteration: those of now, with the number of ranks that it had."""
        ranks = next((self.ranks_until[end] for end in sorted(self.ranks_until) if iteration < end), self.ranks)
        offload = self.offload if ranks > 1 else "none"
        return self.model_copy(update={"ranks": ranks, "ranks_until": {}, "offload": offload})

    @property
    def files_of_state(self) -> int:
        """The number of files that the training state is split into."""
        return self.state_files or (1 if self.ranks == 1 else _STATE_FILES)

    @model_validator(mode="after")
    def _offload_needs_ranks(self) -> Self:
        if self.offload != "none" and self.ranks == 1:
            raise ValueError("offload optimizer needs several ranks; set update.ranks, or offload: none")
        return self
