"""A hand-written decoding step for Llama-style decoders (Llama, Mistral, Qwen2, Qwen3).

The saving over ``transformers``: keys and values live in one preallocated tensor, written in place, instead of being
copied at every step; a prompt is held and read once for the rows that share it (``prefixes.py``); queries, keys and
values are one matrix product; grouped heads are not repeated; and the per-module bookkeeping, which costs a tiny model
more than its arithmetic, is gone.

A row's slot holds its positions in order, from the first behind a shared prompt on, so rows of any length sit side by
side without padding. Slots are as long as the longest row, rounded up, and attention reads them whole, unwritten
positions masked: on a CPU one unbroken pass over the keys takes a fraction of the time of many short ones, which is
worth moving the slots apart now and then. The step is checked against the model's own forward for a model's first
weights and the next (``build_fast_decoder``).
"""

import logging
import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hacrl_core.generation.builtin.decoder import Decoder, GenericDecoder, Prefill
from hacrl_core.generation.builtin.native_prefill import native_prefill
from hacrl_core.generation.builtin.native_step import NativeBatch, native_decode_step, native_kernels
from hacrl_core.generation.builtin.prefixes import Prefixes
from hacrl_core.generation.builtin.step import Batch, Slots, decode_step
from hacrl_core.generation.builtin.weights import DecoderWeights, decoder_weights
from hacrl_core.generation.builtin.workspace import Workspace

logger = logging.getLogger(__name__)

LENGTH_STEP = 16  # slots grow by this many positions, or an eighth of their length if that is more
KEPT_BYTES = 1 << 28
OWN_NOISE = 2.0  # the step may be so many times as far off as transformers' own decoding is
MOST_NOISE = 3e-3  # of a log-prob in float32; beyond it something is wrong, whatever the model's own noise
MIN_ROWS = 4  # below, matrix products take another kernel and round differently


