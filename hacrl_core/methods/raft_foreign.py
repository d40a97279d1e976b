"""RAFT for foreign responses: imitate every success of the others, ignore their failures."""

from hacrl_core.methods.method import Method, Tensor, pooled


def foreign(learner: Tensor, log_s: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """max(A, 0)·log π: the weight is 1 whatever the ratio."""
    good = (advantage > 0).to(learner.dtype)
    return learner * good * advantage, good


METHOD = Method(
    name="raft_foreign",
    version=1,
    equation="max(A, 0)·log π(y)",
    source="RAFT, arXiv 2304.06767: fine-tuning on what the reward accepts; here on the others' responses only",
    reading="The control for shared_gspo: its successes without the ratio, without its failures. A is the pooled one.",
    credit=pooled,
    foreign=foreign,
)
