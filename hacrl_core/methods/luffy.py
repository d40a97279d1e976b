"""LUFFY's policy shaping: unlikely tokens of a teacher teach more than a plain ratio would let them."""

from hacrl_core.methods.method import Method, Tensor, pooled

GAMMA = 0.1


def foreign(learner: Tensor, log_s: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """f(π)·A with f(x) = x / (x + γ), whose slope by log π is γ·π / (π + γ)²."""
    probability = learner.exp()
    now = probability.detach()
    return probability / (probability + GAMMA) * advantage, GAMMA * now / (now + GAMMA) ** 2


METHOD = Method(
    name="luffy",
    version=1,
    equation="f(π)·A, f(x) = x / (x + 0.1)",
    source="Learning to reason under off-policy guidance, arXiv 2504.14945: f(x) = x / (x + γ), teacher's prob. as 1",
    reading="π is exp of the response's mean log-prob instead of a token's: one term per response, as in all methods.",
    credit=pooled,
    foreign=foreign,
)
