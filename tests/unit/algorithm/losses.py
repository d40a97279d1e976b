"""The loss of a minibatch with its metrics, for tests that look at both."""

import torch

from hacrl_core.algorithm import RowStats, hacpo_loss, summarise


def loss_and_metrics(learner, sampler, advantage, is_own, omega, *, config, **settings):
    loss, terms = hacpo_loss(learner, sampler, advantage, is_own, omega, config=config, **settings)
    own, omegas = torch.as_tensor(is_own, dtype=torch.bool), torch.as_tensor(omega, dtype=torch.float64)
    largest = float(omegas[~own].max()) if (~own).any() else 0.0
    return loss, summarise([RowStats.of(terms, is_own=own)], config=config, omega_max=largest)
