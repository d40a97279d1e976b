"""How responses are sampled, and by which engine."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from hacrl_core.config.addresses import userinfo
from hacrl_core.config.base import Device, NotIdentity, StrictConfig

Dtype = Literal["float32", "bfloat16", "float16"]


class BuiltinEngineConfig(StrictConfig):
    """The engine that needs only torch and transformers. Device and fast_path change numbers by rounding alone."""

    kind: Literal["builtin"] = "builtin"
    dtype: Dtype = Field(default="float32", description="Precision of the weights and the KV cache while sampling.")
    device: Annotated[Device, NotIdentity] = Field(
        default="auto", description="'auto' takes the first GPU where there is one; or 'cpu', 'cuda', 'cuda:1'."
    )
    fast_path: Annotated[bool, NotIdentity] = Field(
        default=True,
        description="Use the hand-written decoding step for Llama- and Qwen-style models where it reproduces the "
        "model's "
        "own forward; off, or for other models, the transformers cache does the work.",
    )
    replicas: Annotated[PositiveInt, NotIdentity] = Field(
        default=1,
        description="Engines with a copy of the model each, on a Ray cluster: one actor each, on any nodes. They share "
        "the shards of a generation (twice batch_size responses each) and change no bit of it.",
    )
    keep: Annotated[bool, NotIdentity] = Field(
        default=True,
        description="Keep the agent loaded between stages; false unloads it after sampling, so that score and update "
        "have "
        "the device's memory to themselves, and loads it again for the next sampling.",
    )


class VllmEngineConfig(StrictConfig):
    """vLLM in an environment of its own: a worker that is started, fed and stopped, or a server at a URL.

    Where and how wide it runs changes numbers by rounding only.
    """

    kind: Literal["vllm"] = "vllm"
    python: Annotated[str | None, NotIdentity] = Field(
        default=None,
        description="Python interpreter of the vLLM environment; empty takes the one that `make vllm` built.",
    )
    url: Annotated[str | None, NotIdentity] = Field(
        default=None,
        description="Address of a vLLM server that the user runs; empty starts a worker process instead.",
        pattern=r"^https?://",
    )
    tensor_parallel_size: Annotated[PositiveInt, NotIdentity] = Field(
        default=1, description="GPUs that share one copy of the model."
    )
    memory_share: Annotated[float, NotIdentity] = Field(
        default=0.85,
        gt=0,
        le=1,
        description="Share of the GPU's memory (CPU build: of main memory for the KV cache) vLLM may take.",
    )
    dtype: Dtype | Literal["auto"] = Field(
        default="auto", description="Precision while sampling; auto takes the checkpoint's."
    )
    max_length: Annotated[PositiveInt | None, NotIdentity] = Field(
        default=None, description="Longest prompt plus response, in tokens; empty takes the model's context length."
    )
    max_sequences: Annotated[PositiveInt, NotIdentity] = Field(
        default=256, description="Responses in flight at a time."
    )
    enforce_eager: Annotated[bool, NotIdentity] = Field(
        default=False, description="Do not capture CUDA graphs nor compile: starts faster, samples slower."
    )
    startup_timeout: Annotated[float, NotIdentity] = Field(
        default=600.0, gt=0, description="Seconds the worker may take to load before it is given up."
    )
    request_timeout: Annotated[float, NotIdentity] = Field(
        default=3600.0, gt=0, description="Seconds one call may take before the worker is restarted."
    )
    max_restarts: Annotated[int, NotIdentity] = Field(
        default=2, ge=0, description="Restarts of a dead worker within one call before the stage fails."
    )
    weight_tolerance: Annotated[float, NotIdentity] = Field(
        default=1e-2,
        gt=0,
        description="Largest difference of a probe's log-probs from the built-in forward after a weight swap; above it "
        "the worker is restarted, never sampled from.",
    )
    replicas: Annotated[PositiveInt, NotIdentity] = Field(
        default=1,
        description="Engines with a copy of the model each, tensor_parallel_size GPUs wide, behind one queue of "
        "prompts.",
    )
    keep: Annotated[bool | Literal["sleep"], NotIdentity] = Field(
        default=True,
        description="Keep the agent loaded between stages; false ends the engine after sampling, so that score and "
        "update have the device's memory to themselves, and starts it again for the next sampling; sleep frees the "
        "memory too but keeps the process, which wakes and takes the new weights in seconds.",
    )

    @model_validator(mode="after")
    def _a_server_is_the_users(self) -> Self:
        if self.url is not None and (self.replicas > 1 or self.keep == "sleep"):
            setting = "replicas" if self.replicas > 1 else "keep: sleep"
            raise ValueError(f"engine.{setting} is for workers that hacrl starts, not for a server at a url; remove it")
        return self

    @property
    def in_flight(self) -> int:
        """Responses in flight at a time, over all replicas."""
        return self.max_sequences * self.replicas

    @field_validator("url")
    @classmethod
    def _without_password(cls, value: str | None) -> str | None:
        """Refuse a password: the config is shown in reports, MLflow and Prefect, and urllib would not send it."""
        if value is not None and userinfo(value) is not None:
            raise ValueError(
                "a user or password in the config would be shown in reports; give the address without it, and the "
                "server's key in the environment as HACRL_VLLM_API_KEY"
            )
        return value


EngineConfig = Annotated[BuiltinEngineConfig | VllmEngineConfig, Field(discriminator="kind")]


class GenerateConfig(StrictConfig):
    """The generate stage: the distribution sampled from, its limits, and the engine."""

    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Keep the most likely tokens that together reach this probability."
    )
    top_k: int = Field(default=0, ge=0, description="Keep this many most likely tokens; 0 keeps all.")
    max_tokens: PositiveInt = Field(description="Longest response, in the agent's own tokens.")
    max_prompt_tokens: PositiveInt | None = Field(
        default=None,
        description="Longest prompt, in tokens; a longer one is an error. Empty: the context length decides.",
    )
    stop_strings: tuple[str, ...] = Field(
        default=(), description="A response ends where one of these appears; the string itself is not part of the text."
    )
    batch_size: Annotated[PositiveInt, NotIdentity] = Field(
        default=256, description="Responses in flight at a time; does not change what is sampled."
    )
    mismatch_warning: Annotated[float, NotIdentity] = Field(
        default=0.02,
        gt=0,
        description="Warn when the mean absolute difference of sampling and scoring log-probs per token exceeds this.",
    )
    engine: EngineConfig = Field(default=BuiltinEngineConfig(), description="builtin or vllm, with its settings.")

    @model_validator(mode="after")
    def _stop_strings_are_not_empty(self) -> "GenerateConfig":
        if any(not text for text in self.stop_strings):
            raise ValueError("stop_strings: an empty string would end every response at once; remove it")
        return self
