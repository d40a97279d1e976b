"""Each method with a file of its own against a slow reference in plain floats that shares no code with it."""

import math

import numpy as np
import pytest
import torch

from hacrl_core.algorithm import hacpo_loss, learner_advantages, preset
from hacrl_core.config.algorithm import PRESETS
from hacrl_core.methods import METHODS
from hacrl_core.methods.page import PAGE

# Two prompts, two agents, four samples; None: the verifier failed. ada (0) has no success on the second prompt.
REWARDS = [
    [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, None, 0.0]],
    [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]],
    [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]],
]
# Mean log-prob under the learner and under the sampler of some foreign responses, and their advantages.
ROWS = [
    (-0.5, -0.6, 1.2),
    (-0.9, -0.3, 0.7),
    (-0.4, -0.9, -1.1),
    (-1.6, -0.4, -0.8),
    (-0.31, -0.3, -0.2),
    (-2.0, -2.1, 0.9),
]


def deviations(values):
    mean = sum(values) / len(values)
    sigma = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean, sigma


def expected_credit(name, learner=0):
    table = []
    for prompt in REWARDS:
        everybody = [r for group in prompt for r in group if r is not None]
        own = [r for r in prompt[learner] if r is not None]
        mean, sigma = deviations(own if name == "sgt" else everybody)
        rows = []
        for agent, group in enumerate(prompt):
            for reward in group:
                if reward is None or (agent != learner and name == "xgrpo"):
                    value = 0.0
                elif agent != learner and name == "sgt":
                    value = 1.0 if reward == 1.0 and 1.0 not in own else 0.0
                else:
                    value = 0.0 if sigma == 0 else (reward - mean) / (sigma + 1e-6)
                rows.append(value)
        table.append(rows)
    return table


@pytest.mark.parametrize("name", METHODS)
def test_credit(name):
    rewards = np.ma.masked_invalid([[[math.nan if r is None else r for r in g] for g in p] for p in REWARDS])
    advantages, _ = learner_advantages(rewards, [0.5, 0.7], learner=0, config=preset(name))
    np.testing.assert_allclose(advantages.reshape(3, -1), expected_credit(name), atol=1e-12)


def objective(name, now, then, a, frozen):
    """The objective of one response; ``frozen`` is the learner's log-prob where no gradient may pass."""
    s, kept = math.exp(now - then), math.exp(frozen - then)
    if name == "raft_foreign":
        return now * max(a, 0.0)
    if name == "topr":
        return now * a if a >= 0 else min(kept, 1.0) * a * now
    if name == "cispo":
        return min(kept, 1.0) * a * now
    if name == "luffy":
        return math.exp(now) / (math.exp(now) + 0.1) * a
    if name == "prp":
        return min(s * a, min(max(s, 0.8), 1.28) * a)
    return now * a if name == "sgt" else 0.0


@pytest.mark.parametrize("name", METHODS)
def test_loss_and_gradient_of_foreign_responses(name):
    """The gradient is compared with differences of the reference, with its frozen parts held."""
    learner = torch.tensor([row[0] for row in ROWS], dtype=torch.float64, requires_grad=True)
    rest = [torch.tensor(column, dtype=torch.float64) for column in list(zip(*ROWS, strict=True))[1:]]
    foreign, ones = torch.zeros(len(ROWS), dtype=torch.bool), torch.full((len(ROWS),), 3.0, dtype=torch.float64)
    loss, terms = hacpo_loss(learner, *rest, foreign, ones, update_index=1, config=preset(name))
    loss.backward()
    wanted = -sum(objective(name, now, then, a, now) for now, then, a in ROWS) / len(ROWS)
    step = 1e-6
    slopes = [
        (objective(name, now + step, then, a, now) - objective(name, now - step, then, a, now)) / (2 * step)
        for now, then, a in ROWS
    ]
    assert loss.item() == pytest.approx(wanted, abs=1e-12)
    np.testing.assert_allclose(learner.grad, [-slope / len(ROWS) for slope in slopes], atol=1e-8)
    np.testing.assert_allclose(
        terms.weight, [slope / a for slope, (_, _, a) in zip(slopes, ROWS, strict=True)], atol=1e-7
    )


