"""From hidden states and LM head straight to loss and gradients, without the logits of the whole batch.

The loss separates by sequence. While the logits of a chunk of whole sequences are alive, their log-probs, the
objective's coefficients and both gradients are computed: three matrix products in all. The coefficient of a token is
one number per row of logits, so it is applied to the small operands of the last two products instead of to the logits.
A sequence too long for one chunk is split by tokens: a first pass for its log-probs, a second that recomputes all
pieces but the last.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hacrl_core.config.training import HeadPrecision
from hacrl_core.learning.fused.head import Head
from hacrl_core.learning.fused.rowwise import negative_gradient_

Objective = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


@runtime_checkable
class Settles(Protocol):
    """An objective that leaves questions to the GPU open until they are asked all at once."""

    def settle(self) -> None:
        """Raise if the rows seen since the last call were bad."""


_CHUNK_ELEMENTS = 8 << 20  # logits of small vocabularies: enough rows to forget the Python around them
_CHUNK_TOKENS = 256  # of large ones: enough rows for the products to run at full speed on a CPU
# On a GPU each chunk also reads and writes the head's whole gradient, so that few rows would be bound by its memory.
_CHUNK_TOKENS_GPU = 2048


@dataclass(frozen=True)
class Chunk:
    """Sequences ``first``..``last`` (exclusive) in ``pieces`` of token rows.

    There is more than one piece only for a single long sequence.
    """

    first: int
    last: int
    pieces: tuple[slice, ...]

    @property
    def tokens(self) -> slice:
        """The token rows of all pieces."""
        return slice(self.pieces[0].start, self.pieces[-1].stop)


@dataclass
class Gradients:
    """Where gradients are accumulated (float32, or float64 in tests). None: not wanted."""

    hidden_RH: Tensor
    weight_VH: Tensor | None
    bias_V: Tensor | None


@dataclass
class Outcome:
    """What one pass over a microbatch found; gradients are accumulated elsewhere."""

    logprobs_R: Tensor
    entropies_R: Tensor | None
    loss: Tensor
    has_gradient: bool = False  # False: every coefficient was zero (all clipped, say), and so is the gradient
    # rows_B and their statistics, per chunk
    stats: list[tuple[Tensor, dict[str, Tensor]]] = field(default_factory=list)


def plan_chunks(
    lengths: Sequence[int],
    vocabulary: int,
    *,
    max_logits_mb: int = 256,
    chunk_tokens: int | None = None,
    device: torch.device | None = None,
) -> list[Chunk]:
    """Plan which sequences share the buffer of logits.

    Whole sequences go together up to ``chunk_tokens`` rows (by default what suits the device); one alone up to
    ``max_logits_mb`` of logits; longer ones in pieces.
    """
    together = chunk_tokens or chunk_rows(vocabulary, on_gpu=device is not None and device.type == "cuda")
    alone = max(together, max_logits_mb * (1 << 20) // (4 * vocabulary))
    chunks: list[Chunk] = []
    start = 0
    for row, length in enumerate(lengths):
        stop = start + length
        if length > alone:
            pieces = tuple(slice(at, min(at + together, stop)) for at in range(start, stop, together))
            chunks.append(Chunk(row, row + 1, pieces))
        elif chunks and len(chunks[-1].pieces) == 1 and stop - chunks[-1].tokens.start <= together:
            chunks[-1] = Chunk(chunks[-1].first, row + 1, (slice(chunks[-1].tokens.start, stop),))
        else:
            chunks.append(Chunk(row, row + 1, (slice(start, stop),)))
        start = stop
    return chunks


def chunk_rows(vocabulary: int, *, on_gpu: bool) -> int:
    """Return how many rows of logits are computed together."""
    return max(_CHUNK_TOKENS_GPU if on_gpu else _CHUNK_TOKENS, _CHUNK_ELEMENTS // vocabulary)


@contextmanager
def head_products(precision: HeadPrecision = "fp32") -> Iterator[None]:
    """The head's products on CUDA: exact float32, or TF32 where asked for, whatever the process allows elsewhere.

    TF32 keeps 10 bits of a factor: log-probs are off by more than GSPO's window of 3e-4, alike in score and update.
    """
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


@torch.no_grad()
def fused_pass(
    hidden_RH: Tensor,
    head: Head,
    targets_R: Tensor,
    lengths: Sequence[int],
    rows_B: Tensor,
    chunks: Sequence[Chunk],
    *,
    temperature: float = 1.0,
    objective: Objective | None = None,
    gradients: Gradients | None = None,
    entropy: bool = False,
    precision: HeadPrecision = "fp32",
) -> Outcome:
    """Return the targets' log-probs; with an objective also its loss, whose gradients go into ``gradients``.

    ``hidden_RH`` holds one row per response token, sequence after sequence. Scoring is the same code without objective.
    """
    dtype = torch.promote_types(hidden_RH.dtype, torch.float32)
    products = _Products(hidden_RH.to(dtype), head, targets_R, temperature, chunks, entropy)
    layout = None if objective is None else _Layout.of(lengths, rows_B, chunks, hidden_RH.device)
    outcome = Outcome(products.logprobs_R, products.entropies_R, hidden_RH.new_zeros((), dtype=dtype))
    with head_products(precision):
        for chunk in chunks:
            for piece in chunk.pieces:
                products.forward(piece)
            if objective is None or layout is None:
                continue
            coefficients = _apply_objective(objective, outcome, chunk, layout, wanted=gradients is not None)
            if gradients is None or coefficients is None:
                continue
            outcome.has_gradient = True
            for piece in reversed(chunk.pieces):
                if piece is not chunk.pieces[-1]:
                    products.forward(piece)
                here = slice(piece.start - chunk.tokens.start, piece.stop - chunk.tokens.start)
                products.backward(piece, coefficients[here], gradients)
    return outcome


class _Products:
    """The three matrix products around one reused buffer of logits."""

    def __init__(
        self,
        hidden_RH: Tensor,
        head: Head,
        targets_R: Tensor,
        temperature: float,
        chunks: Sequence[Chunk],
        entropy: bool,
    ) -> None:
        dtype = hidden_RH.dtype
        self.factor, self.amplitude = head.folded(temperature)
        self.hidden_RH = hidden_RH if self.factor == 1.0 else hidden_RH * self.factor
        self.weight_VH = head.weight_VH.detach().to(dtype)
        self.bias_V = None if head.bias_V is None else head.bias_V.detach().to(dtype) * self.factor
        self.targets_R = targets_R
        self.logprobs_R = hidden_RH.new_empty(len(hidden_RH))
        self.entropies_R = hidden_RH.new_empty(len(hidden_RH)) if entropy else None
        largest = max((piece.stop - piece.start for chunk in chunks for piece in chunk.pieces), default=0)
        self.buffer_CV = hidden_RH.new_empty(largest, len(self.weight_VH))

    def forward(self, piece: slice) -> None:
        """Leaves −∂logprob/∂logits of the piece in the buffer."""
        logits = self.buffer_CV[: piece.stop - piece.start]
        if self.bias_V is None:
            torch.mm(self.hidden_RH[piece], self.weight_VH.t(), out=logits)
        else:
            torch.addmm(self.bias_V, self.hidden_RH[piece], self.weight_VH.t(), out=logits)
        logprobs, entropies = negative_gradient_(
            logits, self.targets_R[piece], amplitude=self.amplitude, entropy=self.entropies_R is not None
        )
        self.logprobs_R[piece] = logprobs
        if self.entropies_R is not None and entropies is not None:
            self.entropies_R[piece] = entropies

    def backward(self, piece: slice, coefficients_C: Tensor, into: Gradients) -> None:
        """From the buffer of ``forward`` and ∂loss/∂logprob of its rows to the gradients of hidden states and head."""
        gradient = self.buffer_CV[: piece.stop - piece.start]
        minus_C1 = -coefficients_C[:, None]
        torch.mm(gradient, self.weight_VH, out=into.hidden_RH[piece])
        into.hidden_RH[piece].mul_(minus_C1 * self.factor)
        if into.weight_VH is not None:
            into.weight_VH.addmm_(gradient.t(), self.hidden_RH[piece] * minus_C1)
        if into.bias_V is not None:
            into.bias_V.addmv_(gradient.t(), minus_C1[:, 0] * self.factor)


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of a microbatch stand in the padded rows of their chunk.

    Known on the host and copied once: picking by a mask would make the GPU wait twice in every chunk.
    """

    lengths: tuple[int, ...]
    lengths_B: Tensor
    rows_B: Tensor
    cells_R: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], rows_B: Tensor, chunks: Sequence[Chunk], device: torch.device) -> "_Layout":
        """Lay out the sequences of every chunk."""
        cells = [_cells(np.array(lengths[chunk.first : chunk.last])) for chunk in chunks]
        flat = np.concatenate([np.zeros(0, np.int64), *cells])
        on_host = torch.tensor(lengths, dtype=torch.int64), torch.from_numpy(flat)
        lengths_B, cells_R = (tensor.to(device, non_blocking=True) for tensor in on_host)
        return cls(tuple(lengths), lengths_B, rows_B, cells_R)


