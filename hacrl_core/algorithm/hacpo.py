"""HACPO on one page: what a learner maximises, from log-probs and advantages to the loss of a minibatch.

Read top to bottom: the ratio of a response, the term of an own response, the window and the term of a foreign one, the
loss. This is the code that trains: `objective.make_objective` hands `hacpo_loss` the rows of a minibatch, and the
trainer backpropagates what it returns. Advantages are computed before, in `advantage`; docs/algorithm.md explains each
quantity and every baseline, which are settings of the same code.

Paper: arXiv 2603.02604. Its symbols: s the ratio, A the advantage, ω the capability ratio (eq. 8), δ and δ_step the
window, α the exponent, m the number of updates already made in this iteration. Tensors name their axes: B responses, T
tokens. Those that name none have one entry per response, or one per token where ratios are per token (GRPO).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from hacrl_core.algorithm.checks import require_calibrated, require_loss_inputs
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.methods import Method

# A ratio above 1 would let a foreign response outweigh an own one.
FOREIGN_CEILING = 1.0


@dataclass(frozen=True)
class Terms:
    """What each response (or token) adds to the objective. Everything but ``objective`` is detached."""

    objective: Tensor  # to be maximised
    weight: Tensor  # gradient of the objective by the log-prob, divided by the advantage; 0 where clipped
    ratio: Tensor
    below: Tensor  # clipped at the lower bound
    above: Tensor  # clipped at the upper bound


# -------------------- Ratio -----------------------------------------------------------------------


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return each row's mean over its response tokens, summed in float64 so that padding and batch do not change it."""
    kept_BT = torch.where(mask_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))
    return kept_BT.sum(dim=1, dtype=torch.float64) / mask_BT.sum(dim=1)


def log_ratio(learner: Tensor, sampler: Tensor, max_abs_log_ratio: float) -> Tensor:
    """log s = mean log-prob under the learner now − mean log-prob under the sampler then, clamped.

    Each mean is over its own agent's tokens, so agents with different tokenizers compare per-token averages;
    `length_factors` says what else may be compared. Where the clamp binds the gradient is zero. Equal arguments give
    exactly 0, hence a ratio of exactly 1.
    """
    return torch.clamp(learner - sampler, -max_abs_log_ratio, max_abs_log_ratio)


def length_factors(
    learner_tokens: int, sampler_tokens: int, length: Literal["own", "sampler", "learner"]
) -> tuple[float, float]:
    """Return what the learner's and the sampler's mean log-prob of a response are multiplied with before `log_ratio`.

    ``own`` leaves both means as they are. The other two divide both *sums* by one length, as the paper's formula
    prints it: the number of tokens that the response has for its sampler, or for the learner.
    """
    if length == "sampler":
        return learner_tokens / sampler_tokens, 1.0
    if length == "learner":
        return 1.0, sampler_tokens / learner_tokens
    return 1.0, 1.0


# -------------------- Own responses: GSPO ---------------------------------------------------------


def own_term(ratio: Tensor, advantage: Tensor, config: HacpoConfig) -> Terms:
    """min(s·A, clip(s, 1 − low, 1 + high)·A).

    The `min` clips only what would move further the way the advantage points.
    """
    low = 1.0 - config.self_clip_low
    high = 1.0 + config.self_clip_high
    objective = torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage)
    now = ratio.detach()
    below = (now < low) & (advantage < 0)
    above = (now > high) & (advantage > 0)
    return Terms(objective, now * ~(below | above), now, below, above)


# -------------------- Foreign responses: HACPO ----------------------------------------------------


def foreign_window(update_index: int, config: HacpoConfig) -> tuple[float, float]:
    """[min(1, 1 − δ + m·δ_step), 1]: the interval a foreign ratio is clipped to.

    It narrows from below with every update of the iteration, as the learner leaves the policy it was compared with.
    """
    step = config.cross_clip_step if config.stepwise_clip else 0.0
    low = min(FOREIGN_CEILING, 1.0 - config.cross_clip_delta + update_index * step)
    return low, FOREIGN_CEILING


def foreign_term(
    ratio: Tensor, advantage: Tensor, omega: Tensor, window: tuple[float, float], config: HacpoConfig
) -> Terms:
    """clip(s, window) · stopgrad(clip(s, window))^α · ω(sampler, learner) · A.

    There is no `min`: outside the window a response has no gradient. ``pessimistic`` (an extension, not of the paper)
    is min(s·A, clip(s, window)·A) · stopgrad(min(s, 1))^α · ω. Both readings of "naive" sharing take GSPO's own term.
    """
    if config.foreign_failure_cap is not None:
        return _capped_failures(config.foreign_failure_cap, ratio, advantage, omega, window, config)
    if not config.capability_in_gradient:
        omega = torch.ones_like(omega)
    if config.foreign_treatment != "hacpo":
        own = own_term(ratio, advantage, config)
        return Terms(own.objective * omega, own.weight * omega, own.ratio, own.below, own.above)
    now = ratio.detach()
    if not config.cross_clip:
        damping = now**config.alpha * omega
        nowhere = torch.zeros_like(now, dtype=torch.bool)
        return Terms(ratio * damping * advantage, now * damping, now, nowhere, nowhere)
    low, high = window
    clipped = torch.clamp(ratio, low, high)
    below = now < low
    above = now > high
    if config.pessimistic:
        below = below & (advantage < 0)
        above = above & (advantage > 0)
        damping = torch.clamp(now, max=high) ** config.alpha * omega
        objective = torch.minimum(ratio * advantage, clipped * advantage) * damping
    else:
        damping = clipped.detach() ** config.alpha * omega
        objective = clipped * damping * advantage
    return Terms(objective, now * damping * ~(below | above), now, below, above)


