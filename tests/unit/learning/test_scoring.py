"""Scoring equals the model's own log-probs, the update's log-probs, and itself in any company."""

import numpy as np
import pytest
import torch
from learning_models import naive_logprobs, random_sequences, sequence_objective, tiny_agent, tiny_model

from hacrl_core.config.training import UpdateConfig
from hacrl_core.errors import EngineError
from hacrl_core.learning.fused import read_head
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence, microbatches, padding_share
from hacrl_core.learning.trainer import Trainer

ARCHITECTURES = [
    ("llama", {}),
    ("llama", {"tied": True}),
    ("qwen3", {"tied": True}),
    ("gpt2", {}),
    ("gemma2", {"tied": True, "final_logit_softcapping": 0.2}),
    ("cohere", {"tied": True, "logit_scale": 0.3}),
    ("granite", {"logits_scaling": 3.0}),
]


@pytest.mark.parametrize(("kind", "changes"), ARCHITECTURES)
def test_scores_equal_the_models_own_logits(kind, changes):
    agent = tiny_agent(kind, **changes)
    sequences = random_sequences(9)
    scores = score_sequences(agent, sequences, token_budget=64, temperature=0.7)
    for sequence, score in zip(sequences, scores, strict=True):
        with torch.no_grad():
            expected = naive_logprobs(agent.model, sequence, 0.7)
        np.testing.assert_allclose(score, expected.numpy(), atol=2e-6, rtol=0)


def test_scores_do_not_depend_on_padding_order_or_microbatch():
    agent = tiny_agent("qwen3")
    sequences = random_sequences(24, longest=40)
    whole = score_sequences(agent, sequences, token_budget=100_000)
    order = np.random.default_rng(1).permutation(len(sequences))
    for budget in (1, 50, 333):
        shuffled = score_sequences(agent, [sequences[i] for i in order], token_budget=budget)
        for place, i in enumerate(order):
            np.testing.assert_allclose(shuffled[place], whole[i], atol=1e-6, rtol=0)


def test_splitting_a_long_response_does_not_change_its_score(monkeypatch):
    agent = tiny_agent()
    sequences = random_sequences(6, longest=60)
    whole = score_sequences(agent, sequences, token_budget=500)
    monkeypatch.setattr("hacrl_core.learning.fused.linear_loss._CHUNK_ELEMENTS", 1)
    monkeypatch.setattr("hacrl_core.learning.fused.linear_loss._CHUNK_TOKENS", 5)
    monkeypatch.setattr(
        "hacrl_core.learning.scoring.plan_chunks", lambda lengths, v, max_logits_mb, **device: _tiny_chunks(lengths, v)
    )
    for a, b in zip(whole, score_sequences(agent, sequences, token_budget=500), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)


def _tiny_chunks(lengths, vocabulary):
    from hacrl_core.learning.fused import plan_chunks

    return plan_chunks(lengths, vocabulary, max_logits_mb=0)


@pytest.mark.parametrize("budget", [1, 70, 5000])
def test_the_update_sees_the_scored_log_probs(budget):
    """Own ratio before the first update: 1 to 1e-6 whatever the microbatches of score and update."""
    agent = tiny_agent("qwen3")
    sequences = random_sequences(15)
    means = torch.tensor([float(s.mean()) for s in score_sequences(agent, sequences, token_budget=200)])
    trainer = Trainer(agent, UpdateConfig(learning_rate=1e-3, token_budget=budget))
    result = trainer.step(sequences, sequence_objective(torch.ones(15), means))
    np.testing.assert_allclose(result.stats["mean_logprob"], means.numpy(), atol=1e-6, rtol=0)
    np.testing.assert_allclose(result.stats["ratio"], 1.0, atol=1e-6)


def test_microbatches_keep_the_budget_and_lose_nothing():
    sequences = random_sequences(30, longest=33)
    batches = microbatches(sequences, 90, pad_token_id=2)
    assert sorted(int(r) for b in batches for r in b.rows_B) == list(range(30))
    assert all(b.input_ids_BT.size <= 90 or len(b.rows_B) == 1 for b in batches)
    for batch in batches:
        targets = np.split(batch.targets_R, np.cumsum(batch.lengths)[:-1])
        for row, target in zip(batch.rows_B, targets, strict=True):
            assert tuple(target) == sequences[row].response_token_ids
        width = batch.input_ids_BT.shape[1]
        first = batch.positions_R[0] - 0 * width
        assert first == len(sequences[batch.rows_B[0]].prompt_token_ids) - 1
    assert 0 <= padding_share(batches) < padding_share(microbatches(sequences, 100_000, 2))
    assert microbatches([], 10, 0) == []


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        (TrainSequence((3,), ()), "response has no tokens"),
        (TrainSequence((), (3,)), "prompt has no tokens"),
        (TrainSequence((3,), (53,)), "outside 0..52"),
        (TrainSequence((-1,), (5,)), "outside 0..52"),
        (TrainSequence((3,) * 100, (4,) * 29), "128 positions"),
    ],
)
def test_bad_sequences_are_refused_by_row(sequence, words):
    with pytest.raises(EngineError, match=r"sequence 1: .*") as error:
        score_sequences(tiny_agent(), [random_sequences(1)[0], sequence], token_budget=100)
    assert words in str(error.value)


def test_out_of_memory_names_the_remedy_of_scoring(monkeypatch):
    monkeypatch.setattr("hacrl_core.learning.scoring.response_states", lambda *_: torch.empty(1 << 60))
    with pytest.raises(
        EngineError, match=r"agent tiny: out of memory scoring on cpu; lower score.token_budget"
    ) as error:
        score_sequences(tiny_agent(), random_sequences(2), token_budget=100)
    assert "\n" not in str(error.value)


def test_other_faults_of_scoring_keep_their_name(monkeypatch):
    def fault(*_):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("hacrl_core.learning.scoring.response_states", fault)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        score_sequences(tiny_agent(), random_sequences(2), token_budget=100)


def test_a_head_that_does_something_unknown_is_refused():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output + 1.0)
    with pytest.raises(EngineError, match="not supported"):
        read_head(model)
