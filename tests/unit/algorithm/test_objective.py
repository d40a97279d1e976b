"""The trainer's objective: pieces add up, merged rows count, GRPO per token, KL, and refusals by name."""

import math

import hacpo_reference as reference
import numpy as np
import pytest
import torch

from hacrl_core.algorithm import ObjectiveRows, hacpo_loss, make_objective, preset, summarise
from hacrl_core.errors import AlgorithmError

LENGTHS = [3, 1, 7, 4, 2, 5]
ALL_OWN = torch.ones(len(LENGTHS), dtype=torch.bool)


def minibatch(seed: int = 0, **changes):
    """Six rows with per-token log-probs now, at the start of the iteration and of the starting policy."""
    rng = np.random.default_rng(seed)
    now = [torch.tensor(-rng.random(n)) for n in LENGTHS]
    size = len(LENGTHS)
    fields = {
        "sampler_mean_logprob_B": torch.tensor([float(row.mean()) for row in now])
        - torch.tensor(rng.normal(0, 0.1, size)),
        "advantage_B": torch.tensor(rng.standard_normal(size)),
        "is_own_B": torch.tensor([True, False, True, False, True, False]),
        "omega_B": torch.tensor(rng.uniform(0.5, 2, size)),
        "weight_B": torch.ones(size, dtype=torch.float64),
        "total_weight": float(size),
        "rollout_ids": [f"000000/agent/p/{i:02d}" for i in range(size)],
    } | changes
    return now, ObjectiveRows(**fields)


def near(rows, scale, seed=1):
    rng = np.random.default_rng(seed)
    return [row + torch.tensor(rng.normal(0, scale, len(row))) for row in rows]


def call(objective, now, chosen=None, *, extra_padding=0, dtype=torch.float64):
    chosen = list(range(len(now))) if chosen is None else chosen
    width = max(len(now[i]) for i in chosen) + extra_padding
    logprobs, mask = (
        torch.full((len(chosen), width), -9.0, dtype=dtype),
        torch.zeros(len(chosen), width, dtype=torch.bool),
    )
    for place, i in enumerate(chosen):
        logprobs[place, : len(now[i])], mask[place, : len(now[i])] = now[i].to(dtype), True
    logprobs.requires_grad_()
    loss, stats = objective(logprobs, mask, torch.tensor(chosen))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), stats, gradient, mask


def test_equals_the_loss_of_mean_logprobs():
    now, rows = minibatch()
    config = preset("hacpo")
    loss, _, gradient, mask = call(make_objective(rows, update_index=2, config=config), now)
    means = torch.stack([row.mean() for row in now]).requires_grad_()
    wanted, _ = hacpo_loss(
        means, rows.sampler_mean_logprob_B, rows.advantage_B, rows.is_own_B, rows.omega_B, update_index=2, config=config
    )
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), abs=1e-12)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(gradient[row][mask[row]], means.grad[row] / length, rtol=1e-10)
    assert not gradient[~mask].any()


@pytest.mark.parametrize("method", ["hacpo", "gspo", "grpo", "naive", "naive_sampler_ratio", "hacpo_pessimistic"])
def test_pieces_in_any_composition_add_up(method):
    now, rows = minibatch()
    config = preset(method, kl_coefficient=0.01)
    is_own = rows.is_own_B if config.share_rollouts else ALL_OWN
    before = {"old_logprobs": near(now, 1e-3), "reference_logprobs": near(now, 0.1)}
    _, rows = minibatch(is_own_B=is_own, total_weight=8.0, **before)
    objective = make_objective(rows, update_index=1, config=config)
    whole, stats, gradient, mask = call(objective, now)
    parts = [
        call(objective, now, chosen, extra_padding=pad) for chosen, pad in (([4, 0], 3), ([5], 0), ([3, 1, 2], 11))
    ]
    assert sum(part[0] for part in parts) == pytest.approx(whole, abs=1e-14)
    np.testing.assert_allclose(parts[1][2][parts[1][3]], gradient[5][mask[5]], rtol=1e-12)
    np.testing.assert_allclose(parts[2][1]["ratio"], stats["ratio"][[3, 1, 2]], rtol=1e-14)


