"""The fused loss against the naive computation in float64, over random shapes, masks, chunks and heads."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_models import sequence_objective, token_objective

from hacrl_core.learning.fused import Gradients, Head, Objective, fused_linear_loss, fused_pass, plan_chunks
from hacrl_core.learning.fused.rowwise import negative_gradient_torch_
from tests.patience import patience


def naive(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    lengths: list[int],
    objective: Objective,
    temperature: float,
) -> torch.Tensor:
    """Whole logits, log-softmax, autograd."""
    logprobs = torch.log_softmax(head.logits(hidden) / temperature, -1).gather(1, targets[:, None])[:, 0]
    rows = logprobs.split(lengths)
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.bool) for n in lengths], batch_first=True)
    return objective(padded, mask, torch.arange(len(lengths)))[0]


def problem(
    seed: int, lengths: list[int], hidden: int, vocabulary: int, bias: bool, scale: float, softcap: float | None
) -> tuple:
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(sum(lengths), hidden, generator=g, dtype=torch.float64, requires_grad=True)
    w = torch.randn(vocabulary, hidden, generator=g, dtype=torch.float64, requires_grad=True)
    b = torch.randn(vocabulary, generator=g, dtype=torch.float64, requires_grad=True) if bias else None
    targets = torch.randint(vocabulary, (sum(lengths),), generator=g)
    advantage = torch.randn(len(lengths), generator=g, dtype=torch.float64)
    return h, Head(w, b, scale, softcap), targets, advantage


def objective_of(kind: str, advantage: torch.Tensor) -> Objective:
    if kind == "sequence":
        return sequence_objective(advantage, torch.full_like(advantage, -2.5))
    return token_objective(advantage, len(advantage))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=6),
    hidden=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    chunk=st.integers(1, 40),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.3]),
    softcap=st.sampled_from([None, 2.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    kind=st.sampled_from(["sequence", "token"]),
    seed=st.integers(0, 1000),
)
def test_gradients_equal_naive(lengths, hidden, vocabulary, chunk, bias, scale, softcap, temperature, kind, seed):
    h, head, targets, advantage = problem(seed, lengths, hidden, vocabulary, bias, scale, softcap)
    objective = objective_of(kind, advantage)
    inputs = [t for t in (h, head.weight_VH, head.bias_V) if t is not None]
    expected = naive(h, head, targets, lengths, objective, temperature)
    wanted = torch.autograd.grad(expected, inputs)
    # max_logits_mb=0 forces the two-pass split of every sequence longer than a chunk
    loss = fused_linear_loss(
        h, head, targets, lengths, objective, temperature=temperature, chunk_tokens=chunk, max_logits_mb=0
    )
    found = torch.autograd.grad(loss * 3.0, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got / 3.0, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradcheck_in_float64(kind, softcap):
    lengths = [3, 1, 6]
    h, head, targets, advantage = problem(1, lengths, 4, 11, True, 0.7, softcap)
    objective = objective_of(kind, advantage)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        plain = Head(weight, bias, head.scale, head.softcap)
        return fused_linear_loss(
            hidden, plain, targets, lengths, objective, temperature=1.3, chunk_tokens=4, max_logits_mb=0
        )

    assert torch.autograd.gradcheck(loss, (h, head.weight_VH, head.bias_V))


@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("chunk", [7, 64, None])
def test_float32_gradients_to_1e5_of_naive_float64(kind, chunk):
    lengths = [40, 3, 90, 17]
    h, head, targets, advantage = problem(3, lengths, 48, 700, False, 0.2, None)
    objective = objective_of(kind, advantage)
    inputs = (h, head.weight_VH)
    wanted = torch.autograd.grad(naive(h, head, targets, lengths, objective, 1.0), inputs)
    h32, w32 = (t.detach().float().requires_grad_() for t in inputs)
    loss = fused_linear_loss(
        h32, Head(w32, scale=0.2), targets, lengths, objective, chunk_tokens=chunk, max_logits_mb=0
    )
    for got, want in zip(torch.autograd.grad(loss, (h32, w32)), wanted, strict=True):
        assert got.dtype == torch.float32
        assert float((got - want).norm() / want.norm()) < 1e-5


def test_bfloat16_hidden_states_meet_a_float32_head():
    lengths = [5, 9]
    h, head, targets, advantage = problem(4, lengths, 16, 30, False, 1.0, None)
    half, weight = h.detach().bfloat16().requires_grad_(), head.weight_VH.detach().float()
    loss = fused_linear_loss(half, Head(weight), targets, lengths, objective_of("token", advantage))
    expected = naive(half.float(), Head(weight), targets, lengths, objective_of("token", advantage), 1.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_backward_twice_over_a_retained_graph():
    h, head, targets, advantage = problem(7, [4, 5], 6, 12, True, 1.0, None)
    loss = fused_linear_loss(h, head, targets, [4, 5], objective_of("token", advantage))
    inputs = (h, head.weight_VH, head.bias_V)
    first = [g.clone() for g in torch.autograd.grad(loss, inputs, retain_graph=True)]
    for once, twice in zip(first, torch.autograd.grad(loss, inputs), strict=True):
        torch.testing.assert_close(once, twice, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_entropy_equals_the_distributions():
    lengths = [6, 2]
    h, head, targets, _ = problem(5, lengths, 8, 20, True, 1.0, 4.0)
    chunks = plan_chunks(lengths, 20)
    outcome = fused_pass(h, head, targets, lengths, torch.arange(2), chunks, temperature=0.8, entropy=True)
    expected = torch.distributions.Categorical(logits=head.logits(h) / 0.8).entropy()
    torch.testing.assert_close(outcome.entropies_R, expected.detach(), rtol=1e-10, atol=1e-10)


def test_extreme_logits_keep_the_log_prob_finite_and_exact():
    logits = torch.tensor([[0.0, 500.0, -500.0], [1e4, 1e4, 0.0]])
    logprobs, _ = negative_gradient_torch_(logits, torch.tensor([2, 0]))
    np.testing.assert_allclose(logprobs.numpy(), [-1000.0, -np.log(2)], rtol=1e-6)


def test_clipped_chunks_cost_no_gradient_products():
    h, head, targets, _ = problem(6, [4], 8, 20, False, 1.0, None)
    gradients = Gradients(torch.zeros_like(h), torch.zeros_like(head.weight_VH), None)

    def flat(
        logprobs: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (logprobs * 0.0).sum(), {}

    outcome = fused_pass(
        h, head, targets, [4], torch.arange(1), plan_chunks([4], 20), objective=flat, gradients=gradients
    )
    assert not outcome.has_gradient
    assert not gradients.hidden_RH.any()


@pytest.mark.parametrize(
    ("lengths", "chunk", "pieces"),
    [([3, 3, 3], 6, [2, 1]), ([20, 2, 2], 6, [4, 2]), ([2, 20, 2], 6, [1, 4, 1]), ([], 6, [])],
)
def test_chunks_hold_whole_sequences_in_order(lengths, chunk, pieces):
    chunks = plan_chunks(lengths, 1 << 20, chunk_tokens=chunk, max_logits_mb=0)
    assert [len(c.pieces) if len(c.pieces) > 1 else c.last - c.first for c in chunks] == pieces
    covered = [i for c in chunks for piece in c.pieces for i in range(piece.start, piece.stop)]
    assert covered == list(range(sum(lengths)))


_INTERPRETED = """
import torch
from hacrl_core.learning.fused.rowwise import negative_gradient_torch_
from hacrl_core.learning.fused.triton_rowwise import negative_gradient_triton_
torch.manual_seed(0)
for vocabulary in (53, 5000):
    for amplitude in (None, 3.0):
        logits = torch.randn(2, vocabulary) * 4
        logits[0] *= 30
        targets = torch.randint(vocabulary, (2,))
        ours, other = logits.clone(), torch.zeros(2, vocabulary + 3)[:, :vocabulary].copy_(logits)
        expected = negative_gradient_torch_(ours, targets, amplitude=amplitude, entropy=True)
        found = negative_gradient_triton_(other, targets, amplitude=amplitude, entropy=True)
        for a, b in zip((ours, *expected), (other, *found)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=4e-6)
assert negative_gradient_triton_(logits[:1], targets[:1])[1] is None
print("equal")
"""


def test_triton_kernel_equals_the_torch_path_through_the_interpreter():
    """A process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"
