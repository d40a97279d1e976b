"""bfloat16: the update's old log-probs are of its own passes, and LoRA computes with the weights that others sample."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learning_models import random_sequences, sequence_objective, tiny_agent

from hacrl_core.agents.agent import load_agent
from hacrl_core.algorithm import preset
from hacrl_core.algorithm.minibatches import Response
from hacrl_core.config.training import LoraConfig, UpdateConfig
from hacrl_core.learning import lora
from hacrl_core.learning.learner import Learner, Metrics
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence
from hacrl_core.learning.trainer import StepResult, Trainer

BF16 = UpdateConfig(learning_rate=1e-3, autocast="bf16", token_budget=64)
LORA = LoraConfig(rank=4, alpha=8.0, target_modules="all-linear")


def responses(count: int = 16) -> list[Response]:
    """Own responses, scored under autocast in one large batch, as the score stage does it."""
    sequences = random_sequences(count, seed=3)
    scores = score_sequences(tiny_agent(), sequences, token_budget=4096, autocast="bf16")
    return [
        Response(
            rollout_id=f"r{row}",
            prompt_id=str(row // 4),
            sampler="ada",
            is_own=True,
            advantage=1.0 if row % 2 else -1.0,
            omega=1.0,
            prompt_token_ids=sequence.prompt_token_ids,
            token_ids=sequence.response_token_ids,
            old_logprobs=tuple(map(float, score)),
            old_mean=float(score.mean(dtype=np.float64)),
            sampler_mean=float(score.mean(dtype=np.float64)),
            sampler_tokens=len(score),
            reference=None,
        )
        for row, (sequence, score) in enumerate(zip(sequences, scores, strict=True))
    ]


def learned(rows: Sequence[Response], config: UpdateConfig) -> tuple[Metrics, list[StepResult]]:
    trainer = Trainer(tiny_agent(), config)
    steps: list[StepResult] = []
    step = trainer.step

    def recorded(sequences: list[TrainSequence], objective: object) -> StepResult:
        steps.append(step(sequences, objective))  # type: ignore[arg-type]
        return steps[-1]

    trainer.step = recorded  # type: ignore[method-assign, assignment]
    learner = Learner(trainer, preset("gspo"), name="ada", iteration=1, minibatch_prompts=2, seed=0)
    return learner.learn(rows, lambda *_: None), steps


def replace_config(config: UpdateConfig, **changes: object) -> UpdateConfig:
    return config.model_copy(update=changes)


def shifted(rows: Sequence[Response], by: float) -> list[Response]:
    """As if the score stage's batches had rounded otherwise; on a CPU they hardly do."""
    return [
        replace(r, old_mean=r.old_mean + by, old_logprobs=tuple(value + by for value in r.old_logprobs)) for r in rows
    ]


# A learning rate of nearly 0 leaves the policy as it was: any ratio but 1 is the rounding of another pass.
STILL = replace_config(BF16, learning_rate=1e-12)


def test_own_ratios_are_one_by_computation_in_every_update_under_autocast() -> None:
    metrics, steps = learned(shifted(responses(), 5e-4), STILL)
    assert len(steps) == 2
    for step in steps:
        assert (step.stats["ratio"] == 1.0).all()
    assert metrics["update/score_mismatch_mean"] == pytest.approx(5e-4, abs=1e-4)


def test_with_the_scored_log_probs_they_are_clipped_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "_old_logprobs", lambda self, batches: {})
    metrics, steps = learned(shifted(responses(), 5e-4), STILL)
    assert (steps[0].stats["ratio"] == 1.0).all()  # by definition, which hides the rest
    np.testing.assert_allclose(steps[1].stats["ratio"], np.exp(-5e-4), atol=1e-4)
    assert metrics["update/own_clip_fraction"] > 0.2


def test_in_float32_the_scored_log_probs_are_used_and_no_pass_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "logprobs", None)
    metrics, _ = learned(responses(), replace_config(BF16, autocast="none"))
    assert "update/score_mismatch_max" in metrics


def trained_adapter(config: UpdateConfig) -> Trainer:
    """A trainer whose adapters are far enough from zero to matter."""
    trainer = Trainer(tiny_agent(), config, seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in trainer.agent.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn_like(parameter))
    return trainer


def off_merged(trainer: Trainer, folder: Path) -> float:
    """How far the trainer's log-probs are from those of the version that it saves, both under autocast."""
    sequences = random_sequences(8, seed=4)
    trainer.save(folder)
    sampled = score_sequences(load_agent(folder), sequences, token_budget=64, autocast="bf16")
    updated = trainer.logprobs(sequences)
    return max(float(np.abs(a - b).max()) for a, b in zip(sampled, updated, strict=True))


def test_lora_in_bfloat16_updates_the_policy_that_samples(tmp_path: Path) -> None:
    config = replace_config(BF16, lora=LORA)
    trainer = trained_adapter(config)
    assert off_merged(trainer, tmp_path / "one") == 0.0
    sequences = random_sequences(8, seed=4)
    objective = sequence_objective(torch.ones(8), torch.full((8,), -4.0))
    assert trainer.step(sequences, objective).gradient_norm > 0
    assert off_merged(trainer, tmp_path / "two") == 0.0
    resumed = Trainer(load_agent(tmp_path / "two"), config, optimizer_state=tmp_path / "two")
    assert off_merged(resumed, tmp_path / "three") < 1e-3  # the base came back by subtraction: a few weights round over


def test_base_and_adapter_rounded_apart_are_another_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attach = lora.attach
    monkeypatch.setattr(lora, "attach", lambda *args, as_merged=False: attach(*args))
    assert off_merged(trained_adapter(replace_config(BF16, lora=LORA)), tmp_path) > 1e-3


@pytest.mark.parametrize("bias", [False, True])
def test_the_merged_layers_gradients_are_those_of_plain_autograd(bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 8), torch.randn(6, 8)
    a, b = torch.randn(2, 8), torch.randn(6, 2)
    shift = torch.randn(6) if bias else None
    leaves = [t.clone().requires_grad_() for t in (x, a, b)]
    pull = torch.randn(3, 5, 6)
    y = lora._MergedLinear.apply(leaves[0], weight, shift, leaves[1], leaves[2], 0.5)  # type: ignore[no-untyped-call]
    (y.float() * pull).sum().backward()
    wanted = [t.clone().requires_grad_() for t in (x, a, b)]
    plain = torch.nn.functional.linear(wanted[0], weight + 0.5 * wanted[2] @ wanted[1], shift)
    (plain * pull).sum().backward()
    for found, right in zip(leaves, wanted, strict=True):
        assert found.grad is not None
        assert right.grad is not None
        assert float((found.grad - right.grad).norm() / right.grad.norm()) < 0.02
