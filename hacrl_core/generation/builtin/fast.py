"""A hand-written decoding step for Llama-style decoders (Llama, Mistral, Qwen2, Qwen3).

The saving over ``transformers``: keys and values live in one preallocated tensor, written in place, instead of being
copied at every step; queries, keys and values are one matrix product; grouped heads are not repeated; and the
per-module bookkeeping, which costs a tiny model more than its arithmetic, is gone.

A row's position ``t`` is stored at index ``t`` of its slot, so rows of any length sit side by side without padding.
Slots are as long as the longest row, rounded up, and attention reads them whole, unwritten positions masked: on a CPU
one unbroken pass over the keys takes half the time of many short ones, which is worth moving the slots apart now and
then. The step is checked against the model's own forward for a model's first weights and the next
(``build_fast_decoder``).
"""

import logging
import math
import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hacrl_core.generation.builtin.decoder import Decoder, GenericDecoder, Prefill
from hacrl_core.generation.builtin.weights import DecoderWeights, decoder_weights

logger = logging.getLogger(__name__)

LENGTH_STEP = 16  # slots grow by this many positions, or an eighth of their length if that is more
KEPT_BYTES = 1 << 28
OWN_NOISE = 2.0  # the step may be so many times as far off as transformers' own decoding is
MOST_NOISE = 3e-3  # of a log-prob in float32; beyond it something is wrong, whatever the model's own noise
MIN_ROWS = 4  # below, matrix products take another kernel and round differently


