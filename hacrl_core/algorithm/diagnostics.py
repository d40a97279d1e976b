"""Diagnostics: the numbers that say whether sharing works, as metrics ready for a manifest.

docs/algorithm.md explains each of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hacrl_core.algorithm.capability import OMEGA_MAX, gradient_omega
from hacrl_core.algorithm.checks import as_floats
from hacrl_core.algorithm.hacpo import Terms, sequence_mean
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.errors import AlgorithmError


@dataclass(frozen=True)
class RowStats:
    """Per-row numbers of one or more updates, detached.

    Shares (below, above) are over tokens where ratios are per token.
    """

    is_own: Tensor
    count: Tensor  # how many identical responses the row stands for
    ratio: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    below: Tensor
    above: Tensor
    weight: Tensor
    kl: Tensor  # NaN where there is no reference

    @classmethod
    def of(
        cls,
        terms: Terms,
        *,
        is_own: Tensor,
        count: Tensor | None = None,
        kl: Tensor | None = None,
        mask_BT: Tensor | None = None,
    ) -> Self:
        """Return the statistics of a minibatch; with ``mask_BT`` its terms are per token, and a row sums them up."""
        count = torch.ones(len(is_own), dtype=terms.ratio.dtype, device=is_own.device) if count is None else count
        kl = torch.full_like(count, torch.nan) if kl is None else kl
        ratio, weight = terms.ratio, terms.weight
        if mask_BT is None:
            below, above = terms.below.to(ratio.dtype), terms.above.to(ratio.dtype)
            return cls(is_own, count, ratio, ratio, ratio, below, above, weight, kl)
        return cls(
            is_own=is_own,
            count=count,
            ratio=sequence_mean(ratio, mask_BT),
            ratio_min=torch.where(mask_BT, ratio, torch.inf).amin(dim=1),
            ratio_max=torch.where(mask_BT, ratio, -torch.inf).amax(dim=1),
            below=sequence_mean(terms.below.double(), mask_BT),
            above=sequence_mean(terms.above.double(), mask_BT),
            weight=sequence_mean(weight, mask_BT),
            kl=kl,
        )

    def as_dict(self) -> dict[str, Tensor]:
        """Return the columns by name, as the trainer passes them on."""
        return dict(vars(self))


def summarise(
    rows: Sequence[RowStats | Mapping[str, Tensor | npt.NDArray[np.float64]]],
    *,
    config: HacpoConfig,
    omega_max: float = OMEGA_MAX,
    prefix: str = "update/",
) -> dict[str, float]:
    """Return one learner's metrics of an iteration from the statistics of all its updates; rows weigh by their count.

    ``omega_max`` is the largest ω(sampler, learner) in use, for the bound on a foreign weight. A metric without data is
    left out rather than NaN: a run without foreign responses has no foreign ratio.
    """
    if not rows:
        return {}
    tables: list[Mapping[str, Any]] = [row.as_dict() if isinstance(row, RowStats) else row for row in rows]
    column = {key: np.concatenate([_numbers(table[key]) for table in tables]) for key in RowStats.__dataclass_fields__}
    own = column.pop("is_own") > 0
    metrics = {
        **_ratio_metrics("own", {key: values[own] for key, values in column.items()}),
        **_ratio_metrics("foreign", {key: values[~own] for key, values in column.items()}),
    }
    if not own.all():
        weight, count = column["weight"][~own], column["count"][~own]
        metrics["foreign_inside_fraction"] = 1.0 - metrics["foreign_clip_fraction"]
        metrics["foreign_ess"] = effective_sample_size(weight, count)
        metrics["foreign_ess_fraction"] = metrics["foreign_ess"] / float(count.sum())
        metrics["foreign_weight_max"] = float(weight.max())
        metrics["foreign_weight_bound"] = foreign_weight_bound(omega_max, config)
    measured = own & ~np.isnan(column["kl"])
    if measured.any():
        metrics["kl_to_start"] = float(np.average(column["kl"][measured], weights=column["count"][measured]))
    return {prefix + name: value for name, value in metrics.items()}


def foreign_weight_bound(largest_omega: float, config: HacpoConfig) -> float:
    """Return the largest weight a foreign response's gradient can have, given the largest ω(sampler, learner) in use.

    HACPO's ceiling of 1 on the ratio leaves ω alone. Wherever a `min` is taken instead, a foreign failure that the
    learner likes better than the sampler did is limited by the clamp of the log-ratio only.
    """
    omega = largest_omega if config.capability_in_gradient else 1.0
    if not config.learns_from_others:
        return 0.0
    if config.plug_in is not None:
        return math.exp(config.max_abs_log_ratio) if config.method == "prp" else 1.0
    if config.foreign_treatment == "hacpo" and not config.cross_clip:
        return omega * math.exp((1 + config.alpha) * config.max_abs_log_ratio)
    if config.foreign_treatment == "hacpo" and not config.pessimistic:
        return omega
    return omega * math.exp(config.max_abs_log_ratio)


def _numbers(values: Tensor | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)


def _ratio_metrics(side: str, column: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
    count = column["count"]
    if not count.sum() > 0:
        return {}
    below, above = (float(np.average(column[key], weights=count)) for key in ("below", "above"))
    return {
        f"{side}_ratio_mean": float(np.average(column["ratio"], weights=count)),
        f"{side}_ratio_min": float(column["ratio_min"].min()),
        f"{side}_ratio_max": float(column["ratio_max"].max()),
        f"{side}_clip_fraction": below + above,
        f"{side}_clip_low_fraction": below,
        f"{side}_clip_high_fraction": above,
    }


def effective_sample_size(weight_B: npt.ArrayLike, count_B: npt.ArrayLike | None = None) -> float:
    """(Σw)² / Σw²: how many equally weighted responses the weighted ones are worth; 0 when every weight is 0."""
    weight = as_floats("weights", weight_B, axes="B")
    count = np.ones_like(weight) if count_B is None else as_floats("counts", count_B, axes="B")
    if (weight < 0).any():
        raise AlgorithmError(f"weights: {weight.min()} is negative; pass weights without the advantage's sign")
    largest = weight.max(initial=0.0)
    if largest == 0:
        return 0.0
    scaled = weight / largest  # squares of unclipped weights overflow otherwise
    return float((count * scaled).sum() ** 2 / (count * scaled**2).sum())


def share_without_signal(advantages_PNG: npt.ArrayLike) -> float:
    """Return the share of prompts that teach this learner nothing because all rewards are equal."""
    advantages = as_floats("advantages", advantages_PNG, axes="PNG")
    return float((advantages == 0).all(axis=(1, 2)).mean())


def credit_metrics(
    advantages_PNG: npt.ArrayLike,
    baseline_P: npt.ArrayLike,
    capability_N: npt.ArrayLike,
    agents: Sequence[str],
    *,
    learner: int,
    prefix: str = "credit/",
) -> dict[str, float]:
    """Return one learner's metrics of the credit stage: signal, baseline, capability, ω of the other samplers."""
    omega = gradient_omega(capability_N, learner=learner)
    metrics = {
        "no_signal_share": share_without_signal(advantages_PNG),
        "baseline_mean": float(np.mean(np.asarray(baseline_P, dtype=np.float64))),
        "capability": float(np.asarray(capability_N, dtype=np.float64)[learner]),
    }
    metrics |= {f"omega/{name}": float(omega[i]) for i, name in enumerate(agents) if i != learner}
    return {prefix + name: value for name, value in metrics.items()}


def cosine_of_norms(norm: float, other_norm: float, sum_norm: float) -> float | None:
    """Return the cosine between two gradients from their norms and that of their sum; None where it does not exist.

    |a + b|² = |a|² + |b|² + 2·|a|·|b|·cos: neither gradient has to be kept beside the other.
    """
    if not (norm > 0 and other_norm > 0 and math.isfinite(sum_norm)):
        return None
    cosine = (sum_norm**2 - norm**2 - other_norm**2) / (2 * norm * other_norm)
    return min(1.0, max(-1.0, cosine))
