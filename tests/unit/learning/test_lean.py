"""The lean body against the model's own code and autograd: functions, states, gradients, and where it must not run.

Everything is asked of the compiled kernels and of their twin in torch.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from learning_models import naive_logprobs, random_sequences, sequence_objective, tiny_agent
from test_prefixes import grouped

from hacrl_core.agents.agent import Agent
from hacrl_core.config.training import LoraConfig, UpdateConfig
from hacrl_core.learning import prefixes
from hacrl_core.learning.lean import lean_states, native, runs_lean
from hacrl_core.learning.lean.attention import attend, cells_of, tree_of
from hacrl_core.learning.lean.body import gated, normed
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import Microbatch, TrainSequence, microbatches
from hacrl_core.learning.trainer import Trainer
from hacrl_core.native import find_compiler

KINDS = ["llama", "mistral", "qwen3"]
SEQUENCES = {
    "groups": grouped(4, 5),
    "nothing shared": random_sequences(6, seed=2),
    "several blocks": [*grouped(2, 3), *random_sequences(9, seed=7, longest=60)],
    "single tokens": [TrainSequence((3, 4), (5,)), TrainSequence((3, 4), (6,)), TrainSequence((7,), (8,))],
    "one beginning": [TrainSequence((3, 4), (5,) * 9 + (6 + n,)) for n in range(20)],
}


@pytest.fixture(params=["native", "torch"], autouse=True)
def twin(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif find_compiler() is None:
        pytest.skip("no C compiler: the kernels cannot be built")


def agent_of(kind: str, **changes: object) -> Agent:
    """A model whose norms are not 1, with fewer key heads than heads."""
    windows = {"sliding_window": None} if kind == "mistral" else {}
    agent = tiny_agent(kind, **{"num_key_value_heads": 2, "num_attention_heads": 4, **windows, **changes})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in agent.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return agent


def batches_of(sequences: list[TrainSequence], budget: int = 10_000) -> list[Microbatch]:
    return microbatches(sequences, budget, pad_token_id=2, share_prefixes=True)


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes through the lean body."""
    seen: list[Microbatch] = []
    monkeypatch.setattr(prefixes, "lean_states", lambda model, batch: seen.append(batch) or lean_states(model, batch))
    return seen


