"""A model spread over ranks: body and head as one module, sharded by FSDP2, each rank's slices read from the files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hacrl_core.agents.agent import context_length, is_trusted
from hacrl_core.config.agents import Attention
from hacrl_core.config.training import Autocast, LoraConfig, UpdateConfig
from hacrl_core.errors import EngineError
from hacrl_core.learning.fused import read_head
from hacrl_core.learning.prefixes import shares_prefixes
from hacrl_core.learning.sharded import adapters, loading
from hacrl_core.learning.sharded.ranks import Rank

Found = TypeVar("Found")


class Policy(nn.Module):
    """A causal model whose whole weights exist only inside `forward`.

    Body and head are read there, together: FSDP2 gathers embeddings, last norm and head before it and each layer when
    it runs, and it reduces the gradients of all of them, also the one that the fused loss returns for the head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[PreTrainedModel], Found]) -> Found:
        """Run ``work`` on the model; every rank must do so at the same time."""
        return work(self.model)


@dataclass(frozen=True)
class Numerics:
    """What decides how a sharded model computes and where its slices are; one agent is built for one of them."""

    autocast: Autocast = "none"
    attention: Attention = "auto"
    offload: bool = False
    lora: LoraConfig | None = None


def numerics_of(update: UpdateConfig, attention: Attention, *, adapters: bool = False) -> Numerics:
    """Return how an agent with these settings computes; scoring runs merged weights, without adapters."""
    return Numerics(update.autocast, attention, update.offload == "optimizer", update.lora if adapters else None)


@dataclass(frozen=True)
class ShardedAgent:
    """One rank's part of an agent."""

    rank: Rank
    policy: Policy
    checkpoint: Path
    digest: str  # of the version in memory
    numerics: Numerics
    shares_prefixes: bool
    folded: bool = False  # its adapters are in the weights (`adapters.fold`), so it computes as without them

    @property
    def model(self) -> PreTrainedModel:
        """The model inside the policy; its parameters are this rank's slices."""
        return self.policy.model

    @property
    def pad_token_id(self) -> int:
        """A token for padding, which no real token sees."""
        pad = getattr(self.model.config.get_text_config(), "pad_token_id", None)
        return int(pad or 0)

    @property
    def context_length(self) -> int:
        """The most positions the model has."""
        return context_length(self.model)

    def computes(self, numerics: Numerics) -> bool:
        """Whether it can compute so, its adapters folded or not."""
        return numerics == self.numerics or (self.folded and numerics == replace(self.numerics, lora=None))

    @property
    def vocabulary(self) -> int:
        """The rows of the head."""
        return int(self.model.get_output_embeddings().weight.shape[0])


def load_sharded(
    rank: Rank, checkpoint: Path, digest: str, numerics: Numerics, *, own_code: bool = False, seed: int = 0
) -> ShardedAgent:
    """Build an agent over all ranks. No rank ever holds more of it than its slices and one layer.

    With LoRA the adapters are those of the checkpoint where it has any, else new ones by ``seed``.
    """
    model = skeleton(checkpoint, numerics.attention, own_code=own_code)
    if numerics.lora is not None:
        adapters.inject(model, numerics.lora)
    policy = Policy(model)
    shard(policy, rank, numerics)
    _allocate(policy, torch.device("cpu") if numerics.offload else rank.device)
    model.tie_weights()
    loading.read_slices(model, checkpoint, rank)
    if numerics.lora is not None:
        adapters.initialise(model, checkpoint, rank, seed)
    model.eval()
    with torch.no_grad():
        # Refuses heads that are not supported.
        policy(read_head)
        shared = numerics.autocast == "none" and not numerics.offload and policy(shares_prefixes)
    policy.reshard()  # type: ignore[operator]
    return ShardedAgent(rank, policy, checkpoint, digest, numerics, shared)


