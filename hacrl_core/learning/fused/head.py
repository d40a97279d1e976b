"""What stands between a causal model's last hidden state and its logits, read from the model and proved by a probe."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hacrl_core.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Head:
    """logits = cap·tanh(scale·(h·Wᵀ + b) / cap), without the tanh where ``softcap`` is none."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """The plain computation, for the probe and the tests."""
        logits_RV = nn.functional.linear(hidden_RH, self.weight_VH, self.bias_V) * self.scale
        return logits_RV if self.softcap is None else torch.tanh(logits_RV / self.softcap) * self.softcap

    def folded(self, temperature: float) -> tuple[float, float | None]:
        """Return (a, amplitude): the row-wise work sees x = a·(h·Wᵀ + b), then y = x or amplitude·tanh(x).

        Both are already divided by the temperature.
        """
        if self.softcap is None:
            return self.scale / temperature, None
        return self.scale / self.softcap, self.softcap / temperature


def hidden_states(model: PreTrainedModel, input_ids_BT: Tensor) -> Tensor:
    """Last hidden states [B, T, H]; the model's own head, and so its [B, T, V] logits, never run.

    Rows are padded on the right and attention is causal, so a real token never sees padding and no mask is needed.
    """
    output = model.base_model(input_ids=input_ids_BT, use_cache=False)
    hidden_BTH: Tensor = output.last_hidden_state
    return hidden_BTH


_proved: weakref.WeakKeyDictionary[PreTrainedModel, tuple[float, float | None]] = weakref.WeakKeyDictionary()


def read_head(model: PreTrainedModel) -> Head:
    """The head of a causal model.

    A short probe compares it with the model's own logits, so nothing is silently ignored.

    Raises:
        EngineError: the head is not a plain linear layer, or the probe reveals something that we do not know.
    """
    layer = model.get_output_embeddings()
    name = type(model).__name__
    if model.base_model is model or not isinstance(layer, nn.Linear):
        raise EngineError(
            f"model {name}: its output head {type(layer).__name__} is not a linear layer on a base model; not supported"
        )
    head = Head(layer.weight, layer.bias)
    if model not in _proved:
        _proved[model] = _probe(model, head)
    scale, softcap = _proved[model]
    return replace(head, scale=scale, softcap=softcap)


def _declared(model: PreTrainedModel) -> list[tuple[float, float | None]]:
    """Candidates for (scale, softcap).

    Architectures use the same field for a factor and for a divisor: the probe decides.
    """
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scales = [1.0]
    for field in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(config, field, None)
        if isinstance(value, int | float) and value not in (0, 1):
            scales = [float(value), 1.0 / float(value), *scales]
    return [(scale, float(softcap) if softcap else None) for scale in scales]


@torch.no_grad()
def _probe(model: PreTrainedModel, head: Head) -> tuple[float, float | None]:
    training = model.training
    model.eval()
    try:
        vocabulary = head.weight_VH.shape[0]
        ids_BT = (
            torch.arange(_PROBE_TOKENS, device=head.weight_VH.device)
            * 7919
            % min(vocabulary, model.config.get_text_config().vocab_size)
        )[None]
        expected_RV = model(input_ids=ids_BT, use_cache=False).logits[0].float()
        hidden_RH = hidden_states(model, ids_BT)[0].to(head.weight_VH.dtype)
        tolerance = 1e-4 if head.weight_VH.dtype in (torch.float32, torch.float64) else 5e-2
        size = float(expected_RV.abs().max()) or 1.0
        for scale, softcap in _declared(model):
            found_RV = replace(head, scale=scale, softcap=softcap).logits(hidden_RH).float()
            if found_RV.shape == expected_RV.shape and float((found_RV - expected_RV).abs().max()) <= tolerance * size:
                return scale, softcap
        raise EngineError(
            f"model {type(model).__name__}: its logits are not scale·(hidden·Wᵀ + bias) with optional soft-capping "
            f"(largest logit {size:.3g}); this architecture's head is not supported"
        )
    finally:
        model.train(training)