class FastDecoder:
    """A decoder with keys and values in one preallocated tensor, one slot per live row."""

    joinable = True

    def __init__(self, model: PreTrainedModel, weights: DecoderWeights, pad_token_id: int) -> None:
        self.model = model
        self.weights = weights
        self.pad_token_id = pad_token_id
        self.device = weights.embedding_VH.device
        self.dtype = weights.embedding_VH.dtype
        self._storage = self._no_storage()
        self.reset()

    def reset(self) -> None:
        """Drop all rows.

        Main memory is kept for the next call: the system takes longer to provide it than it takes to fill it.
        """
        self._rows = 0
        if self.device.type != "cpu" or self._storage.numel() * self._storage.element_size() > KEPT_BYTES:
            self._storage = self._no_storage()
        self._cache = self._shaped(0, 0)
        self._lengths: list[int] = []
        self._lengths_B = torch.zeros(0, dtype=torch.long, device=self.device)

    def _no_storage(self) -> Tensor:
        return torch.zeros(0, device=self.device, dtype=self.dtype)

    def _shaped(self, rows: int, length: int) -> Tensor:
        """The storage's beginning as [layer, key or value, slot, head, position, channel]."""
        w = self.weights
        shape = (w.layers, 2, rows, w.kv_heads, length, w.head_dim)
        return self._storage[: math.prod(shape)].view(shape)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefill:
        """The model's own forward. Padding on the right needs no mask: no token looks ahead."""
        lengths = tuple(map(len, prompts))
        width = max(lengths)
        ids = torch.tensor([[*p, *[self.pad_token_id] * (width - len(p))] for p in prompts], device=self.device)
        cache = DynamicCache(config=self.model.config)
        hidden = self.model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        last_PH = hidden[torch.arange(len(prompts), device=self.device), torch.tensor(lengths, device=self.device) - 1]
        states = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])
        return Prefill(self.model.lm_head(last_PH), lengths, states)

    @torch.inference_mode()
    def admit(self, prefill: Prefill, rows: Sequence[int]) -> None:
        """Append one live row for each entry: a copy of that prompt's cache."""
        states = prefill.cache
        start, end = self._rows, self._rows + len(rows)
        lengths = [prefill.lengths[row] for row in rows]
        self._reserve(max(end, MIN_ROWS), max(lengths))
        width = max(lengths)
        self._cache[:, :, start:end, :, :width] = states[:, :, list(rows), :, :width]
        self._rows = end
        self._set_lengths(self._lengths + lengths)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Make these the live rows, in this order."""
        moved = [(to, at) for to, at in enumerate(rows) if to != at]
        if moved:
            to, at = (list(column) for column in zip(*moved, strict=True))
            width = max(self._lengths)
            self._cache[:, :, to, :, :width] = self._cache[:, :, at, :, :width]
        self._rows = len(rows)
        self._set_lengths([self._lengths[row] for row in rows])

    @torch.inference_mode()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to every live row; return the next logits_BV."""
        live = self._rows
        self._reserve(max(live, MIN_ROWS), max(self._lengths) + 1)
        lengths_B = self._lengths_B
        if live < MIN_ROWS:
            tokens_B = F.pad(tokens_B, (0, MIN_ROWS - live), value=self.pad_token_id)
            lengths_B = F.pad(lengths_B, (0, MIN_ROWS - live))
        logits_BV = decode_step(self.weights, self._cache, tokens_B, lengths_B)
        self._lengths = [length + 1 for length in self._lengths]
        self._lengths_B = self._lengths_B + 1
        return logits_BV[:live]

    def _set_lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._lengths_B = torch.tensor(lengths, dtype=torch.long, device=self.device)

    def _reserve(self, rows: int, length: int) -> None:
        """Make slots for so many rows of this length; what they hold stays, in slots that are moved apart."""
        have_rows, have_length = self._cache.shape[2], self._cache.shape[4]
        if rows <= have_rows and length <= have_length:
            return
        if length > have_length:
            length = _round_up(max(length, have_length + have_length // 8), LENGTH_STEP)
        rows = max(rows, have_rows)
        length = max(length, have_length)
        old = self._cache
        w = self.weights
        size = w.layers * 2 * rows * w.kv_heads * length * w.head_dim
        if size <= self._storage.numel() and rows == have_rows:
            _move_apart(self._storage, old.shape[:4].numel(), have_length * w.head_dim, length * w.head_dim)
            self._cache = self._shaped(rows, length)
            return
        if size > self._storage.numel() or old.numel():
            # Zeros, not whatever was in memory: masked positions weigh nothing, but nothing times NaN is NaN.
            spare = min(size // 2, KEPT_BYTES // self._storage.element_size())
            self._storage = torch.zeros(size + spare, device=self.device, dtype=self.dtype)
        self._cache = self._shaped(rows, length)
        self._cache[:, :, :have_rows, :, :have_length] = old


def _move_apart(storage: Tensor, rows: int, old: int, new: int) -> None:
    """Widen rows of ``old`` numbers to rows of ``new`` in place: last first, in blocks that end before their target."""
    end = rows
    while end > 1:
        start = -(-end * old // new)
        source = storage[start * old : end * old]
        if start == end:  # a single row overlaps its own target
            start = end - 1
            source = storage[start * old : end * old].clone()
        storage[start * new : end * new].view(-1, new)[:, :old] = source.view(-1, old)
        end = start


def decode_step(w: DecoderWeights, cache: Tensor, tokens_B: Tensor, lengths_B: Tensor) -> Tensor:
    """One token per row through all layers: writes its keys and values at ``lengths_B``, returns the next logits_BV."""
    batch = len(tokens_B)
    width = cache.shape[4]
    groups = w.heads // w.kv_heads
    half = w.head_dim // 2
    turning = w.heads + w.kv_heads  # queries and keys are rotated, values are not
    x_BH = w.embedding_VH[tokens_B]
    cos_B1D, sin_B1D = w.cos_TD[lengths_B, None], w.sin_TD[lengths_B, None]
    bias, places = _attention_bias(w, lengths_B, width, x_BH.dtype), _places(cache, lengths_B)
    for block, states in zip(w.blocks, cache.unbind(), strict=True):
        qkv = F.linear(torch.rms_norm(x_BH, w.hidden, block.attention_norm, w.epsilon), block.qkv, block.qkv_bias)
        qkv = qkv.view(batch, turning + w.kv_heads, w.head_dim)
        qk = qkv[:, :turning]
        if block.qk_norm is not None:
            qk = torch.rms_norm(qk, w.channels, None, w.epsilon).mul_(block.qk_norm)
        swapped = torch.cat((qk[..., half:], qk[..., :half]), -1)
        torch.addcmul(qk * cos_B1D, swapped, sin_B1D, out=qkv[:, :turning])
        states.view(-1, w.head_dim).index_copy_(0, places, qkv[:, w.heads :].reshape(-1, w.head_dim))
        keys, values = states[:, :batch].flatten(1, 2).unbind()
        queries = qkv[:, : w.heads].reshape(batch * w.kv_heads, groups, w.head_dim)
        scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=w.scale)
        mixed = torch.bmm(torch.softmax(scores, -1), values).view(batch, w.heads * w.head_dim)
        x_BH = _residual(x_BH, mixed, block.out_t, block.out_bias)
        inner = torch.rms_norm(x_BH, w.hidden, block.mlp_norm, w.epsilon)
        gated = F.silu(F.linear(inner, block.gate, block.gate_bias), inplace=True)
        x_BH = _residual(x_BH, gated.mul_(F.linear(inner, block.up, block.up_bias)), block.down_t, block.down_bias)
    return F.linear(torch.rms_norm(x_BH, w.hidden, w.final_norm, w.epsilon), w.head_VH)


def _attention_bias(w: DecoderWeights, lengths_B: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Minus infinity on positions a row has not written yet, in the shape of the scores of every layer."""
    unwritten_BT = torch.arange(width, device=lengths_B.device) > lengths_B[:, None]
    bias_BT = torch.zeros(unwritten_BT.shape, dtype=dtype, device=lengths_B.device)
    bias_BT.masked_fill_(unwritten_BT, float("-inf"))
    shape = (len(lengths_B), w.kv_heads, w.heads // w.kv_heads, width)
    return bias_BT[:, None, None].expand(shape).reshape(-1, *shape[2:])


def _places(cache: Tensor, lengths_B: Tensor) -> Tensor:
    """Where each row's new keys and values go in a layer's cache seen as a list of head vectors."""
    _, two, slots, heads, length, _ = cache.shape
    rows_B11 = torch.arange(len(lengths_B), device=cache.device)[:, None, None]
    kinds_21 = torch.arange(two, device=cache.device)[:, None]
    heads_H = torch.arange(heads, device=cache.device)
    return (((kinds_21 * slots + rows_B11) * heads + heads_H) * length + lengths_B[:, None, None]).flatten()


def _residual(x: Tensor, update: Tensor, weight_t: Tensor, bias: Tensor | None) -> Tensor:
    x = torch.addmm(x, update, weight_t)
    return x if bias is None else x + bias


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


PROOFS = 2  # a model's first weights are often fresh, norms 1 and biases 0, which hides what is done to them
_proofs: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()  # sets of weights, by model


def build_fast_decoder(model: PreTrainedModel, pad_token_id: int, context_length: int) -> FastDecoder | None:
    """Return the fast decoder if it fits the model and reproduces its forward; otherwise None, with a log message."""
    weights = decoder_weights(model, context_length)
    if weights is None:
        return None
    decoder = FastDecoder(model, weights, pad_token_id)
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
    ids = torch.arange(12, device=decoder.device).mul_(7919).add_(3).remainder_(vocabulary)
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
