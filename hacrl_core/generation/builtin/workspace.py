"""Buffers that all layers and steps of a decoder share."""

import math

import torch
from torch import Tensor


class Workspace:
    """Buffers by name, as large as they were ever asked for."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._empty = torch.empty(0, device=device, dtype=dtype)
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the buffer of this name in this shape; it holds whatever was written last."""
        size = math.prod(shape)
        held = self._held.get(name, self._empty)
        if held.numel() < size:
            held = self._held[name] = torch.empty(size, device=held.device, dtype=held.dtype)
        return held[:size].view(shape)