class FastDecoder:
    """A decoder with keys and values in one preallocated tensor, one slot per live row."""

    joinable = True

    def __init__(
        self, model: PreTrainedModel, weights: DecoderWeights, pad_token_id: int, storage: Tensor | None = None
    ) -> None:
        self.model = model
        self.weights = weights
        self.pad_token_id = pad_token_id
        self.device = weights.embedding_VH.device
        self.dtype = weights.embedding_VH.dtype
        self._storage = self._no_storage() if storage is None else storage
        self._clean = 0  # so many numbers of the storage are zeros or were written by this decoder
        self._workspace = Workspace(self.device, self.dtype)
        self._kernels = native_kernels(weights)
        self._lengths: np.ndarray
        self._longest: int
        self._lengths_B: Tensor
        self._positions_B: Tensor
        self.reset()

    def reset(self) -> None:
        """Drop all rows.

        Main memory is kept for the next call: the system takes longer to provide it than it takes to fill it.
        """
        self._rows = 0
        if self.device.type != "cpu" or self._storage.numel() * self._storage.element_size() > KEPT_BYTES:
            self._storage, self._clean = self._no_storage(), 0
        self._slots = self._slots_in(self._shaped(0, 0))
        self._prefixes = Prefixes(self.weights)
        self._set_lengths(np.zeros(0, dtype=np.int64))

    def give_storage(self) -> Tensor:
        """Hand the memory to the decoder of the next weights; this one must not be used any more."""
        return self._storage

    def _no_storage(self) -> Tensor:
        return torch.zeros(0, device=self.device, dtype=self.dtype)

    def _slots_in(self, cache: Tensor) -> Slots:
        return Slots(self.weights, cache, masked=self._kernels is None)

    def _shaped(self, rows: int, length: int) -> Tensor:
        """The storage's beginning as [layer, key or value, slot, head, position, channel]."""
        w = self.weights
        shape = (w.layers, 2, rows, w.kv_heads, length, w.head_dim)
        return self._storage[: math.prod(shape)].view(shape)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefill:
        """Read prompts in compiled code where that fits; otherwise by the model's own forward.

        There padding on the right needs no mask: no token looks ahead.
        """
        native = None if self._kernels is None else native_prefill(self._kernels, self.weights, prompts)
        if native is not None:
            return native
        lengths = tuple(map(len, prompts))
        width = max(lengths)
        ids = torch.tensor([[*p, *[self.pad_token_id] * (width - len(p))] for p in prompts], device=self.device)
        cache = DynamicCache(config=self.model.config)
        hidden = self.model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        last_PH = hidden[torch.arange(len(prompts), device=self.device), torch.tensor(lengths, device=self.device) - 1]
        order = self.weights.pairs_D
        keys = [layer.keys if order is None else layer.keys[..., order] for layer in cache.layers]
        states = torch.stack([torch.stack([k, layer.values]) for k, layer in zip(keys, cache.layers, strict=True)])
        return Prefill(self.model.lm_head(last_PH), lengths, states)

    @torch.inference_mode()
    def logits_alone(self, token_ids: Sequence[int]) -> Tensor | None:
        """Return the logits that follow a sequence, computed without company; None where compiled code does not fit."""
        found = None if self._kernels is None else native_prefill(self._kernels, self.weights, [token_ids], keep=False)
        return None if found is None else found.logits_PV

    @torch.inference_mode()
    def admit(self, prefill: Prefill, rows: Sequence[int]) -> None:
        """Append one live row for each entry: a copy of that prompt's cache, or a share in it."""
        start, end = self._rows, self._rows + len(rows)
        self._prefixes.admit(prefill, rows)
        lengths = np.array([prefill.lengths[row] for row in rows], dtype=np.int64)
        own = lengths - self._prefixes.lengths()[start:]
        self._reserve(max(end, MIN_ROWS), int(own.max()) + 1)
        alone = np.flatnonzero(own).tolist()
        if alone:
            width = int(own.max())
            chosen = torch.tensor([rows[i] for i in alone], device=self.device)
            slots = torch.tensor([start + i for i in alone], device=self.device)
            states = prefill.cache[:, :, :, :, :width].index_select(2, chosen)
            self._slots.cache[:, :, :, :, :width].index_copy_(2, slots, states)
        self._rows = end
        self._set_lengths(np.concatenate([self._lengths, own]))
        self._slots.mask_rows(start, self._lengths_B)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Make these the live rows, in this order."""
        moved = [(to, at) for to, at in enumerate(rows) if to != at]
        if moved:
            to, at = (list(column) for column in zip(*moved, strict=True))
            self._slots.move(to, at, self._longest)
        self._rows = len(rows)
        chosen = np.array(rows, dtype=np.int64)
        self._prefixes.keep(chosen)
        self._set_lengths(self._lengths[chosen])

    @torch.inference_mode()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to every live row; return the next logits_BV."""
        live = self._rows
        self._reserve(max(live, MIN_ROWS), self._longest + 1)
        positions_B, lengths_B = self._positions_B, self._lengths_B
        if live < MIN_ROWS:
            padding = (0, MIN_ROWS - live)
            tokens_B, positions_B, lengths_B = (F.pad(c, padding) for c in (tokens_B, positions_B, lengths_B))
        logits_BV = self._logits(tokens_B, positions_B, lengths_B)
        self._lengths = self._lengths + 1
        self._lengths_B = self._lengths_B + 1
        self._positions_B = self._positions_B + 1
        self._longest += 1
        return logits_BV[:live]

    def _logits(self, tokens_B: Tensor, positions_B: Tensor, lengths_B: Tensor) -> Tensor:
        batch = len(tokens_B)
        if self._kernels is not None:
            prefixes, groups_B, shared_B = self._prefixes.places(batch)
            native = NativeBatch(tokens_B, positions_B, lengths_B, prefixes, groups_B, shared_B)
            return native_decode_step(self._kernels, self.weights, self._slots.cache, native, self._workspace)
        plain = Batch(tokens_B, positions_B, lengths_B, self._prefixes.sharing(batch))
        return decode_step(self.weights, self._slots, plain, self._workspace)

    def _set_lengths(self, lengths: np.ndarray) -> None:
        """Say how many positions of each live row's slot are written."""
        self._lengths = lengths
        self._longest = int(lengths.max(initial=0))
        positions = lengths + self._prefixes.lengths()
        self._lengths_B = torch.tensor(lengths.tolist(), dtype=torch.long, device=self.device)
        self._positions_B = torch.tensor(positions.tolist(), dtype=torch.long, device=self.device)

    def _reserve(self, rows: int, length: int) -> None:
        """Make slots for so many rows of this length; what live rows hold stays, in slots that are moved apart."""
        old = self._slots.cache
        have_rows, have_length = old.shape[2], old.shape[4]
        if rows <= have_rows and length <= have_length:
            return
        if length > have_length:
            # torch reads slots whole, so they are short. The native step reads what is written: moving costs more.
            spare = have_length // 8 if self._kernels is None else have_length
            length = _round_up(max(length, have_length + spare), LENGTH_STEP)
        if 4 * rows > 3 * have_rows:  # else many rows have left: their slots are given up
            rows = max(rows, have_rows)
        length = max(length, have_length)
        w = self.weights
        size = w.layers * 2 * rows * w.kv_heads * length * w.head_dim
        fits = size <= self._storage.numel()
        if not fits:
            spare = min(size // 2, KEPT_BYTES // self._storage.element_size())
            self._storage = torch.zeros(size + spare, device=self.device, dtype=self.dtype)
            self._clean = size + spare
        if size > self._clean:
            # Zeros, not whatever was in memory: masked positions weigh nothing, but nothing times NaN is NaN.
            self._storage[self._clean : size].zero_()
            self._clean = size
        cache = self._shaped(rows, length)
        _move(old[:, :, : self._rows, :, : self._longest], cache, forward=not fits or size <= old.numel())
        self._slots = self._slots_in(cache)
        self._slots.mask_rows(0, self._lengths_B)


def _move(old: Tensor, cache: Tensor, *, forward: bool) -> None:
    """Copy rows into slots of another shape that begin at the same place of memory.

    Each layer's keys, or values, are first taken out. Where the new slots take less room than the old, a layer's target
    ends before the next one's source; where they take more, it begins behind the source of the one before.
    """
    rows, length = old.shape[2], old.shape[4]
    if not rows * length:
        return
    source, target = old.flatten(0, 1), cache.flatten(0, 1)
    for plane in range(len(target)) if forward else reversed(range(len(target))):
        target[plane, :rows, :, :length] = source[plane].clone()


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


PROBED = 12  # tokens that the check of a model takes; one with fewer positions has no angles for them
PROOFS = 2  # a model's first weights are often fresh, norms 1 and biases 0, which hides what is done to them
_proofs: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()  # sets of weights, by model


def build_fast_decoder(
    model: PreTrainedModel, pad_token_id: int, context_length: int, storage: Tensor | None = None
) -> FastDecoder | None:
    """Return the fast decoder if it fits the model and reproduces its forward; otherwise None, with a log message.

    ``storage`` is the memory of the decoder that the model had before its weights changed.
    """
    weights = decoder_weights(model, context_length) if context_length >= PROBED else None
    if weights is None:
        return None
    decoder = FastDecoder(model, weights, pad_token_id, storage)
    if _proofs.get(model, 0) >= PROOFS:
        return decoder
    error, allowed = _probe(decoder)
    if error <= allowed:
        _proofs[model] = _proofs.get(model, 0) + 1
        return decoder
    logger.warning(
        "%s: the fast decoding step is %.2g off the model's own forward (allowed %.2g); using transformers' cache",
        type(model).__name__,
        error,
        allowed,
    )
    return None


@torch.inference_mode()
def _probe(decoder: FastDecoder) -> tuple[float, float]:
    """Return the largest difference of a log-prob from a full forward, and the difference allowed.

    A real model's own forward is noisier in float32 than any fixed bound: SmolLM2's log-probs move by 3e-4 when its
    prompt is padded. So where the fixed bound is exceeded, decoding through transformers' cache, on the same prompts,
    shows how far the model is from itself.
    """
    vocabulary = decoder.weights.head_VH.shape[0]
    ids = torch.arange(PROBED, device=decoder.device).mul_(7919).add_(3).remainder_(vocabulary)
    logits_TV = decoder.model(input_ids=ids[None], use_cache=False).logits[0].float()
    rows = torch.tensor([5, 9], device=decoder.device)
    wanted = torch.cat([logits_TV[rows + offset - 1] for offset in range(4)]).log_softmax(-1)
    error = _decoding_error(decoder, ids, wanted)
    relative = 1e-5 if decoder.dtype == torch.float32 else 3e-2
    allowed = relative * max(1.0, float(logits_TV.abs().max()))
    if allowed < error < MOST_NOISE:
        own = _decoding_error(GenericDecoder(decoder.model, decoder.pad_token_id), ids, wanted)
        allowed = max(allowed, OWN_NOISE * own)
    return error, allowed


def _decoding_error(decoder: Decoder, ids: Tensor, wanted: Tensor) -> float:
    """Return how far a decoder's log-probs are from those wanted, over two prompts and three steps."""
    rows = torch.tensor([5, 9], device=ids.device)
    prefill = decoder.prefill([tuple(ids[:5].tolist()), tuple(ids[:9].tolist())])
    got = [prefill.logits_PV.float()]
    decoder.admit(prefill, [0, 1])
    got += [decoder.step(ids[rows + offset]).float() for offset in range(3)]
    decoder.reset()
    return float((torch.cat(got).log_softmax(-1) - wanted).abs().max())
