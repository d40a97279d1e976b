"""The row-wise work as one Triton kernel: log-sum-exp, gather, entropy and the gradient of the logits in place.

One program per row, two sweeps over the vocabulary. The first keeps, per lane, a running maximum m, Σ exp(y − m) and,
for the entropy, Σ exp(y − m)·y; they are reduced once at its end. The second overwrites each block of logits with its
negated gradient. The tests compile every variant without a GPU and run the kernel on the CPU with
``TRITON_INTERPRET=1``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # also where the vocabulary is smaller: then no two warps hold the same element
WARPS = 8


# Triton reads annotations: a run-time parameter must have none.
@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    targets_ptr,
    logprobs_ptr,
    entropies_ptr,
    stride,
    vocabulary,
    amplitude,
    capped: tl.constexpr,
    entropy: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    y = tl.load(start + target)  # before the sweep that overwrites the row: the reductions' barriers lie between
    columns = tl.arange(0, block)
    highest = tl.full([block], -1e38, tl.float32)
    total = tl.zeros([block], tl.float32)
    weighted = tl.zeros([block], tl.float32)
    for first in range(0, vocabulary, block):
        inside = first + columns < vocabulary
        x = tl.load(start + first + columns, mask=inside, other=0.0)
        if capped:
            x = amplitude * (2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)
        higher = tl.where(inside, tl.maximum(highest, x), highest)
        shrink = tl.exp(highest - higher)
        weight = tl.where(inside, tl.exp(tl.where(inside, x - higher, 0.0)), 0.0)
        total = total * shrink + weight
        if entropy:
            weighted = weighted * shrink + weight * x
        highest = higher
    top = tl.max(highest, 0)
    share = tl.exp(highest - top)
    sum_all = tl.sum(total * share, 0)
    if capped:
        y = amplitude * (2.0 / (1.0 + tl.exp(-2.0 * y)) - 1.0)
    tl.store(logprobs_ptr + row, (y - top) - tl.log(sum_all))
    if entropy:
        tl.store(entropies_ptr + row, top + tl.log(sum_all) - tl.sum(weighted * share, 0) / sum_all)
    for first in range(0, vocabulary, block):
        inside = first + columns < vocabulary
        x = tl.load(start + first + columns, mask=inside, other=0.0)
        slope = tl.full([block], 1.0, tl.float32)
        if capped:
            bent = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
            slope = amplitude * (1.0 - bent * bent)
            x = amplitude * bent
        gradient = tl.exp(x - top) / sum_all - tl.where(first + columns == target, 1.0, 0.0)
        tl.store(start + first + columns, gradient * slope, mask=inside)


def negative_gradient_triton_(
    logits_RV: Tensor, targets_R: Tensor, *, amplitude: float | None = None, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Same contract as the torch path; float32, rows contiguous."""
    rows, vocabulary = logits_RV.shape
    logprobs_R = logits_RV.new_empty(rows)
    entropies_R = logits_RV.new_empty(rows if entropy else 1)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(logits_RV):  # type: ignore[no-untyped-call]
        numbers = (logits_RV.stride(0), vocabulary, 1.0 if amplitude is None else amplitude)
        variant = {"capped": amplitude is not None, "entropy": entropy, "block": BLOCK, "num_warps": WARPS}
        if rows:
            _kernel[(rows,)](logits_RV, targets_R, logprobs_R, entropies_R, *numbers, **variant)
    return logprobs_R, entropies_R if entropy else None