def _cells(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the flat places of each row's tokens in [rows, longest]."""
    begins = np.arange(len(lengths)) * lengths.max() - (np.cumsum(lengths) - lengths)
    return np.repeat(begins, lengths) + np.arange(lengths.sum())


def _apply_objective(
    objective: Objective, outcome: Outcome, chunk: Chunk, layout: _Layout, *, wanted: bool
) -> Tensor | None:
    """Add the chunk's loss to the outcome; return ∂loss/∂logprob per token, or None where all of it is zero.

    Only the CPU looks whether it is zero: a GPU would wait for the question longer than for the products.
    """
    flat, cells = outcome.logprobs_R[chunk.tokens], layout.cells_R[chunk.tokens]
    lengths_B = layout.lengths_B[chunk.first : chunk.last]
    width = max(layout.lengths[chunk.first : chunk.last])
    mask_BT = torch.arange(width, device=flat.device) < lengths_B[:, None]
    logprobs_BT = flat.new_zeros(mask_BT.numel()).index_copy_(0, cells, flat).view(mask_BT.shape)
    rows = layout.rows_B[chunk.first : chunk.last]
    loss, stats, slopes_BT = _with_slopes(objective, logprobs_BT, mask_BT, rows, wanted=wanted)
    outcome.loss += loss.detach()
    outcome.stats.append((rows, stats))
    if slopes_BT is None:
        return None
    coefficients = slopes_BT.flatten().index_select(0, cells)
    return coefficients if coefficients.device.type != "cpu" or bool(coefficients.any()) else None


def _with_slopes(
    objective: Objective, logprobs_BT: Tensor, mask_BT: Tensor, rows_B: Tensor, *, wanted: bool
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Return the objective's loss and statistics and, if wanted and not constant, ∂loss/∂logprob."""
    with torch.enable_grad():
        logprobs_BT.requires_grad_(wanted)
        loss, stats = objective(logprobs_BT, mask_BT, rows_B)
    if not wanted or not loss.requires_grad:
        return loss, stats, None
    (slopes_BT,) = torch.autograd.grad(loss, logprobs_BT)
    return loss, stats, slopes_BT


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, run: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(hidden_RH, weight_VH, bias_V)
        ctx.run = run
        ctx.gradients = _empty_gradients(hidden_RH, weight_VH, bias_V, ctx.needs_input_grad)
        return run(hidden_RH, weight_VH, bias_V, ctx.gradients)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        inputs = hidden_RH, weight_VH, bias_V = ctx.saved_tensors
        got: Gradients | None = ctx.gradients
        ctx.gradients = None  # the last reference but ours, so that autograd keeps the buffers instead of copying them
        if got is None:  # a second backward over a retained graph: the buffers were given away, compute them again
            got = _empty_gradients(hidden_RH, weight_VH, bias_V, ctx.needs_input_grad)
            ctx.run(*inputs, got)
        found = [got.hidden_RH, got.weight_VH, got.bias_V]
        if float(scale) != 1.0:
            found = [None if gradient is None else gradient * scale for gradient in found]
        return (*(None if g is None else g.to(i.dtype) for g, i in zip(found, inputs, strict=True)), None)


def _empty_gradients(hidden_RH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, needs: Sequence[bool]) -> Gradients:
    dtype = torch.promote_types(hidden_RH.dtype, torch.float32)
    return Gradients(
        torch.zeros_like(hidden_RH, dtype=dtype),
        torch.zeros_like(weight_VH, dtype=dtype) if needs[1] else None,
        torch.zeros_like(bias_V, dtype=dtype) if bias_V is not None and needs[2] else None,
    )


def fused_linear_loss(
    hidden_RH: Tensor,
    head: Head,
    targets_R: Tensor,
    lengths: Sequence[int],
    objective: Objective,
    *,
    rows_B: Tensor | None = None,
    temperature: float = 1.0,
    max_logits_mb: int = 256,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the loss as a node of autograd: gradients are computed with it and kept until ``backward``."""
    chunks = plan_chunks(lengths, len(head.weight_VH), max_logits_mb=max_logits_mb, chunk_tokens=chunk_tokens)
    rows = torch.arange(len(lengths), device=hidden_RH.device) if rows_B is None else rows_B

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, gradients: Gradients) -> Tensor:
        plain = Head(weight, bias, head.scale, head.softcap)
        return fused_pass(
            hidden,
            plain,
            targets_R,
            lengths,
            rows,
            chunks,
            temperature=temperature,
            objective=objective,
            gradients=gradients,
        ).loss

    return loss_node(hidden_RH, head, run)


def loss_node(hidden_RH: Tensor, head: Head, run: Callable[..., Tensor]) -> Tensor:
    """Make a node of autograd of ``run(hidden, weight, bias, gradients)``, which fills gradients and returns a loss."""
    loss: Tensor = _FusedLoss.apply(hidden_RH, head.weight_VH, head.bias_V, run)  # type: ignore[no-untyped-call]
    return loss
