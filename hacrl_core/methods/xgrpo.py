"""XGRPO: the others' rewards change the learner's baseline; their responses are not learned from."""

import numpy as np

from hacrl_core.methods.method import Bools, Floats, Method, pooled


def credit(rewards_PNG: Floats, valid_PNG: Bools, learner: int) -> tuple[Floats, Floats]:
    """The pooled advantage of own responses; 0 for the others'."""
    advantages, baseline = pooled(rewards_PNG, valid_PNG, learner)
    others = np.arange(rewards_PNG.shape[1]) != learner
    advantages[:, others] = 0.0
    return advantages, baseline


METHOD = Method(
    name="xgrpo",
    version=1,
    equation="own responses only; A = (R − mean) / σ over everybody's rewards",
    source="Cross-policy GRPO advantage sharing, in Mutual Reinforcement Learning, arXiv 2605.07244",
    reading="The paper's equations were not at hand, its abstract was: on-policy support stays, scalar baselines "
    "change.",
    credit=credit,
    foreign=None,
)
