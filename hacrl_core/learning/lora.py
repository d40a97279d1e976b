"""LoRA through peft (imported only when asked for): attach, and save both the adapter and the merged weights."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hacrl_core.config.training import LoraConfig
from hacrl_core.errors import EngineError

_ADAPTER = "adapter"
_FILE = "adapter_model.safetensors"


def attach(
    model: PreTrainedModel, config: LoraConfig, resume: Path | None, seed: int, *, as_merged: bool = False
) -> Any:
    """Inject adapters into ``model`` and freeze the rest; returns peft's wrapper.

    A checkpoint to resume from holds merged weights, so that it runs alone: its adapter is loaded and subtracted from
    them, which leaves the base it was trained on, up to rounding. ``as_merged`` is for bfloat16: layers then compute
    with the merged weight, rounded, as sampling and scoring do. Base and adapter rounded apart are another policy.
    """
    try:
        import peft
    except ImportError as error:
        raise EngineError("LoRA: peft is not installed; install the extra hacrl[lora] or remove update.lora") from error
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, settings)
    if type(model.get_output_embeddings()) is not torch.nn.Linear:
        raise EngineError(
            "LoRA: an adapter on the output head is not supported; take the head out of update.lora.target_modules"
        )
    if resume is not None:
        _unmerge(wrapped, adapter_file(resume))
    if as_merged:
        for layer in layers(wrapped.get_base_model()).values():
            if type(layer.get_base_layer()) is torch.nn.Linear:
                layer.forward = partial(_merged_forward, layer)
    wrapped.eval()
    return wrapped


def _merged_forward(layer: Any, x: Tensor) -> Tensor:
    base = layer.get_base_layer()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    y: Tensor = _MergedLinear.apply(x, base.weight, base.bias, a, b, layer.scaling["default"])  # type: ignore[no-untyped-call]
    return y


class _MergedLinear(torch.autograd.Function):
    """y = x·(W + scale·B·A)ᵀ with the sum in float32 and the product in bfloat16; gradients go to x, A and B.

    The gradient of the merged weight is never formed: with G = ∂L/∂y, ∂L/∂B = scale·Gᵀ(x·Aᵀ) and ∂L/∂A = scale·(G·B)ᵀx.
    The merged weight is computed again in the backward pass instead of being kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        x = x.to(torch.bfloat16)
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, _merged(weight, a, b, scale), None if bias is None else bias.to(torch.bfloat16))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            g = gradient.to(torch.bfloat16)
            rows_x, rows_g = x.flatten(0, -2), g.flatten(0, -2)
            to_b = rows_g.t() @ (rows_x @ a.t().to(torch.bfloat16))
            to_a = (rows_g @ b.to(torch.bfloat16)).t() @ rows_x
            to_x = g @ _merged(weight, a, b, ctx.scale) if ctx.needs_input_grad[0] else None
        return to_x, None, None, to_a.float() * ctx.scale, to_b.float() * ctx.scale, None


def _merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The weight that `save` writes, in bfloat16; the same operations in the same order."""
    return (weight + (b @ a) * scale).to(torch.bfloat16)


def adapter_file(checkpoint: Path) -> Path:
    """Return where a checkpoint keeps the adapter that its weights contain."""
    return checkpoint / _ADAPTER / _FILE


def layers(model: PreTrainedModel) -> dict[str, Any]:
    """Return a model's LoRA layers by name, in the order of its modules."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _unmerge(wrapped: Any, file: Path) -> None:
    from peft import set_peft_model_state_dict

    if not file.is_file():
        raise EngineError(
            f"adapter {file}: not found; the checkpoint was trained without LoRA, start without its optimizer state"
        )
    set_peft_model_state_dict(wrapped, load_file(file))
    with torch.no_grad():
        for layer in layers(wrapped.get_base_model()).values():
            layer.get_base_layer().weight.sub_(layer.get_delta_weight("default"))


def save(wrapped: Any, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Write the adapter into ``folder/adapter``; return the merged weights under the plain model's names."""
    from peft import get_peft_model_state_dict

    adapter = {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(wrapped).items()}
    write_adapter(adapter, wrapped.peft_config["default"], folder)
    plain = {name.replace(".base_layer.", "."): t for name, t in model.state_dict().items() if ".lora_" not in name}
    with torch.no_grad():
        for name, layer in layers(model).items():
            plain[f"{name}.weight"] = layer.get_base_layer().weight + layer.get_delta_weight("default")
    return plain


def merge(wrapped: Any) -> None:
    """Turn the adapted model back into a plain one with the weights that ``save`` returned."""
    model = wrapped.merge_and_unload()
    model.requires_grad_(True)
    for name in ("peft_config", "_hf_peft_config_loaded"):
        model.__dict__.pop(name, None)


def write_adapter(adapter: dict[str, Tensor], settings: Any, folder: Path) -> None:
    """Write an adapter's tensors and peft's settings into ``folder/adapter``."""
    file = adapter_file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(adapter, file, metadata={"format": "pt"})
    # Where the base was read from is no part of an artifact's content.
    plain = copy.copy(settings)
    plain.base_model_name_or_path = None
    plain.save_pretrained(file.parent)
