"""The weights of a Llama-style decoder as plain tensors, projections of one input joined into one matrix.

For a small model on a CPU they are copies in a form that takes fewer operations, which cost such a model as much as its
arithmetic: a norm's weight is multiplied into the projections that follow it, and the channels of queries and keys are
put into pairs, so that a rotation is one product of complex numbers. Products of queries and keys do not depend on the
order of their channels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PACKED_BYTES = 1 << 26  # beyond, a second copy of the weights would cost more than it saves
FEW_TOKENS = 1024  # a vocabulary that is projected whole by the first layer: a stage generates more tokens than that
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose angles do not depend on the sequence's length


@dataclass(frozen=True)
class BlockWeights:
    """The weights of one layer."""

    attention_norm: Tensor | None  # None: multiplied into qkv_t
    qkv_t: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim], Qwen3
    out_t: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor | None  # None: multiplied into gate_t and up_t
    gate_t: Tensor  # not joined with up: activation and product are faster on contiguous tensors
    gate_bias: Tensor | None
    up_t: Tensor
    up_bias: Tensor | None
    gate_up_t: Tensor | None  # both as one matrix, for the native step: in packed weights without biases behind qkv
    down_t: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    """The weights and constants of a whole decoder."""

    embedding_VH: Tensor
    head_VH: Tensor
    final_norm: Tensor
    cos_TD: Tensor
    sin_TD: Tensor  # signed: multiplies the swapped halves
    turns_TD: Tensor | None  # both as complex numbers, half as many, where channels are in pairs
    pairs_D: Tensor | None  # the channels of the model in the order of the pairs
    first_VQ: Tensor | None  # queries, keys and values of the first layer by token; small vocabularies, packed weights
    blocks: tuple[BlockWeights, ...]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    epsilon: float

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.blocks)


def decoder_weights(model: PreTrainedModel, context_length: int) -> DecoderWeights | None:
    """Read a model's weights; return None when it is not of this shape."""
    if not _supported(model):
        return None
    config, base = model.config, model.model
    attention = base.layers[0].self_attn
    head_dim = int(attention.head_dim)
    cos_TD, sin_TD = _rotations(base, min(context_length, 1 << 17))
    if cos_TD.shape[-1] != head_dim:
        return None
    turns_TD, pairs_D = _in_pairs(cos_TD, sin_TD) if _small(base) else (None, None)
    blocks = tuple(_block(layer, config, pairs_D) for layer in base.layers)
    embedding_VH, epsilon = base.embed_tokens.weight.detach(), float(config.rms_norm_eps)
    few = pairs_D is not None and len(embedding_VH) <= FEW_TOKENS
    return DecoderWeights(
        embedding_VH=embedding_VH,
        head_VH=model.lm_head.weight.detach(),
        final_norm=base.norm.weight.detach(),
        cos_TD=cos_TD,
        sin_TD=sin_TD,
        turns_TD=turns_TD,
        pairs_D=pairs_D,
        first_VQ=_projected(embedding_VH, blocks[0], epsilon) if few else None,
        blocks=blocks,
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim,
        scale=float(attention.scaling),
        epsilon=epsilon,
    )


def _supported(model: PreTrainedModel) -> bool:
    config = model.config
    if type(model).__name__ not in ARCHITECTURES or config.hidden_act not in ("silu", "swish"):
        return False
    if (config.rope_parameters or {}).get("rope_type", "default") not in ROPE_TYPES or model.lm_head.bias is not None:
        return False
    plain = all(type(module) is nn.Linear for name, module in model.named_modules() if name.endswith("_proj"))
    kinds = getattr(config, "layer_types", None)
    windowed = "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None
    return plain and not windowed


def _rotations(base: Any, length: int) -> tuple[Tensor, Tensor]:
    weight = base.embed_tokens.weight
    positions = torch.arange(length, device=weight.device)[None]
    cos, sin = base.rotary_emb(weight[:1, None], positions)
    sin = sin[0].clone()
    sin[:, : sin.shape[1] // 2].neg_()
    return cos[0].detach().contiguous(), sin


def _small(base: Any) -> bool:
    weight = base.embed_tokens.weight
    held = sum(parameter.numel() for parameter in base.layers.parameters()) * weight.element_size()
    return bool(weight.device.type == "cpu" and weight.dtype == torch.float32 and held <= PACKED_BYTES)


def _in_pairs(cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the angles as complex numbers, and the order in which each channel is followed by its partner."""
    half = cos_TD.shape[1] // 2
    pairs_D = torch.arange(2 * half).view(2, half).t().flatten()
    return torch.complex(cos_TD[:, half:].contiguous(), sin_TD[:, half:].contiguous()), pairs_D


def _block(layer: Any, config: Any, pairs_D: Tensor | None) -> BlockWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    qk_norm = None
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        qk_norm = torch.stack([q] * config.num_attention_heads + [k] * config.num_key_value_heads)
    attention_norm, mlp_norm = (n.weight.detach() for n in (layer.input_layernorm, layer.post_attention_layernorm))
    gate, up, gate_up = mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach(), None
    if pairs_D is None:
        qkv, qkv_bias = _joined(*projections)
    else:
        turning = config.num_attention_heads + config.num_key_value_heads
        qkv, qkv_bias = _packed(projections, turning, pairs_D)
        qkv, gate_up = qkv.mul_(attention_norm), torch.cat([gate, up]).mul_(mlp_norm)
        gate, up = gate_up.chunk(2)
        qk_norm = None if qk_norm is None else qk_norm[:, pairs_D]
    behind = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return BlockWeights(
        attention_norm=attention_norm if pairs_D is None else None,
        qkv_t=qkv.t(),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        out_t=attention.o_proj.weight.detach().t(),
        out_bias=_detached(attention.o_proj.bias),
        mlp_norm=mlp_norm if pairs_D is None else None,
        gate_t=gate.t(),
        gate_bias=_detached(mlp.gate_proj.bias),
        up_t=up.t(),
        up_bias=_detached(mlp.up_proj.bias),
        gate_up_t=None if gate_up is None or any(part.bias is not None for part in behind) else gate_up.t(),
        down_t=mlp.down_proj.weight.detach().t(),
        down_bias=_detached(mlp.down_proj.bias),
    )


def _projected(embedding_VH: Tensor, block: BlockWeights, epsilon: float) -> Tensor:
    """Return what a layer whose norm is multiplied into its matrix makes of every token."""
    normal_VH = torch.rms_norm(embedding_VH, embedding_VH.shape[1:], None, epsilon)
    out_VQ = normal_VH @ block.qkv_t
    return out_VQ if block.qkv_bias is None else out_VQ.add_(block.qkv_bias)


def _packed(parts: tuple[nn.Linear, ...], turning: int, pairs_D: Tensor) -> tuple[Tensor, Tensor | None]:
    """A joined copy of the projections, the channels of the first ``turning`` heads in pairs."""
    weight = torch.cat([part.weight.detach() for part in parts])
    rows = torch.arange(len(weight)).view(-1, len(pairs_D))
    rows[:turning] = rows[:turning, pairs_D]
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    return weight[rows.flatten()], torch.cat(biases)[rows.flatten()] if biases else None


def _joined(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One matrix for several projections. The modules become views of it, so nothing is held twice."""
    weight = torch.cat([part.weight.detach() for part in parts])
    start = 0
    for part in parts:
        end = start + part.out_features
        part.weight = nn.Parameter(weight[start:end], requires_grad=False)
        start = end
    biases = [part.bias for part in parts]
    return weight, torch.cat([b.detach() for b in biases if b is not None]) if biases[0] is not None else None


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()
