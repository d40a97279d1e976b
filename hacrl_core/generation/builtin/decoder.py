"""What the scheduler asks of a decoder, and the decoder that works for any causal model."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


@dataclass(frozen=True)
class Prefill:
    """Prompts read once: the logits after each, and its keys and values in the decoder's own form."""

    logits_PV: Tensor
    lengths: tuple[int, ...]
    cache: Any


class Decoder(Protocol):
    """A batch of live rows; row i is the i-th admitted row still kept."""

    joinable: bool  # False: new rows may only be admitted when no row is live

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefill:
        """Read prompts; none of them becomes a live row yet."""

    def admit(self, prefill: Prefill, rows: Sequence[int]) -> None:
        """Append one live row for each entry: a copy of that prompt's cache."""

    def keep(self, rows: Sequence[int]) -> None:
        """Make these the live rows, in this order."""

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to every live row; return the next logits_BV."""

    def reset(self) -> None:
        """Drop all rows, for example after an error."""


class GenericDecoder:
    """Decodes through the transformers cache: right for any causal model, quick enough for large ones.

    Rows are right-aligned: every row's newest token is in the last column and padding is on the left, masked, which is
    the layout all models and attention kinds (absolute, rotary, ALiBi, sliding window) support in ``generate``.
    """

    def __init__(self, model: PreTrainedModel, pad_token_id: int) -> None:
        self.model = model
        self.pad_token_id = pad_token_id
        self.device = next(model.parameters()).device
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = takes_logits_to_keep(model)
        layers = DynamicCache(config=model.config).layers
        self.joinable = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
        self.reset()

    def reset(self) -> None:
        """Drop all rows."""
        self._cache: DynamicCache | None = None
        self._mask_BT = torch.zeros((0, 0), dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefill:
        """Read prompts through the model's own forward."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad_token_id] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        cache = DynamicCache(config=self.model.config)
        logits_PV = self._forward(ids, mask, cache)
        return Prefill(logits_PV, tuple(map(len, prompts)), (cache, mask))

    @torch.inference_mode()
    def admit(self, prefill: Prefill, rows: Sequence[int]) -> None:
        """Append one live row for each entry: a copy of that prompt's cache."""
        cache, mask = prefill.cache
        index = torch.tensor(rows, device=self.device)
        chosen = _copy_of(cache, self.model.config)
        chosen.reorder_cache(index)
        mask = mask[index]
        if self._cache is None:
            self._cache, self._mask_BT = chosen, mask
            return
        width = max(mask.shape[1], self._mask_BT.shape[1])
        _join(self._cache, chosen, width)
        self._mask_BT = torch.cat([pad(m, (width - m.shape[1], 0)) for m in (self._mask_BT, mask)])

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Make these the live rows, in this order."""
        if not rows:
            self.reset()
            return
        index = torch.tensor(rows, device=self.device)
        assert self._cache is not None
        self._cache.reorder_cache(index)
        self._mask_BT = self._mask_BT[index]
        if self.joinable:
            # The oldest rows have left: columns that are padding in all others go too.
            unused = int(self._mask_BT.any(0).long().argmax())
            if unused:
                self._mask_BT = self._mask_BT[:, unused:].contiguous()
                _set_width(self._cache, self._mask_BT.shape[1])

    @torch.inference_mode()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to every live row; return the next logits_BV."""
        self._mask_BT = pad(self._mask_BT, (0, 1), value=1)
        return self._forward(tokens_B[:, None], self._mask_BT, self._cache)

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache | None) -> Tensor:
        arguments: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if self._takes_positions:
            arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        logits: Tensor = self.model(input_ids=ids, **arguments).logits[:, -1]
        return logits


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the model can apply its head to the last positions only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _copy_of(cache: DynamicCache, config: Any) -> DynamicCache:
    """A second handle on the same tensors: reorder_cache replaces tensors, it does not write into them."""
    copy = DynamicCache(config=config)
    if len(copy.layers) != len(cache.layers):
        copy.layers = [type(layer)() for layer in cache.layers]
    for new, old in zip(copy.layers, cache.layers, strict=True):
        new.__dict__.update(old.__dict__)
    return copy


def _columns(layer: Any, width: int) -> int:
    return min(width, layer.sliding_window - 1) if layer.is_sliding else width


def _join(left: DynamicCache, right: DynamicCache, width: int) -> None:
    """Append the rows of ``right`` to ``left``, both padded on the left to ``width`` columns."""
    for a, b in zip(left.layers, right.layers, strict=True):
        columns = _columns(a, width)
        for name in ("keys", "values"):
            parts = [pad(t, (0, 0, columns - t.shape[-2], 0)) for t in (getattr(a, name), getattr(b, name))]
            setattr(a, name, torch.cat(parts))
        if a.is_sliding:
            a.cumulative_length = width


def _set_width(cache: DynamicCache, width: int) -> None:
    for layer in cache.layers:
        columns = _columns(layer, width)
        layer.keys = layer.keys[..., layer.keys.shape[-2] - columns :, :]
        layer.values = layer.values[..., layer.values.shape[-2] - columns :, :]
        if layer.is_sliding:
            layer.cumulative_length = width
