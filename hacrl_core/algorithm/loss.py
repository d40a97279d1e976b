"""The loss of HACPO and, by configuration, of its baselines."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hacrl_core.algorithm.checks import require
from hacrl_core.algorithm.clipping import Terms, foreign_terms, own_terms, require_calibrated
from hacrl_core.algorithm.diagnostics import RowStats, summarise
from hacrl_core.algorithm.ratio import log_ratio
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.errors import AlgorithmError


def hacpo_loss(
    learner_mean_logprob_B: Tensor,
    sampler_mean_logprob_B: Any,
    advantage_B: Any,
    is_own_B: Any,
    omega_B: Any,
    *,
    update_index: int,
    config: HacpoConfig,
    rollout_ids: Sequence[str] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss = −mean over the responses of a minibatch (section 4, "Loss"); differentiable in its first argument.

    ``omega_B`` is ω(sampler, learner); it is not read for own responses. ``update_index`` is m, the number of updates already
    made in this iteration. The denominator of an own response is the learner itself at the start of the iteration; so it is for a
    foreign one under ``foreign_treatment: as_own``. Computes in the dtype of the first argument.
    """
    if config.ratio_level != "sequence":
        raise AlgorithmError("ratio_level 'token': mean log-probs do not determine this loss; use make_objective")
    learner = learner_mean_logprob_B

    def like_learner(values: Any, dtype: torch.dtype = learner.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=learner.device)

    sampler, advantage, omega = map(like_learner, (sampler_mean_logprob_B, advantage_B, omega_B))
    is_own = like_learner(is_own_B, torch.bool)
    if (
        learner.ndim != 1
        or len(learner) == 0
        or any(x.shape != learner.shape for x in (sampler, advantage, omega, is_own))
    ):
        shapes = [tuple(x.shape) for x in (learner, sampler, advantage, is_own, omega)]
        raise AlgorithmError(f"loss: shapes {shapes}; all five must have the same single axis, not empty")
    require_finite(
        {"learner log-prob": learner, "sampler log-prob": sampler, "advantage": advantage, "omega": omega}, rollout_ids
    )
    require_shared(is_own, advantage, config, rollout_ids)
    terms, ratio = surrogate(learner, sampler, advantage, is_own, omega, update_index=update_index, config=config)
    stats = RowStats.of(terms, ratio, is_own=is_own, count=torch.ones_like(ratio))
    return -terms.objective.mean(), summarise([stats], config=config, omega_max=_largest_foreign(omega, is_own))


def surrogate(
    learner: Tensor,
    sampler: Tensor,
    advantage: Tensor,
    is_own: Tensor,
    omega: Tensor,
    *,
    update_index: int,
    config: HacpoConfig,
) -> tuple[Terms, Tensor]:
    """Each response's (or token's) term and its detached ratio: own ones by GSPO, foreign ones by HACPO."""
    require_calibrated(config)
    if update_index < 0:
        raise AlgorithmError(f"update_index {update_index}: counts the updates already made, from 0")
    ratio = torch.exp(log_ratio(learner, sampler, config.max_abs_log_ratio))
    # Clamped log-ratios have no gradient, so they must not count as weight either.
    free = (learner.detach() - sampler).abs() <= config.max_abs_log_ratio
    own = own_terms(ratio, advantage, config)
    # An own ratio never enters the foreign branch: a power of it could overflow, and inf times a zero gradient is NaN.
    foreign_ratio = torch.where(is_own, torch.ones_like(ratio), ratio)
    foreign = foreign_terms(foreign_ratio, advantage, omega, config.foreign_lower_bound(update_index), config)
    chosen = Terms(
        objective=torch.where(is_own, own.objective, foreign.objective),
        weight=torch.where(is_own, own.weight, foreign.weight) * free,
        below=torch.where(is_own, own.below, foreign.below),
        above=torch.where(is_own, own.above, foreign.above),
    )
    return chosen, ratio.detach()


def require_finite(tensors: dict[str, Tensor], rollout_ids: Sequence[str] | None) -> None:
    for what, tensor in tensors.items():
        finite = torch.isfinite(tensor.detach())
        if not bool(finite.all()):
            require(what, finite.cpu().numpy(), tensor.detach().cpu().numpy(), "score the response again", rollout_ids)


def require_shared(is_own: Tensor, advantage: Tensor, config: HacpoConfig, rollout_ids: Sequence[str] | None) -> None:
    """Without shared rollouts a foreign response has no term; one with an advantage is a mistake of the caller."""
    if not config.share_rollouts:
        foreign = (~is_own & (advantage != 0)).cpu().numpy()
        remedy = "share_rollouts is false, so only own responses belong in the minibatch"
        require("advantage of a foreign response", ~foreign, advantage.detach().cpu().numpy(), remedy, rollout_ids)


def _largest_foreign(omega: Tensor, is_own: Tensor) -> float:
    foreign = omega[~is_own]
    return float(foreign.max()) if len(foreign) else 0.0