def test_norm_and_gate_have_the_gradients_of_their_formulas():
    x, gate, up = (torch.randn(5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    torch.testing.assert_close(normed(x, 1e-3), x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3))
    assert torch.autograd.gradcheck(lambda x: normed(x, 1e-3), x)
    torch.testing.assert_close(gated(gate, up), F.silu(gate) * up)
    assert torch.autograd.gradcheck(gated, (gate, up))


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_attention_is_that_of_whole_rows(sequences):
    """Values and gradients in float64, node by node, with two query heads for each key head."""
    (batch,) = batches_of(sequences)
    tree = tree_of(batch)
    cells, nodes = cells_of(batch, tree, 4, 2), len(tree.tokens_N)
    generator = torch.Generator().manual_seed(1)
    joined = torch.randn(nodes, 8, 6, dtype=torch.float64, generator=generator).requires_grad_()
    turn = torch.ones(nodes, 8, 3, dtype=torch.complex128)
    turn[:, :6] = torch.polar(torch.ones(nodes, 6, 3).double(), torch.rand(nodes, 1, 3, generator=generator).double())
    turned = torch.view_as_real(torch.view_as_complex(joined.view(nodes, 8, 3, 2)) * turn).reshape(nodes, 8, 6)
    place_BT = tree.place_BT
    expected = []
    for node, depth in enumerate(tree.depth_N.tolist()):
        row = int(tree.cell_N[node]) // place_BT.shape[1]
        prefix = turned[torch.from_numpy(place_BT[row, : depth + 1])]
        for head in range(4):
            scores = prefix[:, 4 + head // 2] @ turned[node, head] * 0.3
            expected.append(scores.softmax(0) @ prefix[:, 6 + head // 2])
    expected_NC = torch.stack(expected).view(nodes, -1)
    found_NC = attend(joined, turn, cells, 0.3)
    torch.testing.assert_close(found_NC, expected_NC)
    slope_NC = torch.randn(found_NC.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(*(torch.autograd.grad(y, joined, slope_NC)[0] for y in (found_NC, expected_NC)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_scores_equal_the_models_own_logits(kind, sequences, passes):
    agent = agent_of(kind)
    scores = score_sequences(agent, sequences, token_budget=120)
    assert passes
    for sequence, score in zip(sequences, scores, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(score, naive_logprobs(agent.model, sequence).numpy(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("changes", [{"tied": True}, {"tied": False, "token_budget": 60}])
def test_gradients_equal_those_of_autograd(kind, sequences, changes, passes, monkeypatch):
    advantage_B = torch.tensor(np.random.default_rng(3).normal(size=len(sequences)))
    objective = sequence_objective(advantage_B, torch.full((len(sequences),), -4.0))
    config = UpdateConfig(learning_rate=1e-3, token_budget=changes.get("token_budget", 4096))
    found = Trainer(agent_of(kind, tied=changes["tied"]), config).gradient(sequences, objective)
    assert passes
    monkeypatch.setattr("hacrl_core.learning.trainer.shares_prefixes", lambda model: False)
    monkeypatch.setattr(prefixes, "runs_lean", lambda model, batch: False)
    padded = Trainer(agent_of(kind, tied=changes["tied"]), config).gradient(sequences, objective)
    assert float((found - padded).norm() / padded.norm()) < 3e-6


def test_a_pass_gives_the_same_bits_with_and_without_gradients():
    agent = agent_of("llama")
    for batch in batches_of([*grouped(3, 4), *random_sequences(5)], budget=100):
        with torch.no_grad():
            scored = lean_states(agent.model, batch)
        assert torch.equal(scored, lean_states(agent.model, batch).detach())


def test_frozen_parameters_get_no_gradient_and_the_others_their_own():
    agent = agent_of("llama")
    (batch,) = batches_of(grouped(3, 4))
    lean_states(agent.model, batch).sum().backward()
    whole = {name: p.grad.clone() for name, p in agent.model.named_parameters() if p.grad is not None}
    agent.model.zero_grad()
    frozen = ("embed_tokens", "layers.0.self_attn.q_proj", "layers.1.input_layernorm")
    for name, parameter in agent.model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    lean_states(agent.model, batch).sum().backward()
    for name, parameter in agent.model.named_parameters():
        if name in whole and parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, whole[name])
        else:
            assert parameter.grad is None


def test_what_it_does_not_fit_takes_the_models_own_code():
    (short,) = batches_of(grouped(2, 3))
    assert runs_lean(agent_of("llama").model, short)
    assert not runs_lean(tiny_agent("gpt2").model, short)
    assert not runs_lean(tiny_agent("granite").model, short)
    assert not runs_lean(tiny_agent("llama", hidden_act="gelu").model, short)
    assert not runs_lean(tiny_agent("llama", attention_bias=True).model, short)
    assert not runs_lean(tiny_agent("llama").model.double(), short)
    windowed = tiny_agent("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert not runs_lean(windowed.model, short)
    (long,) = batches_of([TrainSequence((3,), (4,) * 300)])
    assert not runs_lean(agent_of("llama").model, long)
    with torch.autocast("cpu", torch.bfloat16):
        assert not runs_lean(agent_of("llama").model, short)
    changed = agent_of("llama").model
    changed.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: (output[0] * 2, *output[1:]))
    assert not runs_lean(changed, short)


@pytest.mark.parametrize("changes", [{"lora": LoraConfig(rank=2, alpha=4)}, {"gradient_checkpointing": True}])
def test_adapters_and_checkpointing_take_the_models_own_code(changes, passes):
    sequences = grouped(3, 4)
    objective = sequence_objective(torch.linspace(-1, 1, len(sequences)), torch.full((len(sequences),), -4.0))
    Trainer(agent_of("llama"), UpdateConfig(learning_rate=1e-3, **changes)).gradient(sequences, objective)
    assert not passes
