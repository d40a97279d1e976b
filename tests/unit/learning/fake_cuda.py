"""CUDA without a GPU: tensors that have a device, a shape and a type, but no numbers.

Operations on them check devices and types as CUDA would. What would make the host wait for the GPU is written down.
The CPU build of torch can run such tensors under ``no_grad`` only, and it has no indexing for them, so the modes below
bring their own.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
OURS = Path(__file__).parents[3]
# Reading a number, or a result whose size only the GPU knows.
_WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
_PRODUCTS = {aten.mm.default, aten.mm.out, aten.addmm.default, aten.addmm.out, aten.addmm_.default, aten.bmm.default}


# Methods of tensors that ask for a CUDA driver before they ask the operation, and the operation.
_PLAIN: dict[Any, Callable[..., Any]] = {
    Tensor.item: aten._local_scalar_dense,
    Tensor.__bool__: lambda x: bool(aten._local_scalar_dense(x)),
    Tensor.__float__: lambda x: float(aten._local_scalar_dense(x)),
    Tensor.__int__: lambda x: int(aten._local_scalar_dense(x)),
    Tensor.contiguous: lambda x: x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format),
    Tensor.__invert__: lambda x: aten.bitwise_not(x),
    torch.isfinite: lambda x: x.abs() < torch.inf,
    Tensor.isfinite: lambda x: x.abs() < torch.inf,
    Tensor.nonzero: lambda x: aten.nonzero(x),
    Tensor.copy_: lambda x, source, non_blocking=False: _fill(x, source, non_blocking=non_blocking),
    Tensor.cpu: lambda x: _copy(x, "cpu"),
    Tensor.float: lambda x: _copy(x, torch.float32),
    Tensor.double: lambda x: _copy(x, torch.float64),
    Tensor.bool: lambda x: _copy(x, torch.bool),
    Tensor.to: lambda x, *where, non_blocking=False, dtype=None, device=None: _copy(
        x, *where, dtype, device, non_blocking=non_blocking
    ),
}


def _copy(values: Tensor, *where: Any, non_blocking: bool = False) -> Tensor:
    """``values.to(…)``; a copy only where something changes."""
    wanted = {"dtype": values.dtype, "device": values.device}
    for part in where:
        if isinstance(part, Tensor):
            wanted = {"dtype": part.dtype, "device": part.device}
        elif isinstance(part, torch.dtype):
            wanted["dtype"] = part
        elif part is not None and not isinstance(part, bool):
            wanted["device"] = torch.device(part)
    if wanted == {"dtype": values.dtype, "device": values.device}:
        return values
    copied: Tensor = aten._to_copy(values, **wanted, non_blocking=non_blocking)
    return copied


def _fill(place: Tensor, source: Any, *, non_blocking: bool = False) -> Tensor:
    """``place.copy_(source)`` without numbers: shapes must fit, and another device costs a copy."""
    if isinstance(source, Tensor):
        _copy(source, place.device, non_blocking=non_blocking).expand(place.shape)
    return place


class _Indexing(TorchFunctionMode):
    """Indexing and copies by plain operations: the built-in ones ask for a CUDA driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _indexed(args[0], args[1])
        if func is Tensor.__setitem__:
            place, tensors = _sliced(args[0], args[1])
            if not tensors:
                return _fill(place, args[2])
            return aten.index_put_(place, tensors, torch.as_tensor(args[2], dtype=place.dtype, device=place.device))
        return _PLAIN.get(func, func)(*args, **(kwargs or {}))


def _indexed(values: Tensor, index: Any) -> Tensor:
    place, tensors = _sliced(values, index)
    return aten.index(place, tensors) if tensors else place