def agent_of(
    rank: Rank, checkpoint: Path, digest: str, numerics: Numerics, *, own_code: bool = False, seed: int = 0
) -> ShardedAgent:
    """Return the rank's part of a version: the one it has kept, or loaded in its place.

    One whose adapters are folded serves score, which wants none, as it is, and the next update after they are taken
    out.
    """
    kept: ShardedAgent | None = rank.agent
    if kept is None or kept.digest != digest or not kept.computes(numerics):
        rank.agent = kept = None  # frees the old slices before the new ones are loaded
        rank.agent = kept = load_sharded(rank, checkpoint, digest, numerics, own_code=own_code, seed=seed)
    elif kept.folded and numerics.lora is not None:
        adapters.unfold(kept.model, rank)
        rank.agent = kept = replace(kept, folded=False)
    return kept


def first_of(rank: Rank, checkpoint: Path, digest: str, numerics: Numerics, *, own_code: bool = False) -> ShardedAgent:
    """Return the rank's part of a first version, the reference of KL; it is kept beside the newest one."""
    kept = rank.first
    if kept is None or (kept.digest, kept.numerics) != (digest, numerics):
        rank.first = None
        rank.first = load_sharded(rank, checkpoint, digest, numerics, own_code=own_code)
    return rank.first  # type: ignore[return-value]


@dataclass(frozen=True)
class Published:
    """A task: what was trained last is now the version of this digest."""

    checkpoint: Path
    digest: str

    def __call__(self, rank: Rank) -> None:
        """Give the kept slices their name."""
        if rank.agent is not None:
            rank.agent = replace(rank.agent, checkpoint=self.checkpoint, digest=self.digest)


class _ParametersOnMeta(TorchFunctionMode):
    """Weights are made by ``torch.empty`` and get no memory; what a model computes for itself (buffers) does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = dict(kwargs or {})
        if func is torch.empty and settings.get("device") is None:
            settings["device"] = "meta"
        return func(*args, **settings)


def skeleton(checkpoint: Path, attention: Attention = "auto", *, own_code: bool = False) -> PreTrainedModel:
    """Return a checkpoint's model in float32 with all parameters on the meta device, and real buffers."""
    if not (checkpoint / "config.json").is_file():
        raise EngineError(f"agent {checkpoint}: no config.json; give the folder of a transformers checkpoint")
    trusted = is_trusted(checkpoint, own_code)
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trusted)
    with _ParametersOnMeta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=trusted, **chosen
        )
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:  # norms are made by torch.ones
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad))
    model.tie_weights()
    return model


def shard(policy: Policy, rank: Rank, numerics: Numerics) -> None:
    """Spread a policy over the ranks: a group per layer, and one of embeddings, last norm and head.

    The root's group stays float32, also under bf16: it holds the head, and a tied head is the embedding. Gradients are
    added up in float32, not averaged: the loss is already divided by the weight of the whole minibatch.
    """
    layers = [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise EngineError(f"model {type(policy.model).__name__}: has no layers to shard; set update.ranks: 1")
    offload: OffloadPolicy = OffloadPolicy()
    if numerics.offload:
        offload = CPUOffloadPolicy(pin_memory=rank.device.type == "cuda")
    plain = MixedPrecisionPolicy()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        body = half if numerics.autocast == "bf16" else plain
        fully_shard(layer, mesh=rank.mesh, mp_policy=body, offload_policy=offload)
    fully_shard(policy, mesh=rank.mesh, mp_policy=plain, offload_policy=offload)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            module.set_gradient_divide_factor(1.0)
    if numerics.autocast == "bf16":
        policy.model.base_model.register_forward_hook(_in_float32)


def _in_float32(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Hand the head float32 states, whatever type the last norm of the architecture returns."""
    output.last_hidden_state = output.last_hidden_state.float()
    return output


def _allocate(policy: Policy, device: torch.device) -> None:
    """Give every slice its memory, without numbers, and move the buffers to the device."""

    def real(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    policy._apply(real)  # type: ignore[no-untyped-call]


def set_checkpointing(agent: ShardedAgent, on: bool) -> None:
    """Let layers be recomputed in the backward pass, or not: dropout stays off, because only their own flag is set."""
    model = agent.model
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    for layer in (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)):
        layer.training = on


def slices(model: PreTrainedModel, *, trained: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Return every parameter once, or only those that are trained; a tied head goes by its first name."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad or not trained)
