"""The random streams and the draws: uniform, independent, and with the frequencies of the softmax."""

import numpy as np
import pytest
import torch
from scipy import stats

from hacrl_core.generation.builtin import sampling
from hacrl_core.generation.builtin.sampling import draw, stream_keys, uniforms
from hacrl_core.generation.protocols import SamplingParams
from hacrl_core.native import kernels


def stream(seed: int, count: int) -> np.ndarray:
    return uniforms(np.repeat(stream_keys(np.array([seed])), count), np.arange(count))


def test_streams_are_uniform_also_across_neighbouring_seeds_and_positions() -> None:
    along = stream(3, 200_000)
    across = uniforms(stream_keys(np.arange(200_000)), np.zeros(200_000, dtype=np.int64))
    for numbers in (along, across):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01


def test_a_number_depends_on_its_seed_and_position_only() -> None:
    keys = stream_keys(np.array([5, 2**63 - 1, 0]))
    together = uniforms(keys, np.array([7, 0, 12]))
    alone = [stream(5, 8)[7], stream(2**63 - 1, 1)[0], stream(0, 13)[12]]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.05, 0.4, 0.0, 0.25, 0.1, 0.2]),
        (SamplingParams(temperature=0.5), [0.0025, 0.16, 0.0, 0.0625, 0.01, 0.04]),
        (SamplingParams(top_k=3), [0, 0.4, 0, 0.25, 0, 0.2]),
        (SamplingParams(top_p=0.7), [0, 0.4, 0, 0.25, 0, 0.2]),  # 0.65 is not enough: the token crossing 0.7 stays
        (SamplingParams(top_k=2, top_p=0.6), [0, 0.4, 0, 0, 0, 0]),  # of what top-k left, 0.4 is 0.615
    ],
)
def test_frequencies_match_the_distribution(params: SamplingParams, expected: list[float]) -> None:
    """Chi-square against the distribution asked for; the stated log-probs are its logarithms."""
    raw = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.1, 0.2])
    count = 40_000
    logits = (raw.log() + 3).expand(count, 6)
    drawn = draw(logits, torch.from_numpy(stream(11, count)), params)
    wanted = np.array(expected) / sum(expected)
    frequencies = np.bincount(drawn.tokens_B.numpy(), minlength=6)
    possible = wanted > 0
    assert not frequencies[~possible].any()
    if possible.sum() > 1:
        assert stats.chisquare(frequencies[possible], count * wanted[possible]).pvalue > 1e-3
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(drawn.sampling_logprobs_B, np.log(wanted)[drawn.tokens_B], atol=2e-6)
        np.testing.assert_allclose(drawn.policy_logprobs_B, np.log(raw.numpy())[drawn.tokens_B], atol=2e-6)


def test_the_ends_of_the_unit_interval_give_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, 4)
    drawn = draw(logits, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64), SamplingParams())
    assert drawn.tokens_B.tolist() == [1, 2]


def test_draws_near_a_boundary_are_flagged() -> None:
    logits = torch.zeros(3, 4)
    drawn = draw(logits, torch.tensor([0.25 + 1e-8, 0.25 - 1e-8, 0.3], dtype=torch.float64), SamplingParams())
    assert drawn.ambiguous_B.tolist() == [True, True, False]
    tie = torch.tensor([[1.0, 1.0 - 1e-7, 0.0], [2.0, 1.0, 0.0]])
    assert draw(tie, torch.zeros(2, dtype=torch.float64), SamplingParams(temperature=0)).ambiguous_B.tolist() == [
        True,
        False,
    ]
    assert draw(tie, torch.full((2,), 0.1).double(), SamplingParams(top_k=1)).ambiguous_B.tolist() == [True, False]


@pytest.mark.skipif(kernels("decode") is None, reason="no C compiler: the kernels cannot be built")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocabulary", [1, 2, 9, 256, 3000])
def test_compiled_draws_are_those_of_torch(
    vocabulary: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same token wherever rounding could not have tipped it, and the same log-probs."""
    logits = 3 * torch.randn(2000, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    logits[::7, 0] = -torch.inf if vocabulary > 1 else 0.0
    numbers, params = torch.from_numpy(stream(5, 2000)), SamplingParams(temperature=temperature)
    compiled = draw(logits, numbers, params)
    monkeypatch.setattr(sampling, "kernels", lambda name: None)
    plain = draw(logits, numbers, params)
    sure = ~(compiled.ambiguous_B | plain.ambiguous_B)
    assert sure.float().mean() > 0.9
    assert torch.equal(compiled.tokens_B[sure], plain.tokens_B[sure])
    for name in ("policy_logprobs_B", "sampling_logprobs_B"):
        one, other = getattr(compiled, name)[sure], getattr(plain, name)[sure]
        assert one.dtype == other.dtype == torch.float64
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_is_no_draw(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    with pytest.raises(RuntimeError):
        draw(logits, torch.zeros(3, dtype=torch.float64), SamplingParams())
