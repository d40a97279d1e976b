"""The learner: the windows that foreign responses meet, the direction of their gradient, the length in their ratio."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from learning_models import VOCABULARY, naive_logprobs, tiny_agent
from torch.utils._python_dispatch import TorchDispatchMode

from hacrl_core.algorithm import preset
from hacrl_core.algorithm.minibatches import Response
from hacrl_core.config.training import UpdateConfig
from hacrl_core.errors import DivergenceError
from hacrl_core.learning.learner import NEAR, Learner, furthest_move
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence
from hacrl_core.learning.trainer import Trainer

PROMPTS = 16
LIKED = (7, 11, 13)  # tokens that are rewarded


def responses(samplers=("ben",), each=8, seed=0, spread=0.25, foreign_sign=1.0):
    """Made-up rows that look like a campaign's: a task to learn, log-ratios around −0.2, a third without advantage."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt in range(PROMPTS):
        start = tuple(int(i) for i in rng.integers(3, VOCABULARY, 3))
        silent = prompt % 3 == 0
        for sampler in ("ada", *samplers):
            for sample in range(each):
                tokens = tuple(int(i) for i in rng.choice((*LIKED, *range(20, 30)), 8))
                liked = sum(token in LIKED for token in tokens) / 8 - 3 / 13
                own = sampler == "ada"
                shift = 0.0 if own else (-0.01 if silent else -0.2 + spread * rng.standard_normal())
                rows.append(
                    Response(
                        rollout_id=f"{prompt}/{sampler}/{sample}",
                        prompt_id=str(prompt),
                        sampler=sampler,
                        is_own=own,
                        advantage=0.0 if silent else liked * (1.0 if own else foreign_sign),
                        omega=1.0,
                        prompt_token_ids=start,
                        token_ids=tokens,
                        old_logprobs=(),
                        old_mean=shift,  # replaced by _scored
                        sampler_mean=0.0,
                        sampler_tokens=8,
                        reference=None,
                    )
                )
    return _scored(rows)


def _scored(rows):
    sequences = [TrainSequence(r.prompt_token_ids, r.token_ids) for r in rows]
    scores = score_sequences(tiny_agent(), sequences, token_budget=4096)
    return [
        replace(row, old_logprobs=tuple(map(float, s)), old_mean=float(s.mean()), sampler_mean=float(s.mean()) - shift)
        for row, s, shift in zip(rows, scores, [r.old_mean for r in rows], strict=True)
    ]


def learn(rows, method="hacpo", iteration=0, rate=1e-6, prompts=8, trainer=None, **settings):
    config = UpdateConfig(learning_rate=rate, weight_decay=0.0, token_budget=4096)
    trainer = trainer or Trainer(tiny_agent(), config)
    learner = Learner(
        trainer, preset(method, **settings), name="ada", iteration=iteration, minibatch_prompts=prompts, seed=0
    )
    return learner.learn(rows, lambda *_: None), trainer.agent


@pytest.mark.parametrize("share", [0.3, 0.5])
@pytest.mark.parametrize("samplers", [("ben",), ("ben", "cleo", "dan")])
def test_a_calibrated_window_holds_the_share_that_was_asked_for(share, samplers):
    metrics, _ = learn(responses(samplers), "hacpo_calibrated", calibrated_share=share, prompts=4)
    assert metrics["update/foreign_inside_fraction"] == pytest.approx(share, abs=0.02)


def test_the_reported_window_is_the_one_that_foreign_responses_meet():
    metrics, _ = learn(responses(), prompts=8)  # two own minibatches, then two foreign ones
    assert metrics["update/window_first_low"] == pytest.approx(0.85)
    assert metrics["update/window_last_low"] == pytest.approx(0.875)
    assert "update/window_low" not in metrics
    for method in ("gspo", "without_clipping", "naive"):
        rows = [r for r in responses() if r.is_own or method != "gspo"]
        assert not any("window" in name for name in learn(rows, method)[0]), method


