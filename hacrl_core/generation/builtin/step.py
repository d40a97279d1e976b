"""One token per row through all layers of a Llama-style decoder, in few operations and without new memory.

What a step reads and writes besides the weights: the slots, which hold the keys and values of the live rows, prefixes
that groups of rows share, and a workspace, whose buffers all layers and steps share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hacrl_core.generation.builtin.prefixes import MEMBERS, Sharing
from hacrl_core.generation.builtin.weights import BlockWeights, DecoderWeights
from hacrl_core.generation.builtin.workspace import Workspace


class Slots:
    """Keys and values as [layer, key or value, slot, head, position, channel], and which positions are written.

    The native step knows that from the rows' lengths: its slots are not ``masked``.
    """

    def __init__(self, w: DecoderWeights, cache: Tensor, *, masked: bool = True) -> None:
        self.cache = cache
        _, kinds, slots, heads, length, _ = cache.shape
        self._masked = masked
        if not masked:
            slots = 0
        self.mask_SHT = torch.full((slots, heads, length), -math.inf, device=cache.device, dtype=cache.dtype)
        vectors = torch.arange(kinds * slots * heads, device=cache.device)
        self._starts_KSH = (vectors * length).view(kinds, slots, heads)
        self._w = w

    def mask_rows(self, start: int, lengths_B: Tensor) -> None:
        """Mask all but the written positions of the rows from ``start`` on."""
        if not self._masked:
            return
        places_T = torch.arange(self.cache.shape[4], device=self.cache.device)
        unwritten_BT = places_T >= lengths_B[start:, None]
        mask_BT = torch.zeros(unwritten_BT.shape, device=self.cache.device, dtype=self.cache.dtype)
        mask_BT.masked_fill_(unwritten_BT, -math.inf)
        self.mask_SHT[start : len(lengths_B)] = mask_BT[:, None]

    def move(self, to: Sequence[int], at: Sequence[int], width: int) -> None:
        """Copy rows to other slots, up to ``width`` positions of them."""
        if self.cache.device.type == "cpu" and not set(to) & set(at):
            for target, source in zip(to, at, strict=True):
                self.cache[:, :, target, :, :width].copy_(self.cache[:, :, source, :, :width])
        else:
            self.cache[:, :, to, :, :width] = self.cache[:, :, at, :, :width]
        if self._masked:
            self.mask_SHT[to] = self.mask_SHT[at]

    def open(self, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """Write one position more of each row: return where, among a layer's vectors, and the mask of these rows."""
        batch, heads = len(lengths_B), self.mask_SHT.shape[1]
        places = (self._starts_KSH[:, :batch] + lengths_B[:, None]).flatten()
        self.mask_SHT.view(-1).index_fill_(0, places[: batch * heads], 0.0)
        return places, self.mask_SHT[:batch].view(batch * heads, 1, -1)


@dataclass(frozen=True)
class _Buffers:
    """What a step writes, for so many rows."""

    normal_BH: Tensor
    qkv: Tensor
    queries_BND: Tensor
    news_KBND: Tensor  # keys and values of the new token
    scores: Tensor
    mixed: Tensor
    gate: Tensor
    up: Tensor

    @classmethod
    def of(cls, w: DecoderWeights, space: Workspace, batch: int, width: int) -> "_Buffers":
        hidden, inner = w.blocks[0].gate_t.shape
        rows, groups = batch * w.kv_heads, w.heads // w.kv_heads
        return cls(
            space.take("normal", batch, hidden),
            space.take("qkv", batch, w.blocks[0].qkv_t.shape[1]),
            space.take("queries", batch, w.heads, w.head_dim),
            space.take("news", 2, batch, w.kv_heads, w.head_dim),
            space.take("scores", rows, groups, width),
            space.take("mixed", rows, groups, w.head_dim),
            space.take("gate", batch, inner),
            space.take("up", batch, inner),
        )


@dataclass(frozen=True)
class Batch:
    """The tokens of a step: one per row, its position, and how many positions of its slot are written."""

    tokens_B: Tensor
    positions_B: Tensor
    lengths_B: Tensor
    sharing: Sharing | None


