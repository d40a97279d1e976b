"""Arrays against slow loops, over random shapes and hostile values."""

import hacpo_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from losses import loss_and_metrics

from hacrl_core.algorithm import (
    HacpoConfig,
    calibrated_config,
    capability_ratio,
    foreign_weight_bound,
    foreign_window,
    gradient_omega,
    group_advantages,
    hacpo_loss,
    learner_advantages,
    preset,
    smoothed_capability,
)
from hacrl_core.algorithm.hacpo import foreign_term, response_terms

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def reward_groups(draw):
    """P × N × G rewards with silent prompts, an agent that never scores, fractions and masked entries, as arrays and as
    lists.
    """
    rng = np.random.default_rng(draw(seeds))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    rewards = rng.integers(0, 2, shape).astype(float) if draw(st.booleans()) else rng.random(shape)
    if draw(st.booleans()):
        rewards[rng.integers(shape[0])] = draw(st.sampled_from([0.0, 1.0, 0.1]))
    if draw(st.booleans()):
        rewards[:, rng.integers(shape[1])] = 0.0
    mask = rng.random(shape) < draw(st.sampled_from([0.0, 0.3, 0.9]))
    lists = [
        [[None if mask[p, n, g] else float(rewards[p, n, g]) for g in range(shape[2])] for n in range(shape[1])]
        for p in range(shape[0])
    ]
    capability = np.where(rng.random(shape[1]) < 0.2, 1e-8, rng.random(shape[1]) + 1e-3)
    return np.ma.masked_array(rewards, mask=mask), lists, capability, int(rng.integers(shape[1]))