def test_the_gradient_cosine_tells_a_reversed_pull_from_a_common_one():
    same, _ = learn(responses(each=16, spread=0.0), cross_clip_delta=0.5)
    reversed_, _ = learn(responses(each=16, spread=0.0, foreign_sign=-1.0), cross_clip_delta=0.5)
    yardstick = same["update/gradient_cosine_own"]
    assert yardstick > 0.3
    assert same["update/gradient_cosine"] == pytest.approx(yardstick, abs=0.2)
    assert reversed_["update/gradient_cosine"] == pytest.approx(-same["update/gradient_cosine"], abs=1e-4)
    assert reversed_["update/gradient_cosine_own"] == yardstick


def test_the_gradient_cosine_is_that_of_plain_autograd():
    rows = [r for r in responses(each=4) if r.prompt_id in ("1", "2", "3")]  # prompt 3 has no advantage
    # A prompt that only one side learns from does not count.
    rows = [replace(r, advantage=0.0) if r.prompt_id == "2" and not r.is_own else r for r in rows]
    metrics, _ = learn(rows, prompts=3, alpha=0.0, cross_clip_delta=1.0, stepwise_clip=False)

    def gradient(side):
        model = tiny_agent().model
        objective = 0.0
        for r in side:
            mean = naive_logprobs(model, TrainSequence(r.prompt_token_ids, r.token_ids)).mean()
            ratio = torch.exp(mean - (mean.detach() if r.is_own else r.sampler_mean))
            objective = objective + (ratio if r.is_own or ratio < 1 else ratio.detach()) * r.advantage
        objective.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).double()

    def cosine(a, b):
        return float(a @ b / a.norm() / b.norm())

    own = [r for r in rows if r.is_own and r.prompt_id == "1"]
    foreign = [r for r in rows if not r.is_own and r.prompt_id == "1"]
    assert metrics["update/gradient_cosine"] == pytest.approx(cosine(gradient(own), gradient(foreign)), abs=1e-4)
    halves = cosine(gradient(own[::2]), gradient(own[1::2]))
    assert metrics["update/gradient_cosine_own"] == pytest.approx(halves, abs=1e-4)