def decode_step(w: DecoderWeights, slots: Slots, rows: Batch, space: Workspace) -> Tensor:
    """Write the tokens' keys and values at ``lengths_B`` of their slots; return the next logits_BV."""
    batch = len(rows.tokens_B)
    buffers = _Buffers.of(w, space, batch, slots.cache.shape[4])
    x_BH = w.embedding_VH.index_select(0, rows.tokens_B)
    turn = (_Turn if w.turns_TD is None else _PairedTurn)(w, rows.positions_B, buffers)
    places, mask = slots.open(rows.lengths_B)
    attend = _Attention(w, mask, buffers) if rows.sharing is None else _SharedAttention(w, mask, buffers, rows.sharing)
    norm = _Norm(w, x_BH)
    mixed_BH = buffers.mixed.view(batch, -1)
    for layer, (block, states) in enumerate(zip(w.blocks, slots.cache.unbind(), strict=True)):
        inner_BH = norm(x_BH, block.attention_norm, buffers.normal_BH)
        _linear(inner_BH, block.qkv_t, block.qkv_bias, buffers.qkv)
        turn(block)
        states.view(-1, w.head_dim).index_copy_(0, places, buffers.news_KBND.view(-1, w.head_dim))
        keys, values = states[:, :batch].flatten(1, 2).unbind()
        attend(layer, keys, values)
        _add_linear(x_BH, mixed_BH, block.out_t, block.out_bias)
        inner_BH = norm(x_BH, block.mlp_norm, buffers.normal_BH)
        gated = F.silu(_linear(inner_BH, block.gate_t, block.gate_bias, buffers.gate), inplace=True)
        gated.mul_(_linear(inner_BH, block.up_t, block.up_bias, buffers.up))
        _add_linear(x_BH, gated, block.down_t, block.down_bias)
    return F.linear(norm(x_BH, w.final_norm, buffers.normal_BH), w.head_VH)


class _Attention:
    """Mixes the values of each row's slot by its queries."""

    def __init__(self, w: DecoderWeights, mask: Tensor, buffers: _Buffers) -> None:
        self._w, self._mask, self._buffers = w, mask, buffers
        self._queries = buffers.queries_BND.view(len(mask), -1, w.head_dim)

    def __call__(self, layer: int, keys: Tensor, values: Tensor) -> None:
        scores = self._scores(keys).add_(self._mask)
        torch.bmm(torch.softmax(scores, -1), values, out=self._buffers.mixed)

    def _scores(self, keys: Tensor) -> Tensor:
        return self._buffers.scores.baddbmm_(self._queries, keys.transpose(1, 2), beta=0, alpha=self._w.scale)


