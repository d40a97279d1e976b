"""Ratio: how likely the learner finds a response now, against whoever wrote it then. One number per response."""

import torch
from torch import Tensor


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the response tokens of each row, summed in float64: the sum must not depend on padding or batch composition."""
    kept = torch.where(mask_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))
    return kept.sum(dim=1, dtype=torch.float64) / mask_BT.sum(dim=1)


def log_ratio(learner_logprob: Tensor, sampler_logprob: Tensor, max_abs_log_ratio: float) -> Tensor:
    """log s = mean_logp(learner now) − mean_logp(sampler then), clamped (section 4, "Ratio").

    Each mean is over its own agent's tokens, so agents with different tokenizers compare per-token averages. Where the clamp
    binds the gradient is zero. Both arguments the same number gives exactly 0, hence a ratio of exactly 1.
    """
    return torch.clamp(learner_logprob - sampler_logprob, -max_abs_log_ratio, max_abs_log_ratio)


def k3(log_probs: Tensor, reference_log_probs: Tensor, max_abs_log_ratio: float) -> Tensor:
    """Per-token k3 estimate of KL(learner ‖ reference): r − log r − 1 with r = reference / learner; never negative."""
    log_r = torch.clamp(reference_log_probs - log_probs, -max_abs_log_ratio, max_abs_log_ratio)
    return torch.expm1(log_r) - log_r
