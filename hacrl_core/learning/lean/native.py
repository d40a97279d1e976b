"""What the lean body computes between its matrix products, in C (``hacrl_core/native/body.c``), with gradients.

Attention goes along the rows of the prefix tree: a row gathers the keys of its whole path once per head, and answers
for the nodes that no row before it has. Without the compiled functions ``attention.py`` and ``body.py`` do the same.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hacrl_core.learning.sequences import Ints, Microbatch, Tree
from hacrl_core.native import kernels

_Pointer, _Count, _Number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Paths(ctypes.Structure):
    """As in body.c."""

    _fields_ = (
        ("rows", _Count), ("heads", _Count), ("key_heads", _Count), ("channels", _Count), ("longest", _Count),
        ("scale", _Number), ("turns", _Pointer), ("nodes", _Pointer), ("starts", _Pointer), ("ends", _Pointer),
    )  # fmt: skip


@dataclass(frozen=True)
class Paths:
    """The rows of a microbatch as paths through its tree, for attention."""

    nodes_BT: Ints
    starts_B: Ints  # the first node of a row that no row before it has
    ends_B: Ints
    heads: int
    key_heads: int
    shares: int  # how many numbers all queries give to their keys

    def struct(self, channels: int, turns: Tensor, scale: float) -> _Paths:
        """Return it as body.c reads it; the arrays must outlive what is done with it."""
        rows, longest = self.nodes_BT.shape
        arrays = (self.nodes_BT.ctypes.data, self.starts_B.ctypes.data, self.ends_B.ctypes.data)
        return _Paths(rows, self.heads, self.key_heads, channels, longest, scale, turns.data_ptr(), *arrays)


def library() -> ctypes.CDLL | None:
    """Return the compiled functions; None where torch has to do without."""
    found = kernels("body")
    if found is not None and not found.norm_forward.argtypes:
        found.norm_forward.argtypes = (*(_Pointer,) * 3, _Count, _Count, _Number)
        found.norm_backward.argtypes = (*(_Pointer,) * 4, _Count, _Count)
        found.gate_forward.argtypes = (*(_Pointer,) * 3, _Count)
        found.gate_backward.argtypes = (*(_Pointer,) * 5, _Count)
        found.attend_forward.argtypes = (_Pointer,) * 5
        found.attend_backward.argtypes = (_Pointer,) * 6
    return found


def takes(x: Tensor) -> bool:
    """Whether the compiled functions are there and read such numbers."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and library() is not None


def paths_of(batch: Microbatch, tree: Tree, heads: int, key_heads: int) -> Paths:
    """Lay a microbatch's rows out for attention."""
    rows, width = tree.place_BT.shape
    ends_B = batch.positions_R[np.cumsum(batch.lengths) - 1] % width + 1
    starts_B = ends_B - np.bincount(tree.cell_N // width, minlength=rows)
    # A query at depth t gives to t + 1 keys.
    shares = heads * int((ends_B * (ends_B + 1) - starts_B * (starts_B + 1)).sum()) // 2
    return Paths(np.ascontiguousarray(tree.place_BT), starts_B, ends_B, heads, key_heads, shares)


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
        channels = joined.shape[-1]
        shares = joined.new_empty(paths.shares)
        read = joined.new_empty(len(joined), paths.heads * channels)
        space = joined.new_empty(2 * paths.nodes_BT.shape[1] * channels)
        struct = paths.struct(channels, turns, scale)
        found.attend_forward(
            ctypes.addressof(struct), joined.data_ptr(), shares.data_ptr(), read.data_ptr(), space.data_ptr()
        )
        ctx.save_for_backward(joined, turns, shares)
        ctx.paths, ctx.scale = paths, scale
        return read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        found, slope = library(), slope.contiguous()
        assert found is not None
        joined, turns, shares = ctx.saved_tensors
        channels, longest = joined.shape[-1], ctx.paths.nodes_BT.shape[1]
        out, space = torch.zeros_like(joined), joined.new_empty((4 * channels + 1) * longest)
        struct = ctx.paths.struct(channels, turns, ctx.scale)
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
