"""The functions against an independent reference's numbers, in float32 and float64."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hacrl_core.algorithm import HacpoConfig, gradient_omega, group_advantages, hacpo_loss, smoothed_capability

CASES = json.loads((Path(__file__).resolve().parents[2] / "golden" / "hacpo_cases.json").read_text())
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])


@each_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-10)])
def test_capability_and_advantages(case, dtype, tolerance):
    near = {"rtol": tolerance, "atol": tolerance}
    capability = smoothed_capability(np.array(case["mean_reward_history"], dtype=dtype), case["window"])
    np.testing.assert_allclose(capability, case["expected_capability"], **near)
    advantages, baseline = group_advantages(np.array(case["rewards"], dtype=dtype), capability, learner=case["learner"])
    np.testing.assert_allclose(baseline, case["expected_baseline"], **near)
    np.testing.assert_allclose(advantages, case["expected_advantages"], **near)


@each_case
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_loss_and_gradient(case, dtype):
    data = case["loss"]
    learner = torch.tensor(data["learner_mean_logp"], dtype=dtype, requires_grad=True)
    loss, _ = hacpo_loss(
        learner,
        torch.tensor(data["sampler_mean_logp"], dtype=dtype),
        torch.tensor(data["advantage"], dtype=dtype),
        torch.tensor(data["is_self"]),
        torch.tensor(data["omega"], dtype=dtype),
        update_index=data["update_index"],
        config=HacpoConfig(**data["config"]),
    )
    loss.backward()
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    assert loss.dtype == dtype
    np.testing.assert_allclose(loss.item(), data["expected_loss"], **near)
    np.testing.assert_allclose(learner.grad, data["expected_grad_learner_mean_logp"], **near)


@each_case
def test_omega_of_the_gradient(case):
    omega = gradient_omega(case["expected_capability"], learner=case["learner"])
    prompts, agents, samples = np.array(case["rewards"]).shape
    rows = np.broadcast_to(omega[None, :, None], (prompts, agents, samples)).reshape(-1)
    np.testing.assert_allclose(rows, case["loss"]["omega"], rtol=1e-10)
