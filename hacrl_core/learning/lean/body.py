"""Forward and backward pass of a Llama-style decoder's layers (Llama, Mistral, Qwen2, Qwen3), written out.

Beside the model's own code under autograd, which runs many operations on tensors so small that the calls count, a
layer is seven matrix products forward, fourteen backward, six batched ones for attention, and little else. Gradients
are added to the parameters' ``grad`` where they are computed, without copies. Attention keeps its probabilities, which
pays for short rows only; longer ones take the model's own code.

The pass is compared with the model's own once per model (`runs_lean`).
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from hacrl_core.learning.lean.cells import Cells, cells_of, tree_of
from hacrl_core.learning.prefixes import probe, shares_prefixes
from hacrl_core.learning.sequences import Microbatch, Tree

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LONGEST = 256  # tokens of a row: the memory of attention's probabilities grows with them for every token


def lean_states(model: PreTrainedModel, batch: Microbatch) -> Tensor:
    """Last hidden states [R, H] of the positions that predict a response token.

    Their backward pass adds the parameters' gradients to ``grad`` itself and gives autograd none.
    """
    tree = tree_of(batch)
    at_R = torch.from_numpy(tree.place_BT.reshape(-1)[batch.positions_R])
    trained = next((p for p in model.parameters() if p.requires_grad), None)
    if trained is None or not torch.is_grad_enabled():
        with torch.no_grad():
            return _Pass(model, tree, keeps=False).forward().index_select(0, at_R)
    states_RH: Tensor = _States.apply(trained, _Pass(model, tree, keeps=True), at_R)  # type: ignore[no-untyped-call]
    return states_RH


_proved: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def runs_lean(model: PreTrainedModel, batch: Microbatch) -> bool:
    """Whether the pass fits the model and the microbatch: read from the model's classes, and proved on a probe."""
    if batch.input_ids_BT.shape[1] > LONGEST or not _plain(model):  # asked each time: adapters come and go
        return False
    if model not in _proved:
        _proved[model] = probe(model, lambda tree: _Pass(model, tree, keeps=False).forward())
    return _proved[model]


def _plain(model: PreTrainedModel) -> bool:
    config = model.config
    if type(model).__name__ not in ARCHITECTURES or config.hidden_act not in ("silu", "swish"):
        return False
    plain = all(type(module) is nn.Linear for name, module in model.named_modules() if name.endswith("_proj"))
    return plain and shares_prefixes(model)


class _States(torch.autograd.Function):
    """The pass as a node of autograd. It hangs on one parameter, to be reached at all."""

    @staticmethod
    def forward(ctx: Any, trained: Tensor, run: "_Pass", at_R: Tensor) -> Tensor:
        ctx.run = run
        ctx.at_R = at_R
        return run.forward().index_select(0, at_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_RH: Tensor) -> tuple[None, None, None]:
        ctx.run.backward(_summed(slope_RH, ctx.at_R, len(ctx.run.tokens_N)))
        ctx.run = None
        return None, None, None


@dataclass
class _Norm:
    """A root-mean-square norm: 1 / root of its input, the normalised input, and that times the norm's weight."""

    inverse: Tensor
    hat: Tensor
    output: Tensor

    @classmethod
    def of(cls, x: Tensor, module: Any, epsilon: float) -> "_Norm":
        """Normalise over the last axis."""
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        hat = x * inverse
        return cls(inverse, hat, hat * module.weight.detach())

    def backward(self, slope: Tensor, module: Any) -> Tensor:
        """From the slope of the output to that of the input; ``slope`` is overwritten."""
        weight = module.weight.detach()
        product = slope * self.hat
        if module.weight.requires_grad:
            _grad(module.weight).add_(product.flatten(0, -2).sum(0))
        mean = torch.matmul(product, weight).div_(len(weight)).unsqueeze_(-1)
        return slope.mul_(weight).sub_(self.hat * mean).mul_(self.inverse)


@dataclass
class _Kept:
    """What the backward pass of a layer needs."""

    before: _Norm
    of_queries: _Norm | None
    of_keys: _Norm | None
    queries: Tensor
    keys: Tensor
    values: Tensor
    shares: Tensor
    mixed_NC: Tensor
    between: _Norm
    gate_NF: Tensor
    open_NF: Tensor
    up_NF: Tensor
    inner_NF: Tensor


