"""Training runs the code of ``hacrl_core/algorithm/hacpo.py`` and no other: replace a piece of the page, and the step
changes with it.
"""

from dataclasses import replace

import pytest
import torch
from learning_models import random_sequences, tiny_agent

from hacrl_core.algorithm import ObjectiveRows, hacpo, make_objective, preset
from hacrl_core.config.training import UpdateConfig
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.trainer import Trainer

SIZE = 12
SEQUENCES = random_sequences(SIZE, seed=3)
IS_OWN = torch.arange(SIZE) < SIZE // 2
ADVANTAGE = torch.linspace(-1.0, 1.5, SIZE, dtype=torch.float64)[torch.randperm(SIZE, generator=torch.manual_seed(1))]
# Inside and outside both windows, own and foreign: log s of each response before the step.
LOG_RATIO = torch.tensor(
    [1e-4, -2e-4, 9e-4, 0.0, -9e-4, 2e-4, -0.1, -0.5, 0.2, -0.05, -0.3, -0.15], dtype=torch.float64
)


def train(own: float = 1.0, foreign: float = 1.0, **settings):
    """One real step of the trainer on a tiny model; own and foreign advantages are scaled. Returns loss, gradient and
    statistics.
    """
    agent = tiny_agent()
    config = UpdateConfig(learning_rate=1e-3, gradient_norm=1e9)
    now = [torch.from_numpy(row).double() for row in score_sequences(agent, SEQUENCES, token_budget=512)]
    means = torch.stack([row.mean() for row in now])
    rows = ObjectiveRows(
        sampler_mean_logprob_B=means - LOG_RATIO,
        advantage_B=ADVANTAGE * torch.where(IS_OWN, own, foreign),
        is_own_B=IS_OWN,
        omega_B=torch.linspace(0.5, 2.0, SIZE, dtype=torch.float64),
        weight_B=torch.ones(SIZE, dtype=torch.float64),
        total_weight=float(SIZE),
        old_logprobs=[row - shift for row, shift in zip(now, LOG_RATIO, strict=True)],
        reference_logprobs=[row + 0.1 if mine else None for row, mine in zip(now, IS_OWN, strict=True)],
    )
    objective = make_objective(rows, update_index=2, config=preset("hacpo", **settings))
    gradient = Trainer(agent, config).gradient(SEQUENCES, objective)
    step = Trainer(agent, config).step(SEQUENCES, objective)
    return step.loss, gradient, step.stats


@pytest.fixture
def replaced(monkeypatch):
    """Replaces one function of the page by a function of the old one and its arguments, trains, and puts it back."""

    def run(piece, change, **settings):
        original = getattr(hacpo, piece)
        with monkeypatch.context() as patch:
            patch.setattr(hacpo, piece, lambda *args, **kwargs: change(original, *args, **kwargs))
            return train(**settings)

    return run


def same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-7)


def silenced(term, *args):
    terms = term(*args)
    return replace(terms, objective=terms.objective * 0)


def test_the_loss_of_the_minibatch(replaced):
    def tripled(loss, *args, **kwargs):
        value, terms = loss(*args, **kwargs)
        return 3 * value, terms

    loss, gradient, _ = train()
    same(replaced("hacpo_loss", tripled), (3 * loss, 3 * gradient))
    assert gradient.abs().max() > 1e-4


def test_the_terms_of_own_and_foreign_responses(replaced):
    without_own, without_foreign, both = train(own=0.0), train(foreign=0.0), train()
    same(replaced("own_term", silenced), without_own)
    same(replaced("foreign_term", silenced), without_foreign)
    assert not torch.allclose(without_own[1], both[1])
    assert not torch.allclose(without_foreign[1], both[1])
    nothing = replaced("response_terms", lambda terms, *args, **kwargs: silenced(lambda: terms(*args, **kwargs)))
    assert nothing[0] == 0
    assert not nothing[1].any()


def test_the_foreign_window(replaced):
    narrow, wide = train(), train(cross_clip_delta=1.0, stepwise_clip=False)
    assert not torch.allclose(narrow[1], wide[1])
    same(replaced("foreign_window", lambda window, index, config: (0.0, 1.0)), wide)


def test_the_ratio(replaced):
    _, gradient, stats = train()
    _, shifted, moved = replaced("log_ratio", lambda ratio, *args: ratio(*args) - 0.5)
    torch.testing.assert_close(torch.tensor(moved["ratio"]), torch.tensor(stats["ratio"]) * torch.tensor(-0.5).exp())
    assert not torch.allclose(shifted, gradient)
    _, silent, _ = replaced("sequence_mean", lambda mean, values, mask: mean(values.detach(), mask))
    assert not silent.any()


def test_the_kl_term(replaced):
    with_kl, without = train(kl_coefficient=0.5), train()
    assert with_kl[0] > without[0]
    same(replaced("k3", lambda k3, *args: k3(*args) * 0, kl_coefficient=0.5), without)
