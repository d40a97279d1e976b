"""TOPR: successes are imitated, failures are pushed away only as far as the learner still finds them likely."""

from hacrl_core.methods.method import Method, Tensor, pooled


def foreign(learner: Tensor, log_s: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """A·log π for A ≥ 0, stopgrad(min(s, 1))·A·log π below."""
    good = (advantage >= 0).to(learner.dtype)
    weight = good + (1 - good) * log_s.detach().exp().clamp(max=1.0)
    return learner * weight * advantage, weight


METHOD = Method(
    name="topr",
    version=1,
    equation="A·log π for A ≥ 0; stopgrad(clip(s, 0, 1))·A·log π for A < 0",
    source="Tapered off-policy REINFORCE, arXiv 2503.14286: weight 1 above, the ratio truncated to [0, 1] below",
    reading="The paper's ratio is of whole sequences; s is the per-token mean of all methods here. R is A, pooled.",
    credit=pooled,
    foreign=foreign,
)