@pytest.mark.parametrize("name", METHODS)
def test_own_responses_keep_gspos_term(name):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*ROWS, strict=True)]
    own, omega = torch.ones(len(ROWS), dtype=torch.bool), torch.ones(len(ROWS), dtype=torch.float64)
    losses = [hacpo_loss(*columns, own, omega, update_index=1, config=preset(n))[0] for n in (name, "gspo")]
    assert torch.equal(*losses)


def test_every_preset_but_the_ablations_is_described_and_each_plug_in_counts_in_the_identity():
    assert set(PAGE) | set(METHODS) <= set(PRESETS)
    assert not set(PAGE) & set(METHODS)
    assert {n for n in PRESETS if n not in PAGE and n not in METHODS} == {
        n for n in PRESETS if n.startswith(("without_", "alpha_"))
    }
    assert "method" not in preset("hacpo").identity()
    assert "method" not in preset("naive").credit.identity()
    for name, method in METHODS.items():
        for config in (preset(name), preset(name).credit):
            assert config.identity()["method"] == name
            assert config.identity()["method_version"] == method.version


def test_a_method_that_has_no_use_for_a_setting_refuses_it():
    with pytest.raises(ValueError, match="unknown; use hacpo or one of raft_foreign"):
        preset("hacpo", method="toper")
    with pytest.raises(ValueError, match="leave share_rollouts"):
        preset("topr", foreign_treatment="as_own")
    with pytest.raises(ValueError, match="this config has none"):
        preset("topr", pessimistic=True)


@pytest.mark.parametrize("cap", [1.0, 1.3])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("shared_gspo", {}), ("hacpo_pessimistic", {}), ("hacpo_pessimistic", {"alpha": 0.0}), ("hacpo", {})],
)
def test_failures_beyond_the_cap_teach_nothing(name, changes, cap):
    """max(min(s·A, clip(s)·A), cap·A) for A < 0 in plain floats, times HACPO's damping; the gradient by differences."""
    config = preset(name, foreign_failure_cap=cap, **changes)
    omega, low, high = 0.8, *((1 - 3e-4, 1 + 4e-4) if name == "shared_gspo" else (0.8, 1.0))

    def value(now, then, a, frozen):
        s, kept = math.exp(now - then), math.exp(frozen - then)
        clipped = min(max(s, low), high)
        if name == "hacpo":
            return clipped * min(max(kept, low), high) * omega * a
        term = min(s * a, clipped * a)
        term = max(term, cap * a) if a < 0 else term
        return term if name == "shared_gspo" else term * min(kept, 1.0) ** config.alpha * omega

    for now, then, a in ROWS:
        learner = torch.tensor([now], dtype=torch.float64, requires_grad=True)
        loss, terms = hacpo_loss(learner, [then], [a], [False], [omega], update_index=0, config=config)
        loss.backward()
        assert -loss.item() == pytest.approx(value(now, then, a, now), abs=1e-12)
        slope = (value(now + 1e-6, then, a, now) - value(now - 1e-6, then, a, now)) / 2e-6
        assert -learner.grad.item() == pytest.approx(slope, abs=1e-6)
        assert terms.weight.item() * a == pytest.approx(slope, abs=1e-6)
        assert terms.ratio.item() == pytest.approx(math.exp(now - then))
        if a < 0 and math.exp(now - then) > cap:
            assert (slope, bool(terms.above)) == (0, True)


def test_only_where_foreign_failures_have_a_ratio_can_they_be_capped():
    for name in ("gspo", "topr"):
        with pytest.raises(ValueError, match="foreign_failure_cap 1"):
            preset(name, foreign_failure_cap=1.0)