def _capped_failures(
    cap: float, ratio: Tensor, advantage: Tensor, omega: Tensor, window: tuple[float, float], config: HacpoConfig
) -> Terms:
    """The foreign term with min(s, cap) in place of s where A < 0: beyond the cap a failure has no gradient."""
    far = (advantage < 0) & (ratio.detach() > cap)
    capped = torch.where(advantage < 0, torch.clamp(ratio, max=cap), ratio)
    free = config.model_copy(update={"foreign_failure_cap": None})
    terms = foreign_term(capped, advantage, omega, window, free)
    return Terms(terms.objective, terms.weight * ~far, ratio.detach(), terms.below, terms.above | far)


def plug_in_term(method: Method, learner: Tensor, sampler: Tensor, advantage: Tensor, config: HacpoConfig) -> Terms:
    """The term of a method with a file of its own in `hacrl_core/methods`; ω plays no part in any of them."""
    log_s = log_ratio(learner, sampler, config.max_abs_log_ratio)
    now = log_s.detach().exp()
    if method.foreign is None:
        nothing = torch.zeros_like(now)
        return Terms(learner * 0, nothing, now, torch.ones_like(now, dtype=torch.bool), nothing.bool())
    objective, weight = method.foreign(learner, log_s, advantage)
    # Without weight a response teaches nothing, as if clipped at the end where its ratio lies.
    return Terms(objective, weight, now, (weight == 0) & (now < 1), (weight == 0) & (now >= 1))


# -------------------- The loss of a minibatch -----------------------------------------------------


def response_terms(
    learner: Tensor,
    sampler: Tensor,
    advantage: Tensor,
    is_own: Tensor,
    omega: Tensor,
    *,
    update_index: int,
    config: HacpoConfig,
) -> Terms:
    """Return the term of every response (or token): own ones by GSPO, foreign ones by HACPO or another method."""
    ratio = torch.exp(log_ratio(learner, sampler, config.max_abs_log_ratio))
    own = own_term(ratio, advantage, config)
    # An own ratio never enters the foreign branch: a power of it could overflow, and inf times a zero gradient is NaN.
    foreign_ratio = torch.where(is_own, torch.ones_like(ratio), ratio)
    if config.plug_in is None:
        foreign = foreign_term(foreign_ratio, advantage, omega, foreign_window(update_index, config), config)
    else:
        foreign = plug_in_term(config.plug_in, learner, sampler, advantage, config)
    chosen = {
        field.name: torch.where(is_own, getattr(own, field.name), getattr(foreign, field.name))
        for field in fields(Terms)
    }
    # A clamped log-ratio has no gradient, so it counts no weight either.
    free = (learner.detach() - sampler).abs() <= config.max_abs_log_ratio
    chosen["weight"] = chosen["weight"] * free
    return Terms(**chosen)


def k3(logprobs: Tensor, reference_logprobs: Tensor, max_abs_log_ratio: float) -> Tensor:
    """r − log r − 1 with r = start / learner: the k3 estimate of KL(learner ‖ start) per token, never negative."""
    log_r = torch.clamp(reference_logprobs - logprobs, -max_abs_log_ratio, max_abs_log_ratio)
    return torch.expm1(log_r) - log_r


def hacpo_loss(
    learner: Tensor,
    sampler: Any,
    advantage: Any,
    is_own: Any,
    omega: Any,
    *,
    update_index: int,
    config: HacpoConfig,
    mask_BT: Tensor | None = None,
    penalty_B: Tensor | None = None,
    weight_B: Tensor | None = None,
    total_weight: float | None = None,
    rollout_ids: Sequence[str] | None = None,
    checked: bool = False,
) -> tuple[Tensor, Terms]:
    """Loss = −Σ weight·(term − penalty) / total weight; by default −mean over the responses of the minibatch.

    ``learner`` and ``sampler`` hold mean log-probs [B]; with ``mask_BT`` log-probs per token [B, T], and the term of a
    response is the mean over its tokens. The sampler of an own response is the learner itself at the start of the
    iteration. ``omega`` is ω(sampler, learner) and is not read for own responses. ``update_index`` is m. ``penalty_B``
    is the KL term of each response, ``weight_B`` how many identical responses it stands for, and ``total_weight`` those
    of the whole minibatch, so that the losses of its pieces add up. ``checked``: the caller has already
    refused numbers that are not finite; to ask for them here would make a GPU wait.

    Returns the loss, differentiable in ``learner`` and in its dtype, and the terms for the diagnostics.
    """
    require_calibrated(config)
    sampler = _like(learner, sampler)
    advantage = _like(learner, advantage)
    omega = _like(learner, omega)
    is_own = torch.as_tensor(is_own, dtype=torch.bool, device=learner.device)
    numbers = {"learner log-prob": learner, "sampler log-prob": sampler, "advantage": advantage, "omega": omega}
    require_loss_inputs(numbers, is_own, mask_BT, update_index, config, rollout_ids, checked=checked)
    terms = response_terms(learner, sampler, advantage, is_own, omega, update_index=update_index, config=config)
    value_B = terms.objective if mask_BT is None else sequence_mean(terms.objective, mask_BT)
    if penalty_B is not None:
        value_B = value_B - penalty_B
    if weight_B is None:
        weight_B = torch.ones_like(value_B)
    if total_weight is None:
        total_weight = float(weight_B.sum())
    return -(weight_B * value_B).sum() / total_weight, terms


def _like(learner: Tensor, values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=learner.dtype, device=learner.device)
