"""SGT: where the learner fails a prompt altogether, it imitates the others' verified successes."""

import numpy as np

from hacrl_core.methods.method import Bools, Floats, Method, Tensor, own_group


def credit(rewards_PNG: Floats, valid_PNG: Bools, learner: int) -> tuple[Floats, Floats]:
    """A of own responses over the own group; 1 for a foreign success on a prompt without an own one, else 0."""
    advantages, baseline = own_group(rewards_PNG, valid_PNG, learner)
    solved_PNG = valid_PNG & (rewards_PNG >= 1.0)
    rescue_P = np.logical_not(np.any(solved_PNG[:, learner], axis=1)).reshape(-1)
    foreign_N = np.arange(rewards_PNG.shape[1]) != learner
    rescued = solved_PNG & rescue_P[:, None, None] & foreign_N[None, :, None]
    return np.where(rescued, 1.0, advantages), baseline


def foreign(learner: Tensor, log_s: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """A·log π: the score direction, whatever the ratio."""
    return learner * advantage, learner.detach() * 0 + 1


METHOD = Method(
    name="sgt",
    version=1,
    equation="log π(y) for foreign successes on prompts where no own response succeeds; own responses as alone",
    source="Success-gated transfer, in Mutual Reinforcement Learning, arXiv 2605.07244",
    reading="The paper's equations were not at hand, its abstract was: outcome-level, a rescue-set score direction "
    "toward verified peer successes. The rescue set is read as prompts without an own success, the weight as 1.",
    credit=credit,
    foreign=foreign,
)
