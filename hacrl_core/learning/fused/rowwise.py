"""The row-wise work between the matrix products: log-softmax, gather, and the gradient of the logits in place.

For a row of scaled logits x and its target t the log-probability is ``log p = y_t − logsumexp(y)``, where ``y = x``, or
``y = amplitude·tanh(x)`` under soft-capping. Its gradient with respect to x, **negated**, is ``(p − onehot_t)·dy/dx``
and does not depend on the loss: the loss enters as one factor per row, which the caller applies to the small [R, H]
operands of the next two products. So the logits are overwritten once, before the loss is known.
"""

import importlib.util
import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

BLOCK_ELEMENTS = 1 << 19  # 2 MB of float32: the passes over a block of rows stay in the cache

# Why Triton is not used on CUDA in this process; None: it is used, or nobody has asked yet.
_refusal: str | None = None


def negative_gradient_(
    logits_RV: Tensor, targets_R: Tensor, *, amplitude: float | None = None, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Overwrite ``logits_RV`` with −∂log p/∂logits; return the log-probs and, if asked, the entropies of the rows.

    On CUDA a Triton kernel does it. Where that cannot be compiled or launched, nothing has been overwritten, and torch
    does the same work from then on; one warning says why.
    """
    if logits_RV.is_cuda and logits_RV.dtype == torch.float32 and uses_triton(logits_RV.device):
        from hacrl_core.learning.fused.triton_rowwise import negative_gradient_triton_

        try:
            return negative_gradient_triton_(logits_RV, targets_R, amplitude=amplitude, entropy=entropy)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            _refuse(f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}")
    return negative_gradient_torch_(logits_RV, targets_R, amplitude=amplitude, entropy=entropy)


def uses_triton(device: torch.device) -> bool:
    """Whether the Triton kernel does the row-wise work on this device, as far as this process knows by now."""
    if device.type == "cuda" and _refusal is None and importlib.util.find_spec("triton") is None:
        _refuse("it is not installed")
    return device.type == "cuda" and _refusal is None


def kernel_metrics(stage: str, device: torch.device) -> dict[str, float]:
    """Which path did the row-wise work of a stage on CUDA: ``STAGE/fused_triton`` is 1 for Triton, 0 for torch."""
    return {f"{stage}/fused_triton": float(uses_triton(device))} if device.type == "cuda" else {}


def _refuse(why: str) -> None:
    global _refusal
    _refusal = why
    logger.warning(
        "the fused loss runs without its Triton kernel (%s); torch does the same work, slower and with more memory "
        "traffic: install the triton that belongs to this torch, and a C compiler, which it needs",
        why,
    )


def negative_gradient_torch_(
    logits_RV: Tensor, targets_R: Tensor, *, amplitude: float | None = None, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Do the work of `negative_gradient_` with torch alone, in blocks that stay in the cache."""
    rows, vocabulary = logits_RV.shape
    block = max(1, BLOCK_ELEMENTS // vocabulary)
    logprobs_R = logits_RV.new_empty(rows)
    entropies_R = logits_RV.new_empty(rows) if entropy else None
    for start in range(0, rows, block):
        part = slice(start, start + block)
        own_entropies = None if entropies_R is None else entropies_R[part]
        _block_(logits_RV[part], targets_R[part, None], logprobs_R[part], own_entropies, amplitude)
    return logprobs_R, entropies_R


def _block_(
    x_bV: Tensor, targets_b1: Tensor, logprobs_b: Tensor, entropies_b: Tensor | None, amplitude: float | None
) -> None:
    slope_bV = None
    if amplitude is not None:
        x_bV.tanh_()
        slope_bV = (x_bV * x_bV).mul_(-amplitude).add_(amplitude)
        x_bV.mul_(amplitude)
    x_bV.sub_(x_bV.amax(dim=1, keepdim=True))
    target_b1 = x_bV.gather(1, targets_b1)
    shifted_bV = x_bV.clone() if entropies_b is not None else None
    sum_b1 = x_bV.exp_().sum(dim=1, keepdim=True)
    log_sum_b1 = sum_b1.log()
    torch.sub(target_b1.squeeze(1), log_sum_b1.squeeze(1), out=logprobs_b)
    x_bV.div_(sum_b1)
    if entropies_b is not None and shifted_bV is not None:  # H = log Σ − Σ p·y, both after the shift
        torch.sub(log_sum_b1.squeeze(1), shifted_bV.mul_(x_bV).sum(dim=1), out=entropies_b)
    x_bV.scatter_add_(1, targets_b1, x_bV.new_full((1, 1), -1.0).expand_as(targets_b1))
    if slope_bV is not None:
        x_bV.mul_(slope_bV)
