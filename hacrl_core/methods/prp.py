"""PRP: the others' rollouts join the group, corrected by the density ratio."""

from hacrl_core.methods.method import Method, Tensor, pooled

LOW, HIGH = 0.2, 0.28


def foreign(learner: Tensor, log_s: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """min(s·A, clip(s, 1 − 0.2, 1 + 0.28)·A) with s the ratio to the sampler."""
    s = log_s.exp()
    objective = (s * advantage).minimum(s.clamp(1 - LOW, 1 + HIGH) * advantage)
    now = s.detach()
    clipped = ((now < 1 - LOW) & (advantage < 0)) | ((now > 1 + HIGH) & (advantage > 0))
    return objective, now * (~clipped).to(now.dtype)


METHOD = Method(
    name="prp",
    version=1,
    equation="min(s·A, clip(s, 0.8, 1.28)·A), A over the pooled group",
    source="Peer rollout pooling, in Mutual Reinforcement Learning, arXiv 2605.07244",
    reading="The paper's equations were not at hand, its abstract was: data-level sharing on GRPO that pays "
    "density-ratio variance. Read as GRPO's clip, at the usual 0.2 and 0.28, on the ratio to the sampler.",
    credit=pooled,
    foreign=foreign,
)
