"""Diagnostics by hand, and the arrangement of rows into groups."""

import math

import numpy as np
import pytest
import torch
from losses import loss_and_metrics

from hacrl_core.algorithm import (
    HacpoConfig,
    arrange_groups,
    capability_ratio,
    cosine_of_norms,
    credit_metrics,
    effective_sample_size,
    foreign_weight_bound,
    group_advantages,
    hacpo_loss,
    learner_advantages,
    preset,
    share_without_signal,
    smoothed_capability,
    summarise,
)
from hacrl_core.algorithm.hacpo import k3
from hacrl_core.errors import AlgorithmError


def test_metrics_of_a_minibatch_by_hand():
    ratio = [1.0, 1.1, 0.9, 0.5, 1.2]
    _, stats = loss_and_metrics(
        torch.tensor(ratio, dtype=torch.float64).log(),
        torch.zeros(5),
        [1.0, 1.0, 1.0, 1.0, -1.0],
        [True, True, False, False, False],
        [1.0, 1.0, 2.0, 2.0, 0.5],
        update_index=0,
        config=HacpoConfig(),
    )
    wanted = {
        "own_ratio_mean": 1.05,
        "own_ratio_min": 1.0,
        "own_ratio_max": 1.1,
        "own_clip_fraction": 0.5,
        "own_clip_low_fraction": 0.0,
        "own_clip_high_fraction": 0.5,
        "foreign_ratio_mean": 2.6 / 3,
        "foreign_ratio_min": 0.5,
        "foreign_ratio_max": 1.2,
        "foreign_clip_fraction": 2 / 3,
        "foreign_clip_low_fraction": 1 / 3,
        "foreign_clip_high_fraction": 1 / 3,
        "foreign_inside_fraction": 1 / 3,
        "foreign_ess": 1.0,
        "foreign_ess_fraction": 1 / 3,
        "foreign_weight_max": 0.9 * 0.9 * 2,
        "foreign_weight_bound": 2.0,
    }
    assert stats == pytest.approx({f"update/{name}": value for name, value in wanted.items()})
    assert all(type(value) is float for value in stats.values())


def test_nothing_foreign_leaves_foreign_metrics_out():
    _, stats = loss_and_metrics(
        torch.zeros(2), torch.zeros(2), [1, -1], [True, True], [1, 1], update_index=0, config=HacpoConfig()
    )
    assert not any("foreign" in name for name in stats)
    assert summarise([], config=HacpoConfig()) == {}


@pytest.mark.parametrize(
    ("method", "bound"),
    [
        ("hacpo", 4.0),
        ("without_capability_gradient", 1.0),
        ("gspo", 0.0),
        ("without_clipping", 4 * math.exp(20)),
        ("naive", math.exp(10)),
        ("hacpo_pessimistic", 4 * math.exp(10)),
    ],
)
def test_bound_on_a_foreign_weight(method, bound):
    assert foreign_weight_bound(4.0, preset(method)) == pytest.approx(bound)


def test_effective_sample_size():
    assert effective_sample_size(np.ones(7)) == pytest.approx(7)
    assert effective_sample_size([1.0, 0.0, 0.0]) == pytest.approx(1)
    assert effective_sample_size([0.0, 0.0]) == 0.0
    assert effective_sample_size([2.0, 1.0], [3.0, 2.0]) == pytest.approx(effective_sample_size([2.0] * 3 + [1.0] * 2))
    assert effective_sample_size([1e200, 1e200]) == pytest.approx(2)
    with pytest.raises(AlgorithmError, match="negative"):
        effective_sample_size([-1.0])


def test_the_cosine_of_two_gradients_from_three_norms():
    a, b = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([2.0, 0.0, 1.0])

    def cosine(a, b):
        return cosine_of_norms(float(a.norm()), float(b.norm()), float((a + b).norm()))

    assert cosine(a, b) == pytest.approx(4 / (3 * math.sqrt(5)))
    assert cosine(a, -a) == -1
    assert cosine(a, 2 * a) == pytest.approx(1)
    assert cosine(a, torch.zeros(3)) is None
    assert cosine(a, torch.full((3,), math.nan)) is None


def test_k3_is_an_unbiased_nonnegative_kl():
    logits, other = (
        torch.tensor([[0.3, -1.0, 0.8]], dtype=torch.float64),
        torch.tensor([[0.0, 0.5, 0.1]], dtype=torch.float64),
    )
    p, q = logits.log_softmax(-1), other.log_softmax(-1)
    estimate = k3(p, q, 10.0)
    assert (estimate >= 0).all()
    assert float((p.exp() * estimate).sum()) == pytest.approx(float((p.exp() * (p - q)).sum()))


