"""The compiled kernels of the lean body against their twins in torch, which run in float64 here."""

import pytest
import torch
from test_lean import SEQUENCES, batches_of

from hacrl_core.learning.lean import native
from hacrl_core.learning.lean.attention import attend, cells_of, tree_of
from hacrl_core.learning.lean.body import gated, normed
from hacrl_core.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler: the kernels cannot be built")


@pytest.mark.parametrize("channels", [6, 16, 24, 32, 40])
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_compiled_attention_is_that_of_its_twin(sequences, channels):
    """The twin in float64. Every node, every head and every gradient; sizes that fill vectors and sizes that do not."""
    (batch,) = batches_of(sequences)
    tree, heads, key_heads = tree_of(batch), 6, 2
    nodes, generator = len(tree.tokens_N), torch.Generator().manual_seed(1)
    joined = torch.randn(nodes, heads + 2 * key_heads, channels, generator=generator).requires_grad_()
    angles_TD = torch.polar(torch.ones(99, channels // 2), 6 * torch.rand(99, channels // 2, generator=generator))
    paths = native.paths_of(batch, tree, heads, key_heads)
    found_NC = native.attend(joined, torch.view_as_real(angles_TD), paths, 0.3)
    wide = joined.detach().double().requires_grad_()
    turn = torch.ones(nodes, heads + 2 * key_heads, channels // 2, dtype=torch.complex128)
    turn[:, : heads + key_heads] = angles_TD[torch.from_numpy(tree.depth_N)][:, None].to(torch.complex128)
    expected_NC = attend(wide, turn, cells_of(batch, tree, heads, key_heads), 0.3)
    torch.testing.assert_close(found_NC.double(), expected_NC, rtol=1e-5, atol=1e-5)
    slope_NC = torch.randn(found_NC.shape, generator=generator)
    (found,) = torch.autograd.grad(found_NC, joined, slope_NC)
    (expected,) = torch.autograd.grad(expected_NC, wide, slope_NC.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_compiled_norm_and_gate_have_the_gradients_of_their_twins():
    x, gate, up = (3 * torch.randn(7, 5, 24) for _ in range(3))
    for function, inputs in ((lambda x: normed(x, 1e-3), (x,)), (gated, (gate, up))):
        leaves, wide = ([t.to(d).requires_grad_() for t in inputs] for d in (torch.float32, torch.float64))
        found, expected = function(*leaves), function(*wide)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        slope = torch.randn_like(found)
        for ours, theirs in zip(
            torch.autograd.grad(found, leaves, slope), torch.autograd.grad(expected, wide, slope.double()), strict=True
        ):
            torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=1e-5)
