"""The body of a small Llama-style decoder over the nodes of a prefix tree, in few operations on large tensors.

Under the model's own code a layer is some sixty operations, most of them a pass over memory. Here queries, keys and
values are one product, the weight of a norm is folded into the matrix that follows it, rotation is one complex product,
and attention keeps its scores. Autograd joins the pieces. The projections of the first layer depend on a token alone
and run once per distinct token. The last layer goes on with the positions that predict a response only.
"""

import weakref
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from hacrl_core.agents.freed_memory import is_large
from hacrl_core.learning.fused.head import hidden_states
from hacrl_core.learning.lean import native
from hacrl_core.learning.lean.attention import attend, cells_of, tree_of
from hacrl_core.learning.sequences import Ints, Microbatch, TrainSequence, Tree, microbatches
from hacrl_core.native.products import add_linear, linear

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LONGEST = 256  # tokens of a row: the scores of attention are kept
_TOLERANCE = 1e-5  # relative to the largest hidden state, float32


def lean_states(model: PreTrainedModel, batch: Microbatch) -> Tensor:
    """Last hidden states [R, H] of the positions that predict a response token."""
    tree, base = tree_of(batch), model.model
    places_R = torch.from_numpy(tree.place_BT.reshape(-1)[batch.positions_R])
    few = len(places_R) <= len(tree.tokens_N)  # responses that share much have more positions than nodes
    shape = _Shape(model, tree, batch)
    x_NH = _layers(base, tree.tokens_N, shape, places_R if few else None)
    states: Tensor = normed(x_NH, float(model.config.rms_norm_eps)) * base.norm.weight
    return states if few else F.embedding(places_R, states)


def runs_lean(model: PreTrainedModel, batch: Microbatch) -> bool:
    """Whether the pass fits model and microbatch: read from the model's modules each time, proved on a probe once."""
    if batch.input_ids_BT.shape[1] > LONGEST or torch.is_autocast_enabled("cpu") or not _plain(model):
        return False
    if model not in _proved:
        _proved[model] = depends_on_prefixes(model) and not is_large(model) and _probe(model)
    return _proved[model]


_proved: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def depends_on_prefixes(model: PreTrainedModel) -> bool:
    """Whether a float32 model on the CPU has neither windows nor recurrent layers.

    They look at neighbours by place: a short probe would not find them out.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    windowed = any(kind != "full_attention" for kind in kinds) if kinds else getattr(config, "sliding_window", None)
    first = next(model.parameters())
    return first.device.type == "cpu" and first.dtype == torch.float32 and not windowed


def _plain(model: PreTrainedModel) -> bool:
    """Adapters come and go. Sharded layers, and those that run again in the backward pass, go by the model's code."""
    if type(model).__name__ not in ARCHITECTURES or model.config.hidden_act not in ("silu", "swish"):
        return False
    for layer in model.model.layers:
        again = getattr(layer, "gradient_checkpointing", False) and layer.training
        linear = [*_projections(layer.self_attn), layer.self_attn.o_proj, *_children(layer.mlp)]
        if again or not all(_is_plain(module) for module in linear):
            return False
    return True


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.bias is None and type(module.weight) is nn.Parameter


@torch.no_grad()
def _probe(model: PreTrainedModel) -> bool:
    """Two prompts, one with three responses that begin alike, against the model's own forward."""
    ids = ((np.arange(56) * 7919 + 3) % model.config.get_text_config().vocab_size).tolist()
    answers = (ids[6:42], ids[6:14] + ids[42:46], ids[6:14] + ids[46:48])  # the first asks in two blocks
    sequences = [TrainSequence(tuple(ids[:6]), tuple(answer)) for answer in answers]
    sequences.append(TrainSequence(tuple(ids[48:52]), (ids[52],)))
    (batch,) = microbatches(sequences, 1 << 20, 0, share_prefixes=True)
    expected_RH = hidden_states(model, torch.from_numpy(batch.input_ids_BT)).flatten(0, 1)[batch.positions_R]
    try:
        found_RH = lean_states(model, batch)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it is not built as its name says
        return False
    return bool((found_RH - expected_RH).abs().max() <= _TOLERANCE * expected_RH.abs().max())


