"""A first agent made by supervised training: its architecture, its tokenizer, and what it is taught for how long."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from hacrl_core.config.base import StrictConfig
from hacrl_core.config.problems import KINDS

Architecture = Literal["llama", "qwen3", "qwen2", "mistral", "olmo2"]


class TokenizerConfig(StrictConfig):
    """The tokenizer of a warm-started agent."""

    kind: Literal["characters", "bpe"] = Field(
        description="characters: a token per byte; bpe: merges learned from the corpus, so that numbers become "
        "multi-digit tokens."
    )
    vocab_size: PositiveInt = Field(
        default=512,
        ge=300,
        description="Most tokens a trained BPE may have, 256 bytes and the special tokens included.",
    )


class ModelConfig(StrictConfig):
    """The architecture of a warm-started agent."""

    architecture: Architecture = Field(description="Family of the transformers model.")
    hidden_size: PositiveInt = Field(description="Width of the residual stream; a multiple of heads.")
    layers: PositiveInt = Field(description="Number of decoder layers.")
    heads: PositiveInt = Field(description="Attention heads; a multiple of kv_heads.")
    kv_heads: PositiveInt = Field(description="Key and value heads.")
    intermediate_size: PositiveInt = Field(description="Width of the gated MLP.")
    max_position_embeddings: PositiveInt = Field(
        default=256, description="Longest sequence, prompt and response together."
    )
    tie_word_embeddings: bool = Field(default=False, description="Share the input embedding with the output layer.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        # Rotary embeddings rotate pairs of channels.
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of twice heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self


class StopRule(StrictConfig):
    """End early, by competence instead of steps: the cool-down begins when a watched kind is solved often enough."""

    kind: str = Field(
        description="The kind of problem to watch, usually the one rare in the mixture; all of them where a task has "
        "no mixture: all."
    )
    accuracy: float = Field(
        gt=0, le=1, description="Begin the cool-down when this share of watched problems is solved greedily."
    )
    every: PositiveInt = Field(default=10, description="Steps between two looks.")
    problems: PositiveInt = Field(default=200, description="How many problems a look takes.")


class WarmstartConfig(StrictConfig):
    """Supervised training of a tiny agent on worked answers."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    mixture: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="Weight of each kind in the training texts, instead of the task's own weights: kinds of "
        "arithmetic, or values of the tag kind of a task's problems. Empty, for a task: its problems as they come.",
    )
    corpus_problems: PositiveInt = Field(
        default=8192, description="Training problems drawn, with repeats, for the corpus."
    )
    steps: PositiveInt = Field(description="Most optimizer steps, the cool-down included.")
    stop: StopRule | None = Field(
        default=None, description="When to begin the cool-down before that; empty: take all steps."
    )
    batch_size: PositiveInt = Field(
        default=16, description="Problems per step; small batches learn most per second on a CPU."
    )
    learning_rate: PositiveFloat = Field(default=2e-3, description="AdamW's highest learning rate.")
    warmup_steps: int = Field(default=20, ge=0, description="Steps over which the learning rate rises from zero.")
    cooldown_steps: int | None = Field(
        default=None, ge=0, description="Last steps, over which it falls to zero; empty: it falls over all of them."
    )

    @model_validator(mode="after")
    def _stop_in_mixture(self) -> Self:
        if self.stop is not None and self.stop.kind not in (self.mixture or ("all",)):
            raise ValueError(f"stop.kind {self.stop.kind} is not in the mixture {sorted(self.mixture)}")
        if self.stop is not None and self.cooldown_steps is None:
            raise ValueError(
                "stop needs cooldown_steps: a rate that falls from the first step on depends on the last one"
            )
        return self

    def check_arithmetic(self) -> None:
        """Raise ValueError unless the mixture names kinds of the built-in arithmetic."""
        unknown = sorted(set(self.mixture) - set(KINDS))
        if unknown or not self.mixture:
            found = f"{unknown[0]!r} is not one of" if unknown else "is empty; give a weight to some of"
            raise ValueError(f"warmstart.mixture {found} {', '.join(KINDS)}")