class _Pass:
    """One microbatch through the body, there and back."""

    def __init__(self, model: PreTrainedModel, tree: Tree, *, keeps: bool) -> None:
        self.base: Any = model.model
        config = model.config
        self.epsilon = float(config.rms_norm_eps)
        attention = self.base.layers[0].self_attn
        self.channels = int(attention.head_dim)
        self.scale = float(attention.scaling)
        self.cells: Cells = cells_of(tree, int(config.num_attention_heads), int(config.num_key_value_heads))
        self.tokens_N = torch.from_numpy(tree.tokens_N)
        embedding = self.base.embed_tokens.weight
        cos, sin = self.base.rotary_emb(embedding[:1, None], torch.from_numpy(tree.depth_N)[None])
        self.cos_N1D, sin_ND = cos[0][:, None], sin[0].clone()
        sin_ND[:, : self.channels // 2].neg_()
        self.sin_N1D = sin_ND[:, None]
        self.keeps = keeps
        self.kept: list[_Kept] = []
        self.last: _Norm | None = None

    def forward(self) -> Tensor:
        """Return the last hidden states of all nodes."""
        x_NH = self.base.embed_tokens.weight.detach().index_select(0, self.tokens_N)
        for layer in self.base.layers:
            kept = self._layer(layer, x_NH)
            if self.keeps:
                self.kept.append(kept)
        norm = _Norm.of(x_NH, self.base.norm, self.epsilon)
        if self.keeps:
            self.last = norm
        return norm.output

    def _layer(self, layer: Any, x_NH: Tensor) -> _Kept:
        """Add a layer's two parts to ``x_NH`` in place."""
        attention, mlp, cells = layer.self_attn, layer.mlp, self.cells
        before = _Norm.of(x_NH, layer.input_layernorm, self.epsilon)
        projected = [_linear(part, before.output) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        of_queries, query_NKD = self._turned(projected[0], getattr(attention, "q_norm", None))
        of_keys, key_NKD = self._turned(projected[1], getattr(attention, "k_norm", None))
        queries = _picked(query_NKD, cells.queries, self.channels).view(cells.bias.shape[0], -1, self.channels)
        keys, values = (
            _picked(part, cells.keys, self.channels).view(cells.bias.shape[0], -1, self.channels)
            for part in (key_NKD, projected[2])
        )
        shares = torch.baddbmm(cells.bias, queries, keys.transpose(1, 2), alpha=self.scale).softmax(-1)
        mixed_NC = _picked(torch.bmm(shares, values), cells.answers, self.channels).view(len(x_NH), -1)
        _add_linear_(x_NH, attention.o_proj, mixed_NC)
        between = _Norm.of(x_NH, layer.post_attention_layernorm, self.epsilon)
        gate_NF, up_NF = _linear(mlp.gate_proj, between.output), _linear(mlp.up_proj, between.output)
        open_NF = F.silu(gate_NF)
        inner_NF = open_NF * up_NF
        _add_linear_(x_NH, mlp.down_proj, inner_NF)
        return _Kept(
            before, of_queries, of_keys, queries, keys, values, shares, mixed_NC, between, gate_NF, open_NF, up_NF,
            inner_NF,
        )  # fmt: skip

    def _turned(self, projected_NC: Tensor, norm: Any) -> tuple[_Norm | None, Tensor]:
        """Queries or keys, normed where the architecture does so, turned by their positions."""
        x_NKD = projected_NC.view(len(projected_NC), -1, self.channels)
        if norm is None:
            return None, _turn(x_NKD, self.cos_N1D, self.sin_N1D)
        found = _Norm.of(x_NKD, norm, self.epsilon)
        return found, _turn(found.output, self.cos_N1D, self.sin_N1D)

    def backward(self, slope_NH: Tensor) -> None:
        """Add every parameter's gradient to its ``grad``; ``slope_NH`` is that of the last hidden states."""
        assert self.last is not None
        slope_NH = self.last.backward(slope_NH, self.base.norm)
        for layer in reversed(self.base.layers):
            kept = self.kept.pop()
            self._mlp_back(layer, kept, slope_NH)
            self._attention_back(layer, kept, slope_NH)
        embedding = self.base.embed_tokens
        if embedding.weight.requires_grad:
            seen_U, place_N = torch.unique(self.tokens_N, return_inverse=True)
            found_UH = _summed(slope_NH, place_N, len(seen_U))
            if embedding.padding_idx is not None:  # the library's embedding learns nothing from padding
                found_UH[seen_U == embedding.padding_idx] = 0.0
            grad = _grad(embedding.weight)
            grad.index_copy_(0, seen_U, grad.index_select(0, seen_U).add_(found_UH))

    def _mlp_back(self, layer: Any, kept: _Kept, slope_NH: Tensor) -> None:
        mlp, inputs_NH = layer.mlp, kept.between.output
        inner_NF = _back(mlp.down_proj, slope_NH, kept.inner_NF)
        up_NF = inner_NF * kept.open_NF
        gate_NF = torch.ops.aten.silu_backward(inner_NF.mul_(kept.up_NF), kept.gate_NF)
        found_NH = _back(mlp.gate_proj, gate_NF, inputs_NH)
        _back(mlp.up_proj, up_NF, inputs_NH, into=found_NH)
        slope_NH.add_(kept.between.backward(found_NH, layer.post_attention_layernorm))

    def _attention_back(self, layer: Any, kept: _Kept, slope_NH: Tensor) -> None:
        attention, cells, channels = layer.self_attn, self.cells, self.channels
        mixed_NC = _back(attention.o_proj, slope_NH, kept.mixed_NC)
        mixed = torch.zeros_like(kept.queries)
        mixed.view(-1, channels).index_copy_(0, cells.answers, mixed_NC.view(-1, channels))
        values = torch.bmm(kept.shares.transpose(1, 2), mixed)
        shares = torch.bmm(mixed, kept.values.transpose(1, 2))
        scores = torch.ops.aten._softmax_backward_data(shares, kept.shares, -1, torch.float32).mul_(self.scale)
        queries = torch.bmm(scores, kept.keys)
        keys = torch.bmm(scores.transpose(1, 2), kept.queries)
        query_NC = _picked(queries, cells.answers, channels).view(len(slope_NH), -1)
        query_NC = self._turned_back(query_NC, kept.of_queries, getattr(attention, "q_norm", None))
        key_NC = self._turned_back(self._of_nodes(keys), kept.of_keys, getattr(attention, "k_norm", None))
        inputs_NH = kept.before.output
        found_NH = _back(attention.q_proj, query_NC, inputs_NH)
        _back(attention.k_proj, key_NC, inputs_NH, into=found_NH)
        _back(attention.v_proj, self._of_nodes(values), inputs_NH, into=found_NH)
        slope_NH.add_(kept.before.backward(found_NH, layer.input_layernorm))

    def _of_nodes(self, slopes: Tensor) -> Tensor:
        """Add up what the rows of attention say about a node's keys or values."""
        cells = self.cells
        slopes_WKTD = slopes.view(cells.rows, -1, cells.length, self.channels)
        return _summed(slopes_WKTD.transpose(1, 2).reshape(len(cells.nodes_WT), -1), cells.nodes_WT, len(self.tokens_N))

    def _turned_back(self, slope_NC: Tensor, kept: _Norm | None, norm: Any) -> Tensor:
        slope_NKD = _turn(slope_NC.view(len(slope_NC), -1, self.channels), self.cos_N1D, -self.sin_N1D)
        if kept is not None:
            slope_NKD = kept.backward(slope_NKD, norm)
        return slope_NKD.view(len(slope_NC), -1)


def _turn(x_NKD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Turn pairs of channels: the rotary embedding. With the sine negated it turns back."""
    half = x_NKD.shape[-1] // 2
    swapped = torch.cat((x_NKD[..., half:], x_NKD[..., :half]), -1)
    return torch.addcmul(x_NKD * cos_N1D, swapped, sin_N1D)


def _picked(table: Tensor, places: Tensor, channels: int) -> Tensor:
    return table.reshape(-1, channels).index_select(0, places)


def _summed(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Add rows up by their place: the backward pass of an embedding is the fastest way to do so on a CPU."""
    summed: Tensor = torch.ops.aten.embedding_dense_backward(rows, places, count, -1, False)
    return summed


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight.detach(), None if module.bias is None else module.bias.detach())


def _add_linear_(x: Tensor, module: nn.Linear, inner: Tensor) -> None:
    x.addmm_(inner, module.weight.detach().t())
    if module.bias is not None:
        x.add_(module.bias.detach())


def _back(module: nn.Linear, slope: Tensor, inputs: Tensor, into: Tensor | None = None) -> Tensor:
    """Add the gradients of a linear layer to its parameters; return (or add to ``into``) that of its input."""
    weight, bias = module.weight, module.bias
    if weight.requires_grad:
        _grad(weight).addmm_(slope.t(), inputs)
    if bias is not None and bias.requires_grad:
        _grad(bias).add_(slope.sum(0))
    return slope @ weight.detach() if into is None else into.addmm_(slope, weight.detach())


def _grad(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
