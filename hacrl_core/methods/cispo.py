"""CISPO with a cap of 1: the ratio weighs the gradient and never stops it."""

from hacrl_core.methods.method import Method, Tensor, pooled

CAP = 1.0


def foreign(learner: Tensor, log_s: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """stopgrad(min(s, 1))·A·log π."""
    weight = log_s.detach().exp().clamp(max=CAP)
    return learner * weight * advantage, weight


METHOD = Method(
    name="cispo",
    version=1,
    equation="stopgrad(min(s, 1))·A·log π",
    source="MiniMax-M1, arXiv 2506.13585 (clipped importance weights, no lower bound)",
    reading="Per response instead of per token: a sampler's token log-probs mean nothing in other tokens. Cap 1.",
    credit=pooled,
    foreign=foreign,
)
