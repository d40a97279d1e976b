"""What the lean body computes between its matrix products, in C (``hacrl_core/native/body.c``), with gradients.

Attention goes along the rows of the prefix tree: a row gathers the keys of its whole path once per head, and answers
for the nodes that no row before it has. Without the compiled functions ``attention.py`` and ``body.py`` do the same.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hacrl_core.learning.sequences import Microbatch, Tree
from hacrl_core.native.paths import Paths, read_along
from hacrl_core.native.paths import body_library as library
from hacrl_core.native.tensors import readable


def takes(x: Tensor) -> bool:
    """Whether the compiled functions are there and read such numbers."""
    return readable(x) and library() is not None


def paths_of(batch: Microbatch, tree: Tree, heads: int, key_heads: int) -> Paths:
    """Lay a microbatch's rows out for attention."""
    rows, width = tree.place_BT.shape
    ends_B = batch.positions_R[np.cumsum(batch.lengths) - 1] % width + 1
    starts_B = ends_B - np.bincount(tree.cell_N // width, minlength=rows)
    return Paths(np.ascontiguousarray(tree.place_BT), starts_B, ends_B, heads, key_heads)


def attend(joined: Tensor, turns: Tensor, paths: Paths, scale: float) -> Tensor:
    """From queries, keys and values [N, heads + 2·key heads, channels] to what each node reads: [N, heads · channels].

    ``turns`` has the cosine and sine of each pair of channels by depth.
    """
    read: Tensor = _Attention.apply(joined, turns, paths, scale)  # type: ignore[no-untyped-call]
    return read


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, turns: Tensor, paths: Paths, scale: float) -> Tensor:
        found, joined = library(), joined.contiguous()
        assert found is not None
        read, shares = read_along(found, joined, turns, paths, scale)
        ctx.save_for_backward(joined, turns, shares)
        ctx.paths, ctx.scale = paths, scale
        return read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        found, slope = library(), slope.contiguous()
        assert found is not None
        joined, turns, shares = ctx.saved_tensors
        struct = ctx.paths.struct(joined.shape[-1], turns, ctx.scale)
        out, space = torch.empty_like(joined), joined.new_empty(found.attend_space(ctypes.addressof(struct)))
        found.attend_backward(
            ctypes.addressof(struct), joined.data_ptr(), shares.data_ptr(), slope.data_ptr(), out.data_ptr(),
            space.data_ptr(),
        )  # fmt: skip
        return out, None, None, None


class Normed(torch.autograd.Function):
    """Division by the root mean square along the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        """Return a norm without its weight."""
        found, x = library(), x.contiguous()
        assert found is not None
        hat, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1])
        found.norm_forward(x.data_ptr(), hat.data_ptr(), inverse.data_ptr(), inverse.numel(), x.shape[-1], epsilon)
        ctx.save_for_backward(hat, inverse)
        return hat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the input."""
        found, slope = library(), slope.contiguous()
        assert found is not None
        hat, inverse = ctx.saved_tensors
        out = torch.empty_like(hat)
        found.norm_backward(
            slope.data_ptr(), hat.data_ptr(), inverse.data_ptr(), out.data_ptr(), inverse.numel(), hat.shape[-1]
        )
        return out, None


class Gated(torch.autograd.Function):
    """silu(gate) · up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Open the gate; what it needs again is computed again."""
        found, gate, up = library(), gate.contiguous(), up.contiguous()
        assert found is not None
        out = torch.empty_like(gate)
        found.gate_forward(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both inputs."""
        found, slope = library(), slope.contiguous()
        assert found is not None
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        found.gate_backward(
            slope.data_ptr(), gate.data_ptr(), up.data_ptr(), d_gate.data_ptr(), d_up.data_ptr(), gate.numel()
        )
        return d_gate, d_up