def test_a_merged_row_counts_as_often_as_it_stands_for():
    now, rows = minibatch()
    config = preset("hacpo")
    weight = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    repeated = [0, 1, 1, 1, 2, 3, 3, 4, 5]
    _, merged_rows = minibatch(weight_B=weight, total_weight=9.0)
    spread = ObjectiveRows(
        **{
            name: getattr(rows, name)[repeated]
            for name in ("sampler_mean_logprob_B", "advantage_B", "is_own_B", "omega_B", "weight_B")
        },
        total_weight=9.0,
    )
    merged, merged_stats, _, _ = call(make_objective(merged_rows, update_index=1, config=config), now)
    single, single_stats, _, _ = call(make_objective(spread, update_index=1, config=config), [now[i] for i in repeated])
    assert merged == pytest.approx(single, abs=1e-14)
    a, b = summarise([merged_stats], config=config), summarise([single_stats], config=config)
    assert a == pytest.approx(b, abs=1e-12)


@pytest.mark.parametrize("method", ["hacpo", "grpo", "naive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_before_the_first_update_the_own_ratio_is_exactly_one(method, dtype):
    now, _ = minibatch()
    is_own = ALL_OWN if method == "grpo" else minibatch()[1].is_own_B
    _, rows = minibatch(old_logprobs=near(now, 1e-3), is_own_B=is_own)  # a noisy second forward pass must not matter
    _, stats, _, _ = call(make_objective(rows, update_index=0, config=preset(method)), now, dtype=dtype)
    against_learner = rows.is_own_B | (method == "naive")
    assert (stats["ratio_min"][against_learner] == 1.0).all()
    assert (stats["ratio_max"][against_learner] == 1.0).all()


def test_after_it_the_denominator_is_the_learners_score_not_the_engines():
    now, _ = minibatch()
    old = near(now, 1e-3)
    _, rows = minibatch(old_logprobs=old)
    _, stats, _, _ = call(make_objective(rows, update_index=1, config=preset("hacpo")), now)
    for row in (0, 2, 4):
        assert stats["ratio"][row].item() == pytest.approx(
            math.exp(float(now[row].mean() - old[row].mean())), rel=1e-12
        )


def test_old_logprobs_are_needed_only_where_the_learner_is_the_denominator():
    now, rows = minibatch()
    old = [row if own else None for row, own in zip(near(now, 1e-3), rows.is_own_B, strict=True)]
    sparse = make_objective(minibatch(old_logprobs=old)[1], update_index=1, config=preset("hacpo"))
    full = make_objective(minibatch(old_logprobs=near(now, 1e-3))[1], update_index=1, config=preset("hacpo"))
    assert call(sparse, now)[0] == call(full, now)[0]
    with pytest.raises(AlgorithmError, match="old_logprobs: none for rollout 000000/agent/p/01"):
        make_objective(minibatch(old_logprobs=old)[1], update_index=1, config=preset("naive"))


def test_naive_treats_foreign_responses_as_its_own():
    now, rows = minibatch()
    old = near(now, 3e-4)
    _, rows = minibatch(old_logprobs=old)
    config = preset("naive")
    loss, _, _, _ = call(make_objective(rows, update_index=1, config=config), now)
    terms = [
        reference.gspo_term(float(n.mean() - o.mean()), float(a), 1 - 3e-4, 1 + 4e-4, 10)[0]
        for n, o, a in zip(now, old, rows.advantage_B, strict=True)
    ]
    assert loss == pytest.approx(-sum(terms) / len(terms), abs=1e-12)


def test_grpo_takes_one_ratio_per_token():
    now, _ = minibatch()
    old = near(now, 0.3)
    _, rows = minibatch(old_logprobs=old, is_own_B=ALL_OWN)
    loss, stats, gradient, mask = call(make_objective(rows, update_index=1, config=preset("grpo")), now)
    wanted = 0.0
    for row, (n, o, a) in enumerate(zip(now, old, rows.advantage_B.tolist(), strict=True)):
        terms = [reference.gspo_term(float(x - y), a, 0.8, 1.28, 10) for x, y in zip(n, o, strict=True)]
        wanted -= sum(value for value, _ in terms) / len(terms) / 6
        slopes = [-slope / len(terms) / 6 for _, slope in terms]
        np.testing.assert_allclose(gradient[row][mask[row]], slopes, rtol=1e-10, atol=1e-15)
        ratios = np.exp((n - o).numpy())
        assert stats["ratio_min"][row].item() == pytest.approx(ratios.min())
        assert stats["ratio"][row].item() == pytest.approx(ratios.mean())
    assert loss == pytest.approx(wanted, abs=1e-12)


def test_kl_to_the_start_on_own_responses_only():
    now, _ = minibatch()
    start = near(now, 0.2)
    _, rows = minibatch(reference_logprobs=start)
    plain, stats, _, _ = call(make_objective(rows, update_index=1, config=preset("hacpo")), now)
    held, _, gradient, mask = call(
        make_objective(rows, update_index=1, config=preset("hacpo", kl_coefficient=0.5)), now
    )
    wanted = 0.0
    for row in (0, 2, 4):
        log_r = (start[row] - now[row]).numpy()
        kl = float(np.mean(np.exp(log_r) - log_r - 1))
        assert stats["kl"][row].item() == pytest.approx(kl, rel=1e-9)
        wanted += 0.5 * kl / 6
    assert held - plain == pytest.approx(wanted, abs=1e-12)
    assert stats["kl"][[1, 3, 5]].isnan().all()
    metrics = summarise([stats], config=preset("hacpo"))
    assert metrics["update/kl_to_start"] == pytest.approx(wanted / 0.5 * 2)
    assert gradient[mask].isfinite().all()


def test_refuses_what_it_cannot_learn_from_and_names_the_rollout():
    now, rows = minibatch()
    objective = make_objective(rows, update_index=1, config=preset("hacpo"))
    broken = list(now)
    broken[2] = broken[2].clone()
    broken[2][1] = math.nan
    with pytest.raises(AlgorithmError, match="NaN or infinite: rollout 000000/agent/p/02"):
        call(objective, broken)
    with pytest.raises(AlgorithmError, match="response without tokens: rollout 000000/agent/p/03"):
        call(objective, [*now[:3], torch.zeros(0), *now[4:]])
    bad = rows.sampler_mean_logprob_B.clone()
    bad[4] = math.nan
    with pytest.raises(AlgorithmError, match="sampler log-prob: nan at rollout 000000/agent/p/04"):
        make_objective(minibatch(sampler_mean_logprob_B=bad)[1], update_index=1, config=preset("hacpo"))
    with pytest.raises(AlgorithmError, match="need old_logprobs after the first update"):
        make_objective(rows, update_index=1, config=preset("naive"))
    short = make_objective(minibatch(old_logprobs=[now[0][:2], *now[1:]])[1], update_index=1, config=preset("hacpo"))
    with pytest.raises(AlgorithmError, match="2 log-probs for the 3 tokens of 000000/agent/p/00"):
        call(short, now)
    with pytest.raises(
        AlgorithmError, match=r"advantage of a foreign response: .* at rollout 000000/agent/p/01, .*share_rollouts"
    ):
        make_objective(rows, update_index=0, config=preset("gspo"))
    with pytest.raises(
        AlgorithmError, match="needs reference_logprobs for every own response; none at rollout 000000/agent/p/00"
    ):
        make_objective(rows, update_index=0, config=preset("hacpo", kl_coefficient=0.1))
    with pytest.raises(AlgorithmError, match=r"total_weight 3\.0 is below the rows' 6\.0"):
        minibatch(total_weight=3.0)
    with pytest.raises(AlgorithmError, match="omega_B has 2 rows"):
        minibatch(omega_B=torch.ones(2))
    with pytest.raises(AlgorithmError, match="not chosen yet"):
        make_objective(rows, update_index=0, config=preset("hacpo_calibrated"))
