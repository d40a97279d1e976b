"""Which tensors compiled functions can read."""

import torch
from torch import Tensor, nn


def readable(*tensors: Tensor) -> bool:
    """Whether all are float32 in this process's memory.

    The numbers of a sharded tensor, of a fake one or of another subclass lie elsewhere or nowhere: the address is 0.
    """
    return all(
        type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
        for tensor in tensors
    )