class _SharedAttention(_Attention):
    """Mixes the values of a prefix that is read once for its group, and those of each row's slot, under one softmax."""

    def __init__(self, w: DecoderWeights, mask: Tensor, buffers: _Buffers, sharing: Sharing) -> None:
        super().__init__(w, mask, buffers)
        self._sharing = sharing
        rows, queries, own = buffers.scores.shape
        self._length = sharing.mask.shape[1]
        self._all = torch.empty((rows, queries, self._length + own), device=mask.device, dtype=mask.dtype)
        members = MEMBERS * w.heads // w.kv_heads
        self._grouped = (len(sharing.gather) // members, members, -1)

    def __call__(self, layer: int, keys: Tensor, values: Tensor) -> None:
        sharing, length = self._sharing, self._length
        prefix_keys, prefix_values = sharing.cache[layer].flatten(1, 2).unbind()
        asked = self._queries.view(-1, self._w.head_dim).index_select(0, sharing.gather).view(self._grouped)
        shared = torch.bmm(asked, prefix_keys.transpose(1, 2)).view(-1, length).index_select(0, sharing.back)
        rows = self._all.view(len(shared), -1)
        torch.add(sharing.mask, shared, alpha=self._w.scale, out=rows[:, :length])
        torch.add(self._scores(keys), self._mask, out=self._all[:, :, length:])
        weights = torch.softmax(self._all, -1)
        torch.bmm(weights[:, :, length:], values, out=self._buffers.mixed)
        weights = weights.view(len(shared), -1).index_select(0, sharing.gather).view(self._grouped)
        mixed = torch.bmm(weights[:, :, :length], prefix_values).view(-1, self._w.head_dim)
        self._buffers.mixed.view(-1, self._w.head_dim).add_(mixed.index_select(0, sharing.back))


class _Turn:
    """Turns queries and keys by their positions' angles, a head's channels in halves."""

    def __init__(self, w: DecoderWeights, positions_B: Tensor, buffers: _Buffers) -> None:
        self._w, self._buffers = w, buffers
        self._heads_BND = buffers.qkv.view(len(positions_B), -1, w.head_dim)
        self._set_angles(positions_B)

    def _set_angles(self, positions_B: Tensor) -> None:
        self._cos_B1D, self._sin_B1D = self._w.cos_TD[positions_B, None], self._w.sin_TD[positions_B, None]

    def __call__(self, block: BlockWeights) -> None:
        """From the projections of a block to its queries, and to the keys and values of the new token."""
        turning = self._w.heads + self._w.kv_heads  # queries and keys are turned, values are not
        qk_BND = self._heads_BND[:, :turning]
        if block.qk_norm is not None:
            qk_BND = torch.rms_norm(qk_BND, (self._w.head_dim,), None, self._w.epsilon).mul_(block.qk_norm)
        self._turn(qk_BND)
        self._buffers.news_KBND[1] = self._heads_BND[:, turning:]

    def _turn(self, qk_BND: Tensor) -> None:
        half = self._w.head_dim // 2
        swapped_BND = torch.cat((qk_BND[..., half:], qk_BND[..., :half]), -1)
        turned_BND = torch.addcmul(qk_BND * self._cos_B1D, swapped_BND, self._sin_B1D)
        self._buffers.queries_BND.copy_(turned_BND[:, : self._w.heads])
        self._buffers.news_KBND[0] = turned_BND[:, self._w.heads :]


class _PairedTurn(_Turn):
    """The same with channels in pairs: one product of complex numbers."""

    def _set_angles(self, positions_B: Tensor) -> None:
        assert self._w.turns_TD is not None
        self._turns_B1D = self._w.turns_TD.index_select(0, positions_B)[:, None]
        self._queries, self._keys = _complex(self._buffers.queries_BND), _complex(self._buffers.news_KBND[0])

    def _turn(self, qk_BND: Tensor) -> None:
        pairs_BND = _complex(qk_BND)
        torch.mul(pairs_BND[:, : self._w.heads], self._turns_B1D, out=self._queries)
        torch.mul(pairs_BND[:, self._w.heads :], self._turns_B1D, out=self._keys)


def _complex(pairs: Tensor) -> Tensor:
    return torch.view_as_complex(pairs.view(*pairs.shape[:-1], -1, 2))


class _Norm:
    """RMS norm. In float32 on a CPU the library's own is a chain of six operations over whole rows."""

    def __init__(self, w: DecoderWeights, x_BH: Tensor) -> None:
        self._epsilon, self._hidden = w.epsilon, x_BH.shape[1]
        self._short = x_BH.dtype == torch.float32 and x_BH.device.type == "cpu"
        self._epsilon_1 = torch.full((1,), w.epsilon, device=x_BH.device)

    def __call__(self, x_BH: Tensor, weight_H: Tensor | None, out: Tensor) -> Tensor:
        """Return the normed rows, in ``out`` where that saves memory."""
        if not self._short:
            return torch.rms_norm(x_BH, (self._hidden,), weight_H, self._epsilon)
        size_B1 = torch.linalg.vector_norm(x_BH, dim=-1, keepdim=True)
        scale_B1 = torch.addcmul(self._epsilon_1, size_B1, size_B1, value=1 / self._hidden).rsqrt_()
        torch.mul(x_BH, scale_B1, out=out)
        return out if weight_H is None else out.mul_(weight_H)


def _linear(x: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(x, weight_t, out=out) if bias is None else torch.addmm(bias, x, weight_t, out=out)


def _add_linear(x: Tensor, update: Tensor, weight_t: Tensor, bias: Tensor | None) -> None:
    x.addmm_(update, weight_t)
    if bias is not None:
        x.add_(bias)