class _Shape:
    """What all layers of a pass have in common."""

    def __init__(self, model: PreTrainedModel, tree: Tree, batch: Microbatch) -> None:
        self.heads, self.key_heads = _heads(model)
        self.turned = self.heads + self.key_heads
        self.channels = int(model.model.layers[0].self_attn.head_dim)
        self.epsilon = float(model.config.rms_norm_eps)
        if native.takes(model.model.embed_tokens.weight):
            paths = native.paths_of(batch, tree, self.heads, self.key_heads)
            turns = self._angles(model.model, torch.arange(batch.input_ids_BT.shape[1]))
            self._attend = partial(native.attend, turns=torch.view_as_real(turns), paths=paths)
        else:
            turn = self._turn(self._angles(model.model, torch.from_numpy(tree.depth_N)))
            self._attend = partial(attend, turn=turn, cells=cells_of(batch, tree, self.heads, self.key_heads))

    def attend(self, joined: Tensor, scale: float) -> Tensor:
        """Return what each node reads, from the queries, keys and values of all."""
        read: Tensor = self._attend(joined, scale=scale)
        return read

    def _angles(self, base: Any, depths: Tensor) -> Tensor:
        """Return the rotation of each pair of channels at some depths, as complex numbers."""
        cos, sin = base.rotary_emb(base.embed_tokens.weight[:1, None], depths[None])
        half = self.channels // 2
        return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())

    def _turn(self, angles_ND: Tensor) -> Tensor:
        """Return the rotation of every node's heads; values are not turned."""
        turn = torch.ones(len(angles_ND), self.turned + self.key_heads, angles_ND.shape[1], dtype=torch.complex64)
        turn[:, : self.turned] = angles_ND[:, None]
        return turn

    def paired(self, weight: Tensor) -> Tensor:
        """Put the two channels that a rotation mixes beside each other: half a head apart in the model."""
        return weight.view(-1, 2, self.channels // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _heads(model: PreTrainedModel) -> tuple[int, int]:
    return int(model.config.num_attention_heads), int(model.config.num_key_value_heads)


def _layers(base: Any, tokens_N: Ints, shape: _Shape, places_R: Tensor | None) -> Tensor:
    """Return the residual stream behind the last layer, of the given nodes or of all."""
    seen_U, found_N = np.unique(tokens_N, return_inverse=True)
    place_N = torch.from_numpy(found_N)
    x_UH = base.embed_tokens(torch.from_numpy(seen_U))
    x_NH = F.embedding(place_N, x_UH)
    for layer in base.layers:
        first, last = layer is base.layers[0], layer is base.layers[-1]
        joined = _projected(layer, x_UH if first else x_NH, shape)
        if first:
            joined = F.embedding(place_N, joined)
        scale = float(layer.self_attn.scaling)
        joined = joined.view(len(x_NH), -1, shape.channels)
        mixed_NC = shape.attend(joined, scale)
        if last and places_R is not None:
            x_NH, mixed_NC = F.embedding(places_R, x_NH), F.embedding(places_R, mixed_NC)
        x_NH = add_linear(x_NH, mixed_NC, layer.self_attn.o_proj.weight)
        hat_NH = normed(x_NH, shape.epsilon)
        gate_NF, up_NF = (
            linear(hat_NH, part.weight * layer.post_attention_layernorm.weight)
            for part in (layer.mlp.gate_proj, layer.mlp.up_proj)
        )
        x_NH = add_linear(x_NH, gated(gate_NF, up_NF), layer.mlp.down_proj.weight)
    return x_NH


def _projected(layer: Any, x_NH: Tensor, shape: _Shape) -> Tensor:
    """Return queries, keys and values side by side, paired for rotation and not yet turned."""
    attention = layer.self_attn
    query, key, value = (module.weight for module in _projections(attention))
    matrix = torch.cat([shape.paired(torch.cat([query, key])), value]) * layer.input_layernorm.weight
    joined = linear(normed(x_NH, shape.epsilon), matrix)
    if not hasattr(attention, "q_norm"):
        return joined
    heads = joined.view(len(joined), -1, shape.channels)
    weights = [
        norm.weight.expand(n, -1) for norm, n in ((attention.q_norm, shape.heads), (attention.k_norm, shape.key_heads))
    ]
    weight = shape.paired(torch.cat(weights).reshape(-1)).view(-1, shape.channels)
    turned = normed(heads[:, : shape.turned].contiguous(), shape.epsilon) * weight
    return torch.cat([turned, heads[:, shape.turned :]], 1).flatten(1)


def _projections(attention: Any) -> list[Any]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _children(mlp: Any) -> list[Any]:
    return [mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def normed(x: Tensor, epsilon: float) -> Tensor:
    """Divide by the root mean square along the last axis: a norm without its weight."""
    function = native.Normed if native.takes(x) else _Normed
    hat: Tensor = function.apply(x, epsilon)  # type: ignore[no-untyped-call]
    return hat


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    function = native.Gated if native.takes(gate) else _Gated
    inner: Tensor = function.apply(gate, up)  # type: ignore[no-untyped-call]
    return inner


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        hat: Tensor = x * inverse
        ctx.save_for_backward(hat, inverse)
        return hat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        hat, inverse = ctx.saved_tensors
        mean = (slope * hat).sum(-1, keepdim=True).div_(-hat.shape[-1])
        return torch.addcmul(slope, hat, mean).mul_(inverse), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        opened = F.silu(gate)
        ctx.save_for_backward(gate, up, opened)
        return opened.mul(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, opened = ctx.saved_tensors
        return torch.ops.aten.silu_backward(slope * up, gate), slope * opened
