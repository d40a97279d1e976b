"""Prompts through a small model whose weights are packed, side by side without padding, attention in C.

It does what the model's own forward pass does, for prompts of moderate length, with the matrices of the decoding step
and without the bookkeeping of its modules, which costs a tiny model as much as its arithmetic.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hacrl_core.generation.builtin.decoder import Prefill
from hacrl_core.generation.builtin.native_step import project
from hacrl_core.generation.builtin.weights import BlockWeights, DecoderWeights
from hacrl_core.native.paths import Paths, body_library, read_along

LONGEST = 256  # tokens of a prompt: longer ones were not measured in blocks, so torch reads them


def native_prefill(
    library: ctypes.CDLL, w: DecoderWeights, prompts: Sequence[Sequence[int]], *, keep: bool = True
) -> Prefill | None:
    """Read prompts; None where they are too long for it or its functions are not there.

    Without ``keep`` only their logits are wanted, so the cache is empty.
    """
    lengths_P = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    body, width = body_library(), int(lengths_P.max())
    if body is None or width > LONGEST or w.turns_TD is None:
        return None
    ends_P = np.cumsum(lengths_P)
    row_N = np.repeat(np.arange(len(prompts)), lengths_P)
    depth_N = np.arange(int(ends_P[-1])) - (ends_P - lengths_P)[row_N]
    nodes_PT = np.zeros((len(prompts), width), dtype=np.int64)
    nodes_PT[row_N, depth_N] = np.arange(len(row_N))
    paths = Paths(nodes_PT, np.zeros_like(lengths_P), lengths_P, w.heads, w.kv_heads)
    at = (torch.from_numpy(row_N), torch.from_numpy(depth_N))
    tokens_N = torch.tensor([token for prompt in prompts for token in prompt])
    x_NH = w.embedding_VH.index_select(0, tokens_N)
    cache = torch.zeros((w.layers, 2, len(prompts), w.kv_heads, width if keep else 0, w.head_dim))
    for block, states in zip(w.blocks, cache.unbind(), strict=True):
        joined = _joined(library, w, block, x_NH)
        read_NC, _ = read_along(body, joined, torch.view_as_real(w.turns_TD), paths, w.scale)
        if keep:
            _keep_states(w, joined, at, states)
        x_NH.addmm_(read_NC, block.out_t)
        assert block.gate_up_t is not None
        both = _normed(library, x_NH, w.epsilon) @ block.gate_up_t
        gated = both.new_empty(len(both), both.shape[1] // 2)
        library.gate_rows(both.data_ptr(), gated.data_ptr(), *gated.shape)
        x_NH.addmm_(gated, block.down_t)
    last_PH = _normed(library, x_NH.index_select(0, torch.from_numpy(ends_P - 1)), w.epsilon).mul_(w.final_norm)
    return Prefill(F.linear(last_PH, w.head_VH), tuple(lengths_P.tolist()), cache)


def _normed(library: ctypes.CDLL, x: Tensor, epsilon: float) -> Tensor:
    out = torch.empty_like(x)
    library.norm_rows(x.data_ptr(), out.data_ptr(), *x.shape, epsilon)
    return out


def _joined(library: ctypes.CDLL, w: DecoderWeights, block: BlockWeights, x_NH: Tensor) -> Tensor:
    """Return queries, keys and values, [N, heads + 2·key heads, channels], normed and not yet turned."""
    out = x_NH.new_empty(len(x_NH), block.qkv_t.shape[1])
    project(_normed(library, x_NH, w.epsilon), block, out)
    joined = out.view(len(x_NH), -1, w.head_dim)
    if block.qk_norm is not None:
        turning = joined[:, : w.heads + w.kv_heads]
        turning.copy_(torch.rms_norm(turning, (w.head_dim,), None, w.epsilon).mul_(block.qk_norm))
    return joined


def _keep_states(w: DecoderWeights, joined: Tensor, at: tuple[Tensor, Tensor], states: Tensor) -> None:
    """Write the keys, turned, and the values of all nodes to their rows and positions."""
    assert w.turns_TD is not None
    keys = torch.view_as_complex(
        joined[:, w.heads : w.heads + w.kv_heads].contiguous().view(len(joined), w.kv_heads, -1, 2)
    )
    turned = torch.view_as_real(keys * w.turns_TD.index_select(0, at[1])[:, None]).flatten(-2)
    by_position = states.transpose(2, 3)  # [key or value, row, position, head, channel]
    by_position[0][at] = turned
    by_position[1][at] = joined[:, w.heads + w.kv_heads :]
