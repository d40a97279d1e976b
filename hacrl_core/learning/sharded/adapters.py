"""LoRA on a sharded model: peft's layers on the meta device, slices of the adapters, weights merged row by row.

Every rank knows the whole adapters while it loads or saves them: they are small.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hacrl_core.config.training import LoraConfig
from hacrl_core.learning import lora
from hacrl_core.learning.sharded.loading import TensorFiles, local, rows_of
from hacrl_core.learning.sharded.ranks import Rank

_PREFIX = "base_model.model."


def inject(model: PreTrainedModel, config: LoraConfig) -> None:
    """Put adapters without numbers into a model of the meta device, and freeze the rest."""
    with torch.device("meta"):
        lora.attach(model, config, None, seed=0)


def initialise(model: PreTrainedModel, checkpoint: Path, rank: Rank, seed: int) -> None:
    """Give the adapters their numbers.

    A checkpoint with an adapter holds merged weights: the adapter is subtracted from this rank's rows of them. Without
    one, new adapters begin as those of one process with the same seed do.
    """
    file = lora.adapter_file(checkpoint)
    if not file.is_file():
        _begin(model, rank, seed)
        return
    with TensorFiles([file]) as files, torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                rows = rows_of(parameter.shape[0], rank)
                local(parameter).copy_(files.rows(_PREFIX + name.replace(".default.", "."), rows))
        for name, layer in lora.layers(model).items():
            a_RI, b_OR = (files.whole(f"{_PREFIX}{name}.lora_{side}.weight") for side in "AB")
            weight = layer.get_base_layer().weight
            local(weight).sub_(_delta(layer, a_RI, b_OR[rows_of(weight.shape[0], rank)], local(weight)))


def _begin(model: PreTrainedModel, rank: Rank, seed: int) -> None:
    """Draw as peft does when it makes its layers one after the other on one process."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for layer in lora.layers(model).values():
            a_RI, b_OR = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            first = nn.Linear(a_RI.shape[1], a_RI.shape[0], bias=False)
            nn.Linear(b_OR.shape[1], b_OR.shape[0], bias=False)
            nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
            local(a_RI).copy_(first.weight[rows_of(a_RI.shape[0], rank)])
            local(b_OR).zero_()


def _delta(layer: Any, a_RI: Tensor, b_OR: Tensor, like: Tensor) -> Tensor:
    return (b_OR.to(like.device) @ a_RI.to(like.device)) * float(layer.scaling["default"])


def whole_adapters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Gather the adapters under the names of peft's files; every rank must call this."""
    return {
        _PREFIX + name.replace(".default.", "."): parameter.full_tensor().detach().cpu()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


@torch.no_grad()
def fold(model: PreTrainedModel, rank: Rank) -> None:
    """Add the adapters to the weights and let only those compute: the policy that a checkpoint of it holds.

    Every rank must call this. The adapters stay where they are, for `unfold`.
    """
    for name, rows in merged(model, whole_adapters(model), rank).items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        base: Any = layer.get_base_layer()
        local(base.weight).copy_(rows)
        layer.forward = base.forward


@torch.no_grad()
def unfold(model: PreTrainedModel, rank: Rank) -> None:
    """Take the adapters out of the weights again, as `initialise` does when it reads a checkpoint with adapters."""
    whole = whole_adapters(model)
    for name, layer in lora.layers(model).items():
        a_RI, b_OR = (whole[f"{_PREFIX}{name}.lora_{side}.weight"] for side in "AB")
        weight = layer.get_base_layer().weight
        local(weight).sub_(_delta(layer, a_RI, b_OR[rows_of(weight.shape[0], rank)], local(weight)))
        del layer.forward


@torch.no_grad()
def merged(model: PreTrainedModel, whole: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    """Return this rank's rows of the weights with adapters in them, under the plain model's names."""
    rows: dict[str, Tensor] = {}
    for name, layer in lora.layers(model).items():
        weight = layer.get_base_layer().weight
        a_RI, b_OR = (whole[f"{_PREFIX}{name}.lora_{side}.weight"] for side in "AB")
        rows[f"{name}.weight"] = local(weight) + _delta(
            layer, a_RI, b_OR[rows_of(weight.shape[0], rank)], local(weight)
        )
    return rows