def test_measuring_the_cosine_changes_no_weight_and_is_done_every_so_many_iterations():
    rows = responses()
    measured, agent = learn(rows, rate=1e-3, gradient_cosine_every=2)
    plain, other = learn(rows, rate=1e-3, gradient_cosine=False)
    assert "update/gradient_cosine" in measured
    assert "update/gradient_cosine" not in plain
    assert measured["update/saved_share"] == plain["update/saved_share"]
    for mine, its in zip(agent.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert "update/gradient_cosine" not in learn(rows, iteration=3, gradient_cosine_every=2)[0]
    assert "update/gradient_cosine" in learn(rows, iteration=4, gradient_cosine_every=2)[0]


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation makes new memory for."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result


def test_an_iteration_copies_no_gradient():
    agent = tiny_agent(hidden_size=256, intermediate_size=512)
    trainer = Trainer(agent, UpdateConfig(learning_rate=1e-6, token_budget=64))
    parameters = sum(p.numel() for p in agent.model.parameters())
    rows = [r for r in responses(each=2) if int(r.prompt_id) < 3]
    with Largest() as largest:
        metrics, _ = learn(rows, trainer=trainer)
    assert "update/gradient_cosine" in metrics
    assert 0 < largest.bytes < 2 * parameters, "a copy has 4 bytes per parameter"


def test_the_length_in_the_ratio():
    """By hand: 8 tokens for the learner, 10 for the sampler; sums −20 and −21."""
    row = next(r for r in responses() if not r.is_own and r.advantage)
    total = sum(row.old_logprobs)
    row = replace(row, sampler_tokens=10, sampler_mean=(total - 1.0) / 10, advantage=1.0)
    wanted = {
        "own": math.exp(total / 8 - (total - 1.0) / 10),
        "sampler": math.exp(1.0 / 10),
        "learner": math.exp(1.0 / 8),
    }
    for length, ratio in wanted.items():
        metrics, _ = learn([row], ratio_length=length, prompts=1, cross_clip=False)
        assert metrics["update/foreign_ratio_mean"] == pytest.approx(ratio, rel=1e-5), length


def test_the_length_in_the_ratio_scales_the_gradient_and_leaves_own_responses_alone():
    row = next(r for r in responses() if not r.is_own and r.advantage)
    row = replace(row, sampler_tokens=10, sampler_mean=row.old_mean * 8 / 10)  # the same sum
    unclipped = {"cross_clip": False, "alpha": 0.0, "prompts": 1}
    learner, _ = learn([row], ratio_length="learner", **unclipped)
    sampler, _ = learn([row], ratio_length="sampler", **unclipped)
    # Both ratios are 1; the derivative of the mean is 1/8 or 1/10 of that of the sum.
    assert learner["update/foreign_ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert sampler["update/gradient_norm_mean"] / learner["update/gradient_norm_mean"] == pytest.approx(0.8, rel=1e-4)
    own = [r for r in responses() if r.is_own]
    assert learn(own, ratio_length="sampler")[0] == learn(own)[0]


@pytest.mark.parametrize(("rate", "looks"), [(1e-6, False), (1e-4, False), (1e-2, True)])
def test_the_loss_under_the_new_weights_is_looked_at_where_they_may_have_moved_far(rate, looks, monkeypatch):
    asked = []
    monkeypatch.setattr(Trainer, "gives_finite", lambda self, *_, steps: asked.append(steps) or True)
    learn([r for r in responses() if r.is_own], "gspo", rate=rate)
    assert asked == ([2] if looks else [])


def test_a_weight_that_is_no_number_is_found_after_the_smallest_step(monkeypatch):
    step = Trainer.step

    def ruins(self, sequences, objective):
        result = step(self, sequences, objective)
        with torch.no_grad():
            self._parameters[-1].view(-1)[0] = math.nan
        return result

    monkeypatch.setattr(Trainer, "step", ruins)
    with pytest.raises(DivergenceError, match="a weight or a moment"):
        learn([r for r in responses() if r.is_own], "gspo", prompts=PROMPTS)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.0, 0.5)])
def test_no_gradients_move_a_weight_further_than_the_bound(betas):
    """Against AdamW itself, on random gradients and on the ones that Cauchy and Schwarz call the worst."""
    config = UpdateConfig(learning_rate=1.0, betas=betas, epsilon=1e-12, weight_decay=0.0)
    bound = furthest_move(config, 1)
    rng = np.random.default_rng(0)
    worst = [(betas[1] / betas[0]) ** k if betas[0] else 1.0 for k in range(-60, 0)]
    for gradients in (worst, *np.exp(3 * rng.standard_normal((20, 60)))):
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.AdamW([weight], lr=1.0, betas=betas, eps=1e-12, weight_decay=0.0)
        for gradient in gradients:
            before = weight.item()
            weight.grad = torch.tensor([gradient], dtype=torch.float64)
            optimizer.step()
            assert abs(weight.item() - before) <= bound * (1 + 1e-9)


def test_without_a_bound_the_loss_is_looked_at():
    assert furthest_move(UpdateConfig(learning_rate=1e-9, betas=(0.9, 0.5)), 1) == math.inf
    assert (
        furthest_move(UpdateConfig(learning_rate=1e-4), 13) < NEAR < furthest_move(UpdateConfig(learning_rate=1e-4), 14)
    )
    assert furthest_move(UpdateConfig(learning_rate=1e-4, weight_decay=3e4), 1) == math.inf


def test_where_gradients_vanish_when_squared_the_loss_is_looked_at():
    """Then epsilon alone divides: what a step moves depends on it."""
    config = UpdateConfig(learning_rate=1e-4, epsilon=1e-30)
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, eps=1e-30)
    weight.grad = torch.full((8,), 1e-22)
    optimizer.step()
    assert NEAR < float(weight.detach().abs().max()) <= furthest_move(config, 1)
