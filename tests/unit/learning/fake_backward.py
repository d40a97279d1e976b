"""A GPU without a GPU that autograd accepts: what `fake_cuda` cannot run, the backward pass, runs here.

The CPU build of torch has no device guard for CUDA, which autograd asks for. It has one for ``meta``. So the tensors
are fake ones on ``meta``, and the agent says ``cuda``: the code takes the branches it takes on a GPU. A tensor that
stayed on the host is found when it meets another. Waits of the host are written down, in the backward pass and in
layers that it runs again, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from fake_cuda import _Watch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers.modeling_layers import GradientCheckpointingLayer

from hacrl_core.agents.agent import Agent

CUDA = torch.device("cuda:0")
META = torch.device("meta")


class _Pretend(TorchFunctionMode):
    """A tensor that is made on or moved to ``cuda`` comes to ``meta``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.device, torch.get_device_module):  # of CUDA there is one
            args, kwargs = tree_map(_meta, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _meta(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return META
    return META if isinstance(value, str) and value.startswith("cuda") else value


class _OnGpu(_Watch):
    """Counts waits of tensors on ``meta``; a number of a fake tensor on the host is 0 and costs nothing."""

    gpu = "meta"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = func is torch.ops.aten._local_scalar_dense.default
        if number and isinstance(args[0], FakeTensor) and args[0].device.type == "cpu":
            return 0.0 if args[0].is_floating_point() else 0
        return super().__torch_dispatch__(func, types, args, kwargs)


class Autocast(TorchFunctionMode):
    """What ``torch.autocast`` in bfloat16 does to the bodies of these models: linear layers and attention.

    torch's own casts ask for a CUDA driver. A test compares this one with torch's on real numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, F.scaled_dot_product_attention):
            args, kwargs = tree_map(_half, (args, kwargs))
        return func(*args, **kwargs)


def cast_again(model: torch.nn.Module) -> None:
    """Have layers that the backward pass runs again cast as in the forward pass: torch's checkpointing sees to that."""

    def within(forward: Any) -> Any:
        def cast(*args: Any, **kwargs: Any) -> Any:
            with Autocast():
                return forward(*args, **kwargs)

        return cast

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = within(layer.forward)  # type: ignore[method-assign]


def _half(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value


class GpuAgent(Agent):
    """An agent that says it is on the GPU."""

    @property
    def device(self) -> torch.device:
        return CUDA


@contextmanager
def pretended_autocast(
    device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool = True
) -> Iterator[None]:
    """Stands in for ``torch.autocast``."""
    if not enabled:
        yield
        return
    with Autocast():
        yield


@contextmanager
def fake_gpu() -> Iterator[list[str]]:
    """Within it autograd works on tensors of ``cuda``; yields where the host waited, filled as it happens."""
    waits: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True), _OnGpu(waits), _Pretend():
        yield waits


def moved_to_gpu(module: torch.nn.Module) -> torch.nn.Module:
    """Put a model's weights on the GPU, tied ones together; call it within ``fake_gpu``."""
    known: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                empty = torch.empty(weight.shape, dtype=weight.dtype, device=CUDA)
                fresh = torch.nn.Parameter(empty, requires_grad=weight.requires_grad)
                part._parameters[name] = known.setdefault(id(weight), fresh)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)
    return module
