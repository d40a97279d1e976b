"""The head's precision is one setting for score and update and part of their keys; chunks of logits know the device."""

from typing import Any

import pytest
import torch
from learning_models import random_sequences, tiny_agent
from torch import Tensor

from flows.stage_calls import StageCalls
from hacrl_core.config.training import UpdateConfig
from hacrl_core.learning import memory, scoring, trainer
from hacrl_core.learning.fused import chunk_rows, linear_loss
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.shape import dense
from hacrl_core.learning.trainer import Trainer
from tests.flow.conftest import TINY, tiny

ROWS = random_sequences(6, seed=1)


def likelihood(logprobs_BT: Tensor, mask_BT: Tensor, rows_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs_BT * mask_BT).sum(), {}


@pytest.mark.parametrize(("asked", "allowed"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_score_and_update_compute_the_heads_products_as_asked(asked, allowed, monkeypatch):
    seen: list[str] = []
    right = linear_loss.negative_gradient_

    def spy(*given: Any, **settings: Any) -> Any:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return right(*given, **settings)

    monkeypatch.setattr(linear_loss, "negative_gradient_", spy)
    before = torch.backends.cuda.matmul.fp32_precision
    learner = Trainer(tiny_agent(), UpdateConfig(learning_rate=1e-3, head_precision=asked))
    for work in (
        lambda: score_sequences(tiny_agent(), ROWS, token_budget=64, head_precision=asked),
        lambda: learner.logprobs(ROWS),
        lambda: learner.step(ROWS, likelihood),
    ):
        seen.clear()
        work()
        assert set(seen) == {allowed}
        assert torch.backends.cuda.matmul.fp32_precision == before


def test_precision_and_ranks_join_the_keys_of_score_and_update_unless_they_are_the_default():
    def keys(iteration: int = 0, **update: Any) -> tuple[str, str]:
        calls = StageCalls(tiny(update={**TINY["update"], **update}))
        scored = calls._score_slice("ada", ("ada", "ben"), iteration)
        trained = calls.config.training("ada").at(iteration)
        return str(sorted(scored.identity().items())), str(sorted(trained.identity().items()))

    plain = keys()
    assert all("head_precision" not in key and "ranks" not in key for key in plain)
    assert keys(head_precision="fp32", ranks=1) == plain
    for changed in (keys(head_precision="tf32"), keys(ranks=2), keys(ranks=3)):
        assert all(new != old for new, old in zip(changed, plain, strict=True))
    assert keys(ranks=2) != keys(ranks=3)
    assert keys(ranks=2, offload="optimizer") == keys(ranks=2)
    assert keys(gradient_checkpointing=True) == plain
    # A campaign that goes on with other ranks keeps the keys of the iterations before.
    moved = {"ranks": 4, "ranks_until": {3: 2, 5: 1}}
    assert keys(2, **moved) == keys(2, ranks=2)
    assert (keys(3, **moved), keys(4, **moved)) == (keys(3), keys(4))
    assert keys(5, **moved) == keys(5, ranks=4)


def test_every_pass_plans_its_chunks_for_its_device(monkeypatch):
    """A plan without the device is one for the CPU: 256 rows at a time, and other rounding than the step's."""
    devices: list[Any] = []
    right = trainer.plan_chunks

    def spy(*given: Any, **settings: Any) -> Any:
        devices.append(settings.get("device"))
        return right(*given, **settings)

    for module in (scoring, trainer):
        monkeypatch.setattr(module, "plan_chunks", spy)
    learner = Trainer(tiny_agent(), UpdateConfig(learning_rate=1e-3, autocast="bf16"))
    score_sequences(tiny_agent(), ROWS, token_budget=64)
    learner.logprobs(ROWS)
    learner.step(ROWS, likelihood)
    assert len(devices) >= 3
    assert set(devices) == {torch.device("cpu")}


def test_the_estimate_counts_the_chunks_of_the_fused_loss():
    for vocabulary in (300, 49_152, 151_936):
        shape = dense(hidden=64, layers=1, heads=2, kv_heads=1, mlp=64, vocabulary=vocabulary, tied=True, context=9999)
        for on_gpu in (False, True):
            rows = chunk_rows(vocabulary, on_gpu=on_gpu)
            assert memory._logit_bytes(shape, 1, 1, on_gpu=on_gpu) == 4 * vocabulary * rows
    assert chunk_rows(151_936, on_gpu=True) == 2048