@quick
@given(reward_groups())
def test_group_advantages(groups):
    rewards, lists, capability, learner = groups
    advantages, baseline = group_advantages(rewards, capability, learner=learner)
    wanted_advantages, wanted_baseline = reference.advantages(lists, list(capability), learner)
    np.testing.assert_allclose(baseline, wanted_baseline, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(advantages, np.array(wanted_advantages), rtol=1e-9, atol=1e-9)


@quick
@given(reward_groups())
def test_own_responses_only_are_a_campaign_of_one(groups):
    rewards, lists, capability, learner = groups
    advantages, baseline = learner_advantages(rewards, capability, learner=learner, config=preset("gspo"))
    alone = [[prompt[learner]] for prompt in lists]
    wanted_advantages, wanted_baseline = reference.advantages(alone, [1.0], 0)
    np.testing.assert_allclose(baseline, wanted_baseline, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(advantages[:, learner], np.array(wanted_advantages)[:, 0], rtol=1e-9, atol=1e-9)
    assert not np.delete(advantages, learner, axis=1).any()


@quick
@given(reward_groups())
def test_naive_pools_mean_and_deviation(groups):
    rewards, lists, capability, learner = groups
    got = learner_advantages(rewards, capability, learner=learner, config=preset("naive"))
    wanted = reference.advantages(lists, [1.0] * len(capability), learner)
    np.testing.assert_allclose(got[0], np.array(wanted[0]), rtol=1e-9, atol=1e-9)


@quick
@given(seeds, st.integers(1, 8), st.integers(1, 5), st.integers(1, 7), st.sampled_from([0.0, 0.4]))
def test_smoothed_capability_with_agents_that_come_and_go(seed, iterations, agents, window, absent):
    rng = np.random.default_rng(seed)
    history = rng.random((iterations, agents)) * (rng.random(agents) < 0.8)
    history[rng.random(history.shape) < absent] = np.nan
    got = smoothed_capability(history, window)
    np.testing.assert_allclose(got, reference.capability(history.tolist(), window), rtol=1e-12, equal_nan=True)
    masked = np.ma.masked_invalid(history)
    np.testing.assert_array_equal(smoothed_capability(masked, window), got)


@given(st.floats(0, 1), st.floats(0, 1))
def test_capability_ratio_is_clamped_and_inverts(a, b):
    ratio = float(capability_ratio(a, b))
    assert 0.1 <= ratio <= 10.0
    assert ratio * float(capability_ratio(b, a)) == pytest.approx(1.0)


def test_the_learners_own_omega_is_exactly_one():
    capability = np.random.default_rng(0).random(50)
    assert all(gradient_omega(capability, learner=k)[k] == 1.0 for k in range(50))


def random_rows(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Log-ratios around GSPO's window, around the foreign window, at exactly 1 and far outside the clamp."""
    scale = rng.choice([0.0, 2e-4, 0.2, 3.0, 30.0], size)
    sampler = -rng.random(size)
    return {
        "learner": sampler + scale * rng.standard_normal(size),
        "sampler": sampler,
        "advantage": rng.standard_normal(size) * (rng.random(size) < 0.9),
        "is_own": rng.random(size) < 0.4,
        "omega": rng.uniform(0.1, 10.0, size),
    }


configs = st.fixed_dictionaries(
    {
        "alpha": st.sampled_from([-1.0, -0.5, 0.0, 1.0, 2.0, 3.0]),
        "cross_clip_delta": st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]),
        "cross_clip_step": st.sampled_from([0.0, 0.01, 0.025]),
        "capability_in_gradient": st.booleans(),
        "stepwise_clip": st.booleans(),
        "foreign_treatment": st.sampled_from(["hacpo", "hacpo", "as_own", "sampler_ratio_min"]),
        "window": st.sampled_from(["clip", "clip", "no clip", "pessimistic"]),
    }
)


def build(choice: dict) -> HacpoConfig:
    fields = dict(choice)
    window = fields.pop("window")
    if fields["foreign_treatment"] == "hacpo":
        fields |= {"cross_clip": window != "no clip", "pessimistic": window == "pessimistic"}
    return HacpoConfig(**fields)


@quick
@given(seeds, st.integers(1, 40), st.integers(0, 12), configs)
def test_loss_and_gradient(seed, size, update_index, choice):
    config, rows = build(choice), random_rows(np.random.default_rng(seed), size)
    learner = torch.tensor(rows["learner"], requires_grad=True)
    loss, stats = loss_and_metrics(
        learner,
        rows["sampler"],
        rows["advantage"],
        rows["is_own"],
        rows["omega"],
        update_index=update_index,
        config=config,
    )
    loss.backward()
    wanted_loss, wanted_gradient = reference.loss(**rows, update_index=update_index, config=config.model_dump())
    np.testing.assert_allclose(loss.item(), wanted_loss, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(learner.grad, wanted_gradient, rtol=1e-10, atol=1e-12)
    assert all(np.isfinite(value) for value in stats.values())


@quick
@given(seeds, st.integers(1, 40), st.integers(0, 12), configs)
def test_reported_weights_are_the_gradients_weights_and_keep_their_bound(seed, size, update_index, choice):
    config, rows = build(choice), random_rows(np.random.default_rng(seed), size)
    learner = torch.tensor(rows["learner"], requires_grad=True)
    sampler, advantage, is_own, omega = (torch.tensor(rows[key]) for key in ("sampler", "advantage", "is_own", "omega"))
    terms = response_terms(learner, sampler, advantage, is_own, omega, update_index=update_index, config=config)
    terms.objective.sum().backward()
    assert learner.grad is not None
    np.testing.assert_allclose(learner.grad, terms.weight * advantage, rtol=1e-10, atol=1e-12)
    if not is_own.all():
        bound = foreign_weight_bound(float(omega[~is_own].max()), config)
        assert float(terms.weight[~is_own].max()) <= bound * (1 + 1e-12)


def test_float32_agrees_with_float64():
    rows = random_rows(np.random.default_rng(5), 200)
    keep = np.abs(rows["learner"] - rows["sampler"]) < 3
    results = {}
    for dtype in (torch.float32, torch.float64):
        learner = torch.tensor(rows["learner"][keep], dtype=dtype, requires_grad=True)
        others = [rows[key][keep] for key in ("sampler", "advantage", "is_own", "omega")]
        loss, _ = hacpo_loss(learner, *others, update_index=1, config=HacpoConfig())
        loss.backward()
        assert loss.dtype == learner.grad.dtype == dtype
        results[dtype] = loss.item()
    assert results[torch.float32] == pytest.approx(results[torch.float64], abs=1e-6)


def test_own_ratio_is_exactly_one_against_its_own_detached_value():
    learner = torch.randn(64, requires_grad=True)
    own = torch.ones(64, dtype=torch.bool)
    _, stats = loss_and_metrics(
        learner, learner.detach(), torch.randn(64), own, torch.ones(64), update_index=0, config=HacpoConfig()
    )
    assert stats["update/own_ratio_min"] == stats["update/own_ratio_max"] == 1.0


def test_the_unused_foreign_branch_cannot_spoil_an_own_gradient():
    learner = torch.tensor([9.0], requires_grad=True)  # to the 20th power: beyond float32
    config = HacpoConfig(share_rollouts=False, cross_clip=False, alpha=20.0)
    loss, _ = hacpo_loss(learner, [0.0], [-1.0], [True], [1.0], update_index=0, config=config)
    loss.backward()
    assert learner.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_agent_hacpo_is_gspo_bit_for_bit(dtype):
    rng = np.random.default_rng(7)
    rewards = rng.integers(0, 2, (20, 1, 8)).astype(float)
    results = []
    for method in ("hacpo", "gspo"):
        config = preset(method)
        capability = smoothed_capability(rewards.mean(axis=(0, 2))[None], config.capability_window)
        advantages, baseline = learner_advantages(rewards, capability, learner=0, config=config)
        size = advantages.size
        noise = np.random.default_rng(8)
        learner = torch.tensor(-noise.random(size), dtype=dtype, requires_grad=True)
        sampler = learner.detach() + torch.tensor(4e-4 * noise.standard_normal(size), dtype=dtype)
        own = np.ones(size, dtype=bool)
        loss, stats = loss_and_metrics(
            learner, sampler, advantages.reshape(-1), own, np.ones(size), update_index=3, config=config
        )
        loss.backward()
        results.append((advantages.tobytes(), baseline.tobytes(), loss.item(), learner.grad.numpy().tobytes(), stats))
    assert results[0] == results[1]


# Extensions, not of the paper.


@quick
@given(seeds, st.integers(1, 40), st.floats(0.05, 1.0))
def test_calibrated_window_is_the_narrowest_that_holds_the_share(seed, size, share):
    rng = np.random.default_rng(seed)
    sampler, window_index = -rng.random(size), rng.integers(0, 5, size)
    learner = sampler + rng.choice([0.0, -0.1, 0.5, -1.0, -4.0], size) * rng.random(size)
    count = rng.integers(1, 4, size).astype(float)
    config = preset("hacpo_calibrated", calibrated_share=share)
    calibrated = calibrated_config(config, learner, sampler, window_index, count)
    assert calibrated.calibrated_share is None

    # The slow way: try the δ that each response needs, from the narrowest window up, and take the first that is enough.
    ratio = np.exp(learner - sampler)
    needed = 1 - ratio + np.where(ratio < 1, 0.025 * window_index, 0.0) + 2e-6
    if not (ratio <= 1).any():
        assert calibrated == config.model_copy(update={"calibrated_share": None})
        return

    def inside(delta):
        plain = preset("hacpo", cross_clip_delta=0.0).model_copy(update={"cross_clip_delta": delta})
        low = np.array([foreign_window(int(m), plain)[0] for m in window_index])
        return count[(low <= ratio) & (ratio <= 1)].sum()

    candidates = sorted(needed[ratio <= 1])
    wanted = next((d for d in candidates if inside(d) >= share * count.sum() * (1 - 1e-9)), candidates[-1])
    assert calibrated.cross_clip_delta == pytest.approx(wanted, abs=3e-6)
    assert inside(calibrated.cross_clip_delta) >= min(share * count.sum() * (1 - 1e-9), count[ratio <= 1].sum())


def test_pessimistic_lets_low_successes_teach_and_low_failures_not():
    ratio = torch.tensor([0.3, 0.3, 0.9, 0.9, 1.5, 1.5], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)
    config = preset("hacpo_pessimistic", alpha=2.0)
    terms = foreign_term(ratio, advantage, torch.full_like(ratio, 2.0), (0.8, 1.0), config)
    # min(s·A, clip(s, 0.8, 1)·A) · min(s, 1)² · ω, by hand
    wanted_value = [0.3 * 0.09 * 2, -0.8 * 0.09 * 2, 0.9 * 0.81 * 2, -0.9 * 0.81 * 2, 1.0 * 2, -1.5 * 2]
    np.testing.assert_allclose(terms.objective, wanted_value, rtol=1e-12)
    np.testing.assert_allclose(terms.weight, [0.3**3 * 2, 0, 0.9**3 * 2, 0.9**3 * 2, 0, 1.5 * 2], rtol=1e-12)