def test_credit_metrics():
    rewards = np.array([[[1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    capability = np.array([0.25, 0.5])
    advantages, baseline = group_advantages(rewards, capability, learner=0)
    metrics = credit_metrics(advantages, baseline, capability, ["alice", "bob"], learner=0)
    assert metrics == pytest.approx(
        {
            "credit/no_signal_share": 0.5,
            "credit/baseline_mean": 0.25,
            "credit/capability": 0.25,
            "credit/omega/bob": 2.0,
        }
    )
    assert share_without_signal(np.zeros((3, 1, 2))) == 1.0


def groups(**changes):
    fields = {
        "rollout_ids": ["a0", "b0", "a1", "b1"],
        "agent_ids": ["alice", "bob", "alice", "bob"],
        "prompt_ids": ["p", "p", "p", "p"],
        "rewards": [1.0, 0.0, None, 1.0],
        "agents": ["alice", "bob"],
    }
    return arrange_groups(**(fields | changes))


def test_rows_become_groups_and_lead_back():
    arranged = groups()
    assert arranged.rewards_PNG.shape == (1, 2, 2)
    assert arranged.rollout_ids_PNG.tolist() == [[["a0", "a1"], ["b0", "b1"]]]
    assert arranged.row_PNG.tolist() == [[[0, 2], [1, 3]]]
    np.testing.assert_allclose(arranged.mean_rewards(), [1.0, 0.5])
    assert np.isnan(groups(rewards=[None, 0.0, None, 1.0]).mean_rewards()[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agents": ["alice", "bob", "carol"]}, "prompt 'p': sampler 'carol' is missing"),
        ({"agents": ["alice"]}, "rollout b0: agent 'bob' is not one of the samplers"),
        (
            {"agent_ids": ["alice", "bob", "bob", "bob"]},
            "agent 'alice' has 1 responses where others have 3 .*rollout a0",
        ),
        ({"rewards": [1.0, math.nan, None, 1.0]}, "reward: nan at rollout b0"),
        ({"rollout_ids": ["a0", "b0", "a0", "b1"]}, "rollout a0 appears twice"),
        ({"rewards": [1.0]}, "different lengths"),
    ],
)
def test_groups_with_holes_are_refused_by_name(changes, message):
    with pytest.raises(AlgorithmError, match=message):
        groups(**changes)


def test_bad_numbers_are_refused():
    rewards, capability = np.array([[[1.0, math.nan], [0.0, 1.0]]]), [0.5, 0.5]
    with pytest.raises(AlgorithmError, match=r"reward: nan at position \(0, 0, 1\)"):
        group_advantages(rewards, capability, learner=0)
    with pytest.raises(AlgorithmError, match="reward: nan at rollout a1; verify it again"):
        group_advantages(rewards, capability, learner=0, rollout_ids_PNG=[[["a0", "a1"], ["b0", "b1"]]])
    group_advantages(np.ma.masked_invalid(rewards), capability, learner=0)
    with pytest.raises(AlgorithmError, match="every agent must answer every prompt the same number of times"):
        group_advantages([[[1.0, 0.0], [1.0]]], capability, learner=0)
    with pytest.raises(AlgorithmError, match="a sampler is missing"):
        group_advantages(np.ones((1, 3, 2)), capability, learner=0)
    with pytest.raises(AlgorithmError, match="without a measured iteration"):
        group_advantages(np.ones((1, 2, 2)), [0.5, math.nan], learner=0)
    with pytest.raises(AlgorithmError, match="learner 2: there are 2 agents"):
        group_advantages(np.ones((1, 2, 2)), capability, learner=2)
    with pytest.raises(AlgorithmError, match="learner 5"):
        learner_advantages(np.ones((1, 2, 2)), capability, learner=5, config=preset("gspo"))
    with pytest.raises(AlgorithmError, match="window 0"):
        smoothed_capability([[0.5]], 0)
    with pytest.raises(AlgorithmError, match="is empty"):
        smoothed_capability(np.zeros((0, 2)), 5)
    with pytest.raises(AlgorithmError, match="infinite"):
        smoothed_capability([[math.inf]], 5)
    with pytest.raises(AlgorithmError, match="not a finite capability"):
        capability_ratio(0.5, math.nan)


def test_the_loss_refuses_bad_rows():
    fine = [torch.zeros(2), torch.zeros(2), [1.0, 1.0], [True, False], [1.0, 1.0]]
    for place, name in enumerate(["learner log-prob", "sampler log-prob", "advantage", None, "omega"]):
        if name is None:
            continue
        rows = list(fine)
        rows[place] = torch.tensor([0.0, math.nan])
        with pytest.raises(AlgorithmError, match=f"{name}: nan at rollout r1"):
            hacpo_loss(*rows, update_index=0, config=HacpoConfig(), rollout_ids=["r0", "r1"])
    with pytest.raises(AlgorithmError, match="same single axis"):
        hacpo_loss(*fine[:4], [1.0], update_index=0, config=HacpoConfig())
    with pytest.raises(AlgorithmError, match="not empty"):
        hacpo_loss(*[torch.zeros(0)] * 5, update_index=0, config=HacpoConfig())
    with pytest.raises(AlgorithmError, match="use make_objective"):
        hacpo_loss(*fine, update_index=0, config=preset("grpo"))
    with pytest.raises(AlgorithmError, match="share_rollouts is false"):
        hacpo_loss(*fine, update_index=0, config=preset("gspo"))
    with pytest.raises(AlgorithmError, match="update_index -1"):
        hacpo_loss(*fine, update_index=-1, config=HacpoConfig())
