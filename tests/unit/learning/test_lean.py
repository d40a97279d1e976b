"""The lean body against the model's own code and autograd: states, log-probs, gradients, and where it must not run."""

import numpy as np
import pytest
import torch
from learning_models import naive_logprobs, random_sequences, sequence_objective, tiny_agent
from test_prefixes import grouped

from hacrl_core.agents.agent import Agent
from hacrl_core.config.training import LoraConfig, UpdateConfig
from hacrl_core.learning import trainer as trainer_module
from hacrl_core.learning.lean import lean_states, runs_lean
from hacrl_core.learning.lean.cells import cells_of, tree_of
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence, microbatches
from hacrl_core.learning.trainer import Trainer

KINDS = ["llama", "mistral", "qwen2", "qwen3"]


def agent_of(kind: str, *, tied: bool = True) -> Agent:
    """A model whose norms are not 1 and whose biases are not 0."""
    windows = {"sliding_window": None} if kind == "mistral" else {}
    agent = tiny_agent(kind, tied=tied, num_key_value_heads=2, num_attention_heads=4, **windows)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in agent.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return agent


def batches_of(sequences: list[TrainSequence], budget: int = 10_000):
    return microbatches(sequences, budget, pad_token_id=2, share_prefixes=True)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_the_models_own_logits(kind):
    agent = agent_of(kind)
    sequences = [*grouped(4, 5), *random_sequences(5, seed=4)]
    assert all(runs_lean(agent.model, batch) for batch in batches_of(sequences))
    scores = score_sequences(agent, sequences, token_budget=120, body="lean")
    for sequence, score in zip(sequences, scores, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(score, naive_logprobs(agent.model, sequence).numpy(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [grouped(4, 5), random_sequences(6, seed=2)], ids=["groups", "nothing shared"])
@pytest.mark.parametrize("changes", [{"tied": True}, {"tied": False, "token_budget": 60}])
def test_gradients_equal_those_of_autograd(kind, sequences, changes, monkeypatch):
    advantage_B = torch.tensor(np.random.default_rng(3).normal(size=len(sequences)))
    objective = sequence_objective(advantage_B, torch.full((len(sequences),), -4.0))
    tied, budget = changes["tied"], changes.get("token_budget", 4096)
    passes = []
    monkeypatch.setattr(
        trainer_module, "lean_states", lambda model, batch: passes.append(batch) or lean_states(model, batch)
    )
    lean = Trainer(agent_of(kind, tied=tied), UpdateConfig(learning_rate=1e-3, body="lean", token_budget=budget))
    found = lean.gradient(sequences, objective)
    assert passes
    monkeypatch.setattr(trainer_module, "shares_prefixes", lambda model: False)
    padded = Trainer(agent_of(kind, tied=tied), UpdateConfig(learning_rate=1e-3)).gradient(sequences, objective)
    assert float((found - padded).norm() / padded.norm()) < 3e-6


def test_frozen_parameters_get_no_gradient_and_the_others_their_own():
    agent, sequences = agent_of("llama"), grouped(3, 4)
    (batch,) = batches_of(sequences)
    lean_states(agent.model, batch).sum().backward()
    whole = {name: p.grad.clone() for name, p in agent.model.named_parameters() if p.grad is not None}
    agent.model.zero_grad()
    frozen = ("embed_tokens", "layers.0.self_attn.q_proj", "layers.1.input_layernorm")
    for name, parameter in agent.model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    lean_states(agent.model, batch).sum().backward()
    for name, parameter in agent.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, whole[name])
        else:
            assert parameter.grad is None


def test_every_node_asks_once_and_sees_its_own_prefix():
    (batch,) = batches_of(grouped(4, 6))
    tree = tree_of(batch)
    cells = cells_of(tree, heads=1, key_heads=1)
    assert len(cells.answers) == len(tree.tokens_N) == len(set(cells.answers.tolist()))
    seen_WCT = (cells.bias == 0).view(cells.rows, cells.width, cells.length)
    for node, answer in enumerate(cells.answers.tolist()):
        row, place = divmod(answer, cells.width)
        looked_at = cells.nodes_WT.view(cells.rows, cells.length)[row][seen_WCT[row, place]].tolist()
        assert int(cells.queries[answer]) == node == looked_at[-1]
        assert len(looked_at) == int(tree.depth_N[node]) + 1
        assert [int(tree.depth_N[n]) for n in looked_at] == list(range(len(looked_at)))


def test_what_it_does_not_fit_takes_the_models_own_code():
    (short,) = batches_of(grouped(2, 3))
    assert runs_lean(agent_of("llama").model, short)
    assert not runs_lean(tiny_agent("gpt2").model, short)
    assert not runs_lean(tiny_agent("granite").model, short)
    assert not runs_lean(tiny_agent("llama", hidden_act="gelu").model, short)
    (long,) = batches_of([TrainSequence((3,), (4,) * 300)])
    assert not runs_lean(agent_of("llama").model, long)
    changed = agent_of("llama").model
    changed.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: (output[0] * 2, *output[1:]))
    assert not runs_lean(changed, short)


@pytest.mark.parametrize("changes", [{"lora": LoraConfig(rank=2, alpha=4)}, {"gradient_checkpointing": True}])
def test_adapters_and_checkpointing_train_as_without_it(changes):
    sequences = grouped(3, 4)
    objective = sequence_objective(torch.linspace(-1, 1, len(sequences)), torch.full((len(sequences),), -4.0))
    found = [
        Trainer(agent_of("llama"), UpdateConfig(learning_rate=1e-3, body=body, **changes)).gradient(
            sequences, objective
        )
        for body in ("library", "lean")
    ]
    assert torch.equal(*found)
