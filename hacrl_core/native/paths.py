"""Attention along paths of nodes: the rows of a prefix tree, or prompts side by side. The functions are in body.c."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hacrl_core.native import kernels

Ints = npt.NDArray[np.int64]
_Pointer, _Count, _Number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Paths(ctypes.Structure):
    """As in body.c."""

    _fields_ = (
        ("rows", _Count), ("heads", _Count), ("key_heads", _Count), ("channels", _Count), ("longest", _Count),
        ("scale", _Number), ("turns", _Pointer), ("nodes", _Pointer), ("starts", _Pointer), ("ends", _Pointer),
    )  # fmt: skip


def body_library() -> ctypes.CDLL | None:
    """Return the compiled functions of body.c; None where torch has to do without."""
    found = kernels("body")
    if found is not None and not found.attend_backward.argtypes:  # told last: other threads may be here, too
        found.norm_forward.argtypes = (*(_Pointer,) * 3, _Count, _Count, _Number)
        found.norm_backward.argtypes = (*(_Pointer,) * 4, _Count, _Count)
        found.gate_forward.argtypes = (*(_Pointer,) * 3, _Count)
        found.gate_backward.argtypes = (*(_Pointer,) * 5, _Count)
        for size in (found.attend_space, found.attend_shares):
            size.argtypes, size.restype = (_Pointer,), _Count
        found.attend_forward.argtypes = (_Pointer,) * 5
        found.attend_backward.argtypes = (_Pointer,) * 6
    return found


@dataclass(frozen=True)
class Paths:
    """Rows of nodes from the first token on. A row answers for its nodes from ``starts_B`` on; all of them are keys."""

    nodes_BT: Ints
    starts_B: Ints
    ends_B: Ints
    heads: int
    key_heads: int

    def struct(self, channels: int, turns: Tensor, scale: float) -> _Paths:
        """Return it as body.c reads it; the arrays must outlive what is done with it."""
        rows, longest = self.nodes_BT.shape
        arrays = (self.nodes_BT.ctypes.data, self.starts_B.ctypes.data, self.ends_B.ctypes.data)
        return _Paths(rows, self.heads, self.key_heads, channels, longest, scale, turns.data_ptr(), *arrays)


def read_along(
    library: ctypes.CDLL, joined: Tensor, turns: Tensor, paths: Paths, scale: float
) -> tuple[Tensor, Tensor]:
    """From queries, keys and values [N, heads + 2·key heads, channels] to what each node reads: [N, heads · channels].

    ``turns`` has the cosine and sine of each pair of channels by depth. Returned beside: what each query gives to each
    key, for a backward pass.
    """
    channels = joined.shape[-1]
    struct = paths.struct(channels, turns, scale)
    shares = joined.new_empty(library.attend_shares(ctypes.addressof(struct)))
    read = joined.new_empty(len(joined), paths.heads * channels)
    space = joined.new_empty(library.attend_space(ctypes.addressof(struct)))
    library.attend_forward(
        ctypes.addressof(struct), joined.data_ptr(), shares.data_ptr(), read.data_ptr(), space.data_ptr()
    )
    return read, shares
