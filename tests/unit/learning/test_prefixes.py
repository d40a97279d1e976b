"""Shared prefixes run once, and nothing but the rounding tells: against the padded pass of the same model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_models import naive_logprobs, random_sequences, sequence_objective, tiny_agent, tiny_model

from hacrl_core.config.training import UpdateConfig
from hacrl_core.learning.prefixes import shares_prefixes
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence, microbatches, prefix_tree
from hacrl_core.learning.trainer import Trainer

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


def grouped(prompts: int, samples: int, seed: int = 0) -> list[TrainSequence]:
    """Groups as in RL: one prompt, several responses that begin alike, in random order."""
    rng = np.random.default_rng(seed)
    found = []
    for base in random_sequences(prompts, seed, longest=12):
        for sample in range(samples):
            kept = int(rng.integers(0, len(base.response_token_ids) + 1))
            tail = tuple(int(i) for i in rng.integers(3, 53, 1 + sample))
            found.append(TrainSequence(base.prompt_token_ids, base.response_token_ids[:kept] + tail))
    return [found[i] for i in rng.permutation(len(found))]


def prefixes_of(sequences: list[TrainSequence]) -> int:
    rows = [(*s.prompt_token_ids, *s.response_token_ids[:-1]) for s in sequences]
    return len({row[: end + 1] for row in rows for end in range(len(row))})


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=8))
def test_a_tree_holds_every_distinct_prefix_once(rows):
    rows = sorted(rows)
    lengths_B = np.array([len(row) for row in rows])
    ids_BT = np.array([row + [9] * (max(lengths_B) - len(row)) for row in rows])
    tree = prefix_tree(ids_BT, lengths_B)
    assert len(tree.tokens_N) == len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})
    for place_T, row in zip(tree.place_BT, rows, strict=True):
        nodes = place_T[: len(row)]
        assert tree.tokens_N[nodes].tolist() == row
        assert tree.depth_N[nodes].tolist() == list(range(len(row)))
    np.testing.assert_array_equal(tree.place_BT.flatten()[tree.cell_N], np.arange(len(tree.tokens_N)))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "granite"])
def test_every_prefix_runs_once_and_scores_equal_the_models_own(kind, monkeypatch):
    monkeypatch.setattr("hacrl_core.learning.prefixes.runs_lean", lambda model, batch: False)
    agent, sequences = tiny_agent(kind), grouped(5, 6)
    assert shares_prefixes(agent.model)
    run = []
    agent.model.get_input_embeddings().register_forward_hook(lambda module, args, output: run.append(args[0].numel()))
    scores = score_sequences(agent, sequences, token_budget=10_000)
    assert (
        sum(run[-1:])
        == prefixes_of(sequences)
        < 0.6 * sum(len(s.prompt_token_ids) + len(s.response_token_ids) - 1 for s in sequences)
    )
    for sequence, score in zip(sequences, scores, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(score, naive_logprobs(agent.model, sequence).numpy(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"token_budget": 60}])
def test_gradients_equal_those_of_the_padded_pass(kind, changes, monkeypatch):
    monkeypatch.setattr("hacrl_core.learning.prefixes.runs_lean", lambda model, batch: False)
    sequences = grouped(4, 5)
    rng = np.random.default_rng(3)
    advantage_B = torch.tensor(rng.normal(size=len(sequences)))
    objective = sequence_objective(advantage_B, torch.full((len(sequences),), -4.0))
    config = UpdateConfig(learning_rate=1e-3, **changes)
    shared = Trainer(tiny_agent(kind, tied=True), config).gradient(sequences, objective)
    monkeypatch.setattr("hacrl_core.learning.trainer.shares_prefixes", lambda model: False)
    padded = Trainer(tiny_agent(kind, tied=True), config).gradient(sequences, objective)
    assert float((shared - padded).norm() / padded.norm()) < 1e-6


def test_models_whose_layers_look_at_places_run_padded():
    assert not shares_prefixes(tiny_model("gemma2"))  # windows, and soft-capped attention
    windowed = tiny_model("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert not shares_prefixes(windowed)
    assert not shares_prefixes(tiny_model("llama").bfloat16())


def test_an_attention_of_its_own_is_found_out_by_the_probe():
    model = tiny_model("llama")

    def attend_backwards(module, args, kwargs, output):  # something that depends on neighbours in the batch
        return (output[0] + output[0].mean(dim=1, keepdim=True), *output[1:])

    model.model.layers[0].self_attn.register_forward_hook(attend_backwards, with_kwargs=True)
    assert not shares_prefixes(model)


def test_the_budget_bounds_what_is_held_and_groups_stay_together():
    sequences = grouped(12, 6)
    batches = microbatches(sequences, 120, pad_token_id=2, share_prefixes=True)
    assert sorted(int(r) for b in batches for r in b.rows_B) == list(range(len(sequences)))
    for batch in batches:
        distinct = batch.tokens if batch.tree is None else len(batch.tree.tokens_N)
        assert 3 * distinct + batch.input_ids_BT.size <= 4 * 120 or len(batch.rows_B) == 1
    assert 1 < len(batches) < len(microbatches(sequences, 120, pad_token_id=2))
    assert microbatches([], 10, 0, share_prefixes=True) == []
