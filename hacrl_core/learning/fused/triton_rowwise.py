"""The row-wise work as one Triton kernel: log-sum-exp, gather, entropy and the gradient of the logits in place.

One program per row, two sweeps over the vocabulary: the first keeps a running maximum, the rescaled sum and the
weighted sum for the entropy, the second overwrites each block of logits with its negated gradient. Interpreted by
``TRITON_INTERPRET=1`` it runs on the CPU, as the tests do.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(
    logits_ptr: Any,
    targets_ptr: Any,
    logprobs_ptr: Any,
    entropies_ptr: Any,
    stride: Any,
    vocabulary: Any,
    amplitude: Any,
    capped: tl.constexpr,
    entropy: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    columns = tl.arange(0, block)
    # Per lane, reduced once at the end: a running maximum m, Σ exp(y − m) and Σ exp(y − m)·y.
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
    log_sum = top + tl.log(sum_all)
    y = tl.load(start + target)
    if capped:
        y = amplitude * (2.0 / (1.0 + tl.exp(-2.0 * y)) - 1.0)
    tl.store(logprobs_ptr + row, (y - top) - tl.log(sum_all))
    if entropy:
        tl.store(entropies_ptr + row, log_sum - tl.sum(weighted * share, 0) / sum_all)
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
    if rows:
        _kernel[(rows,)](
            logits_RV,
            targets_R,
            logprobs_R,
            entropies_R,
            logits_RV.stride(0),
            vocabulary,
            1.0 if amplitude is None else amplitude,
            capped=amplitude is not None,
            entropy=entropy,
            block=min(_BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=8,
        )
    return logprobs_R, entropies_R if entropy else None
