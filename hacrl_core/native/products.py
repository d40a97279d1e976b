"""Matrix products of many rows and a small weight on one core with their gradients, in C (``products.c``).

torch's own go to MKL, which lays out both matrices anew in every call and, on CPUs that are not Intel's, runs narrower
vectors. Other numbers than float32, few rows, several threads and tensors of subclasses stay torch's.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hacrl_core.native import kernels
from hacrl_core.native.tensors import readable

_Pointer, _Count = ctypes.c_void_p, ctypes.c_int64


def product_library() -> ctypes.CDLL | None:
    """Return the compiled functions of products.c; None where torch has to do without."""
    found = kernels("products")
    if found is not None and not found.product.argtypes:  # told last: other threads may be here, too
        found.product_rows.argtypes, found.product_rows.restype = (), _Count
        found.product_space.argtypes, found.product_space.restype = (_Count,) * 2, _Count
        found.gradient_space.argtypes, found.gradient_space.restype = (_Count,), _Count
        found.gradient.argtypes = (*(_Pointer,) * 4, *(_Count,) * 3)
        found.product.argtypes = (*(_Pointer,) * 5, *(_Count,) * 4)
    return found


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ."""
    if not _takes(x, weight):
        return x @ weight.t()
    out: Tensor = _Linear.apply(x, weight, None)  # type: ignore[no-untyped-call]
    return out


def add_linear(base: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return base + x · weightᵀ."""
    if not _takes(base, x, weight):
        return torch.addmm(base, x, weight.t())
    out: Tensor = _Linear.apply(x, weight, base)  # type: ignore[no-untyped-call]
    return out


def _takes(*tensors: Tensor) -> bool:
    library, (x, weight) = product_library(), tensors[-2:]
    if library is None or torch.get_num_threads() > 1 or not readable(*tensors):
        return False
    return 0 < library.product_rows() <= len(x) and weight.numel() > 0


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, base: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, base, turned=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        added = slope if ctx.needs_input_grad[2] else None
        return _product(slope, weight, None, turned=False), _gradient(slope, x), added


def _product(x: Tensor, matrix: Tensor, base: Tensor | None, *, turned: bool) -> Tensor:
    """Return base + x · matrix, or its transpose if it lies ``turned``."""
    library = product_library()
    assert library is not None
    x, matrix, base = x.contiguous(), matrix.contiguous(), None if base is None else base.contiguous()
    rows, inner = x.shape
    columns = matrix.shape[0 if turned else 1]
    out, space = x.new_empty(rows, columns), x.new_empty(library.product_space(inner, columns))
    library.product(
        x.data_ptr(), matrix.data_ptr(), None if base is None else base.data_ptr(), out.data_ptr(), space.data_ptr(),
        rows, inner, columns, turned,
    )  # fmt: skip
    return out


def _gradient(slope: Tensor, x: Tensor) -> Tensor:
    """Return slopeᵀ · x."""
    library = product_library()
    assert library is not None
    slope, x = slope.contiguous(), x.contiguous()
    rows, outer = slope.shape
    out, space = x.new_empty(outer, x.shape[1]), x.new_empty(library.gradient_space(outer))
    library.gradient(slope.data_ptr(), x.data_ptr(), out.data_ptr(), space.data_ptr(), rows, outer, x.shape[1])
    return out
