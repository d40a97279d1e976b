"""The decoding step of ``step.py`` with everything between the matrix products in C (``hacrl_core/native/decode.c``).

It serves small models whose weights are packed (``weights.py``), in float32 on a CPU. A row's new keys and values are
written, turned and attended to in one pass over its slot, however long it is, so no position has to be masked.
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hacrl_core.generation.builtin.weights import BlockWeights, DecoderWeights
from hacrl_core.generation.builtin.workspace import Workspace
from hacrl_core.native import kernels

_Pointer, _Count, _Number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True)
class NativeBatch:
    """The tokens of a step: one per row, its position, how much of its slot is written, and the prefix it reads."""

    tokens_B: Tensor
    positions_B: Tensor
    lengths_B: Tensor
    prefixes: Tensor | None  # [layer, key or value, group, head, position, channel]
    groups_B: Tensor
    shared_B: Tensor  # how many positions of its prefix count


class _Step(ctypes.Structure):
    """What all layers of a step have in common; as in decode.c."""

    _fields_ = (
        ("rows", _Count), ("heads", _Count), ("key_heads", _Count), ("channels", _Count),
        ("scale", _Number), ("epsilon", _Number), ("turns", _Pointer), ("qk_norm", _Pointer), ("positions", _Pointer),
        ("lengths", _Pointer), ("groups", _Pointer), ("shared", _Pointer),
        ("slot_length", _Count), ("prefix_length", _Count),
    )  # fmt: skip


def native_kernels(w: DecoderWeights) -> ctypes.CDLL | None:
    """Return the compiled functions if they fit these weights; otherwise None."""
    packed = w.turns_TD is not None and all(b.gate_up_t is not None for b in w.blocks)
    library = kernels("decode") if packed else None
    if library is not None:
        library.norm_rows.argtypes = (_Pointer, _Pointer, _Count, _Count, _Number)
        library.gate_rows.argtypes = (_Pointer, _Pointer, _Count, _Count)
        library.attend.argtypes = (_Pointer,) * 8
    return library


def native_decode_step(
    library: ctypes.CDLL, w: DecoderWeights, cache: Tensor, rows: NativeBatch, space: Workspace
) -> Tensor:
    """Write the tokens' keys and values at ``lengths_B`` of their slots; return the next logits_BV."""
    batch, (hidden, inner) = len(rows.tokens_B), w.blocks[0].gate_t.shape
    x_BH = w.embedding_VH.index_select(0, rows.tokens_B)
    normal_BH, mixed_BH = space.take("normal", batch, hidden), space.take("mixed", batch, w.heads * w.head_dim)
    qkv, both = space.take("qkv", batch, w.blocks[0].qkv_t.shape[1]), space.take("gate", batch, 2 * inner)
    gated = space.take("gated", batch, inner)
    assert w.turns_TD is not None
    turns = torch.view_as_real(w.turns_TD)
    if int(rows.positions_B.max()) >= len(turns):  # C would read on behind them
        raise IndexError(f"position {int(rows.positions_B.max())} is beyond the {len(turns)} that have angles")
    prefix_length = 0 if rows.prefixes is None else rows.prefixes.shape[4]
    scores = space.take("scores", cache.shape[4] + prefix_length)
    step = _Step(
        batch, w.heads, w.kv_heads, w.head_dim, w.scale, w.epsilon, turns.data_ptr(), None,
        rows.positions_B.data_ptr(), rows.lengths_B.data_ptr(), rows.groups_B.data_ptr(),
        None if rows.prefixes is None else rows.shared_B.data_ptr(), cache.shape[4], prefix_length,
    )  # fmt: skip
    x, normal, places = x_BH.data_ptr(), normal_BH.data_ptr(), (qkv.data_ptr(), mixed_BH.data_ptr(), scores.data_ptr())
    for layer, block in enumerate(w.blocks):
        if layer == 0 and w.first_VQ is not None:
            torch.index_select(w.first_VQ, 0, rows.tokens_B, out=qkv)
        else:
            library.norm_rows(x, normal, batch, hidden, w.epsilon)
            project(normal_BH, block, qkv)
        step.qk_norm = None if block.qk_norm is None else block.qk_norm.data_ptr()
        keys, values = cache[layer, 0].data_ptr(), cache[layer, 1].data_ptr()
        before = (None, None) if rows.prefixes is None else [rows.prefixes[layer, i].data_ptr() for i in (0, 1)]
        library.attend(ctypes.addressof(step), places[0], keys, values, *before, places[1], places[2])
        x_BH.addmm_(mixed_BH, block.out_t)
        library.norm_rows(x, normal, batch, hidden, w.epsilon)
        assert block.gate_up_t is not None
        torch.mm(normal_BH, block.gate_up_t, out=both)
        library.gate_rows(both.data_ptr(), gated.data_ptr(), batch, inner)
        x_BH.addmm_(gated, block.down_t)
    library.norm_rows(x, normal, batch, hidden, w.epsilon)
    return F.linear(normal_BH.mul_(w.final_norm), w.head_VH)


def project(normal_BH: Tensor, block: BlockWeights, out: Tensor) -> None:
    """Write queries, keys and values of normed rows side by side."""
    if block.qkv_bias is None:
        torch.mm(normal_BH, block.qkv_t, out=out)
    else:
        torch.addmm(block.qkv_bias, normal_BH, block.qkv_t, out=out)
