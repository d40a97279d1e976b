"""Each method that is a setting, by its name, against its equation in plain floats; gradients by differences."""

import math

import numpy as np
import pytest
import torch

from hacrl_core.algorithm import hacpo_loss, learner_advantages, preset
from hacrl_core.algorithm.calibration import calibrated_config
from hacrl_core.config.algorithm import PRESETS, campaign_overrides
from hacrl_core.methods import METHODS

# Mean log-prob under the learner now and under what its ratio divides by, advantage, is it an own response?
ROWS = [
    (-0.5, -0.5002, 1.1, True),
    (-0.5, -0.5006, 1.1, True),
    (-0.5, -0.4995, -0.9, True),
    (-0.5, -0.49, 0.4, True),
    (-0.5, -0.6, 1.2, False),
    (-0.9, -0.8, 0.7, False),
    (-0.9, -0.3, 0.7, False),
    (-0.4, -0.9, -1.1, False),
    (-0.4, -0.3, -1.1, False),
    (-1.6, -0.4, -0.8, False),
]
OMEGA = 0.75
REWARDS = [[[1, 0, 0, 1], [1, 1, 1, 0]], [[0, 0, 0, 0], [1, 0, 1, 0]], [[1, 1, 1, 1], [1, 1, 1, 1]]]
CAPABILITY = (0.4, 0.5)
ALONE = {"gspo", "gspo_x2", "gspo_xn", "grpo"}
POOLED = {"naive", "naive_sampler_ratio", "shared_gspo", "sapo"}
CAPABLE = {"hacpo", "hacpo_pessimistic", "hacpo_calibrated"}
# GRPO has a ratio per token: below.
SEQUENCES = sorted((ALONE - {"grpo"}) | POOLED | CAPABLE)


def test_no_method_is_left_out():
    ablations = {name for name in PRESETS if name.startswith(("without_", "alpha_"))}
    assert set(PRESETS) - set(METHODS) - ablations == ALONE | POOLED | CAPABLE


def gspo(s, a):
    return min(s * a, min(max(s, 1 - 3e-4), 1 + 4e-4) * a)


def term(name, now, then, a, own, frozen):
    """The objective of one response; ``frozen`` is the learner's log-prob where no gradient may pass."""
    s, kept = math.exp(now - then), math.exp(frozen - then)
    if own or name in POOLED:
        return gspo(s, a)
    # The window is that of the second update: [1 − 0.2 + 0.025, 1]; calibrated, what the test below finds.
    low = CALIBRATED if name == "hacpo_calibrated" else 0.825
    clipped = min(max(s, low), 1.0)
    if name == "hacpo_pessimistic":
        return min(s * a, clipped * a) * min(kept, 1.0) * OMEGA
    return clipped * min(max(kept, low), 1.0) * OMEGA * a


# Half of the six foreign rows inside: the third largest ratio that is not above 1 is e^-0.6, met one step up.
CALIBRATED = math.exp(-0.6)


def chosen(name):
    if name != "hacpo_calibrated":
        return preset(name)
    foreign = [row for row in ROWS if not row[3]]
    found = calibrated_config(preset(name), [r[0] for r in foreign], [r[1] for r in foreign], [1] * len(foreign))
    assert 1 - found.cross_clip_delta + 0.025 == pytest.approx(CALIBRATED, rel=1e-5)
    return found.model_copy(update={"cross_clip_delta": 1 - CALIBRATED * (1 - 1e-9) + 0.025})


@pytest.mark.parametrize("name", SEQUENCES)
def test_terms(name):
    """Naive and SAPO divide by the learner's own log-prob of before; the objective puts it into the column."""
    rows = [row for row in ROWS if row[3] or name not in ALONE]
    learner = torch.tensor([row[0] for row in rows], dtype=torch.float64, requires_grad=True)
    columns = [[row[i] for row in rows] for i in (1, 2, 3)]
    loss, _ = hacpo_loss(learner, *columns, [OMEGA] * len(rows), update_index=1, config=chosen(name))
    loss.backward()
    values = [term(name, *row, row[0]) for row in rows]
    assert -loss.item() == pytest.approx(sum(values) / len(rows), abs=1e-7)
    for (now, then, a, own), slope in zip(rows, learner.grad, strict=True):
        up, down = (term(name, now + e, then, a, own, now) for e in (1e-7, -1e-7))
        # At the very edge of a window the two sides differ; the response that sets a calibrated one is there.
        if name != "hacpo_calibrated" or math.exp(now - then) != pytest.approx(CALIBRATED):
            assert -slope.item() * len(rows) == pytest.approx((up - down) / 2e-7, abs=1e-6)


def test_grpo_has_a_ratio_per_token_and_clips_of_its_own():
    now = [[-0.5, -0.2, -0.9], [-0.4, -1.2, 0.0]]
    then = [[-0.8, -0.2, -0.6], [-0.4, -0.9, 0.0]]
    mask, advantages = [[True, True, True], [True, True, False]], [1.3, -0.7]

    def value(now):
        total = 0.0
        for row, before, kept, a in zip(now, then, mask, advantages, strict=True):
            ratios = [math.exp(x - y) for x, y, k in zip(row, before, kept, strict=True) if k]
            total += sum(min(s * a, min(max(s, 0.8), 1.28) * a) for s in ratios) / len(ratios)
        return total / 2

    learner = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    kept = torch.tensor(mask)
    each = [[a] * 3 for a in advantages]
    own, omega = [[True] * 3] * 2, [[1.0] * 3] * 2
    loss, _ = hacpo_loss(learner, then, each, own, omega, update_index=1, config=preset("grpo"), mask_BT=kept)
    loss.backward()
    assert -loss.item() == pytest.approx(value(now), abs=1e-12)
    for r, t in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        moved = [[list(row) for row in now] for _ in range(2)]
        moved[0][r][t] += 1e-6
        moved[1][r][t] -= 1e-6
        slope = (value(moved[0]) - value(moved[1])) / 2e-6
        assert -learner.grad[r, t].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("name", sorted(ALONE | POOLED | CAPABLE))
def test_credit(name):
    """Alone: over the own group. Pooled: over everybody. HACPO: everybody on the learner's scale, σ of raw rewards."""
    given = [prompt[:1] for prompt in REWARDS] if name in ALONE else REWARDS
    agents = len(given[0])
    found, _ = learner_advantages(np.ma.array(given, dtype=float), CAPABILITY[:agents], learner=0, config=preset(name))
    for prompt, advantages in zip(given, found, strict=True):
        everybody = [float(r) for group in prompt for r in group]
        mean = sum(everybody) / len(everybody)
        sigma = math.sqrt(sum((r - mean) ** 2 for r in everybody) / (len(everybody) - 1))
        if name in CAPABLE:
            scales = [CAPABILITY[0] / of for of in CAPABILITY]
            mean = sum(scale * r for scale, group in zip(scales, prompt, strict=True) for r in group) / len(everybody)
        for r, advantage in zip(everybody, advantages.reshape(-1), strict=True):
            assert advantage == pytest.approx((r - mean) / (sigma + 1e-6) if sigma else 0.0, abs=1e-12)


def test_gspo_times_n_is_gspo_with_more_samples():
    assert preset("gspo_x2") == preset("gspo_xn") == preset("gspo")
    assert campaign_overrides("gspo_x2", 3).samples_per_prompt == 2
    assert campaign_overrides("gspo_xn", 3).samples_per_prompt == 3