def _sliced(values: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Apply what is not a tensor in ``index``; return the view and the tensors by axis."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part if part is Ellipsis else None for part in parts]:
        at = next(place for place, part in enumerate(parts) if part is Ellipsis)
        used = sum(part is not None and part is not Ellipsis for part in parts)
        parts[at : at + 1] = [slice(None)] * (values.dim() - used)
    axis, tensors = 0, []
    for part in parts:
        if isinstance(part, list):
            part = torch.empty(len(part), dtype=torch.int64, device=values.device)
        if part is None:
            values = values.unsqueeze(axis)
        elif isinstance(part, int):
            values = values.select(axis, part)
            continue
        elif isinstance(part, slice):
            values = aten.slice(values, axis, part.start, part.stop, part.step or 1)
        tensors.append(part if isinstance(part, Tensor) else None)
        axis += 1
    while tensors and tensors[-1] is None:
        tensors.pop()
    return values, tensors


class _Watch(TorchDispatchMode):
    """Writes down where the host waits for the GPU, and refuses products that CUDA has not."""

    gpu = "cuda"  # the type of device that stands for one

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # a number that the mode knows; it would want to compute with it on the GPU
        on_cuda = any(tensor.device.type == self.gpu for tensor in given)
        if func in _PRODUCTS and on_cuda and not given[0].is_floating_point():
            raise TypeError(f"{func}: CUDA has no product of {given[0].dtype}")
        if func in _PRODUCTS and on_cuda and len({tensor.dtype for tensor in given}) > 1:
            raise TypeError(f"{func}: product of different types {[tensor.dtype for tensor in given]}")
        masks = func in (aten.index.Tensor, aten.index_put_.default) and _has_mask(args[1])
        if on_cuda and (func in _WAITS or masks):
            self.waits.append(_where(func))
            if func is aten._local_scalar_dense.default:
                return 0.0 if args[0].is_floating_point() else 0
            if func is aten.nonzero.default:
                return torch.zeros(args[0].numel(), args[0].dim(), dtype=torch.int64, device=args[0].device)
            if func is aten.index.Tensor:
                return args[0].new_empty((args[1][0].numel(), *args[0].shape[args[1][0].dim() :]))
            if func is aten.index_put_.default:
                return args[0]
        result = func(*args, **kwargs)
        return self._copied(func, args, kwargs, result)

    def _copied(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Copies between host and GPU: a blocking one waits, and one to the host has numbers (zeros) to look at."""
        if func is aten._to_copy.default:
            source, target, blocking = args[0].device.type, result.device.type, not kwargs.get("non_blocking")
        elif func is aten.copy_.default:
            source, target, blocking = args[1].device.type, args[0].device.type, not (args[2:] and args[2])
        else:
            return result
        if {source, target} != {"cpu", self.gpu}:
            return result
        if blocking or target == "cpu":
            self.waits.append(_where(func))
        if target == "cpu" and func is aten._to_copy.default:
            with unset_fake_temporarily():
                return torch.zeros(result.shape, dtype=result.dtype)
        return result


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


def _where(func: Any) -> str:
    """Return the operation and the line of the project (else of a library) that asked for it."""
    frames = [f for f in traceback.extract_stack() if "torch/" not in f.filename and "fake_cuda" not in f.filename]
    ours = [frame for frame in frames if str(OURS / "hacrl_core") in frame.filename]
    frame = (ours or frames)[-1]
    return f"{func} at {Path(frame.filename).name}:{frame.lineno} {frame.name}: {frame.line}"


@contextmanager
def fake_cuda() -> Iterator[list[str]]:
    """Within it tensors can be made on ``cuda``; yields where the host waited for the GPU, filled as it happens."""
    waits: list[str] = []
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), _Watch(waits), _Indexing():
        yield waits


def moved_to_cuda(module: torch.nn.Module, made: Callable[..., Tensor] = torch.empty_like) -> torch.nn.Module:
    """Put a model's weights on the GPU, tied ones together; call it within ``fake_cuda``."""
    known: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                fresh = known.setdefault(id(weight), torch.nn.Parameter(made(weight, device="cuda:0")))
                part._parameters[name] = fresh
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = made(buffer, device="cuda:0")
    return module
