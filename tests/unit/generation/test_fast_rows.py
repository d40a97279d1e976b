"""The hand-written step against the model's own forward: rows that join and leave, prompts that are shared, long ones,
padding, both forms of the weights, the native step and its twin in torch.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hacrl_core.agents.agent import load_agent
from hacrl_core.generation.builtin import BuiltinEngine, fast, weights
from hacrl_core.generation.builtin.fast import FastDecoder
from hacrl_core.generation.builtin.sampling import AMBIGUITY_MARGIN
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.native import find_compiler

Checkpoint = Callable[[str], Path]
KINDS = ["llama", "llama-biases", "qwen2", "qwen3"]  # all with grouped heads


@pytest.fixture(params=["native", "torch"], autouse=True)
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both twins of the step; the native one where the machine has a C compiler."""
    if request.param == "torch":
        monkeypatch.setattr(fast, "native_kernels", lambda weights: None)
    elif find_compiler() is None:
        pytest.skip("no C compiler: the native step cannot be built")
    return str(request.param)


def decoder_of(model: PreTrainedModel, storage: torch.Tensor | None = None) -> FastDecoder:
    found = weights.decoder_weights(model, 128)
    assert found is not None
    return FastDecoder(model, found, 0, storage)


class Rows:
    """A decoder, and the tokens of its live rows, which the model's own forward reads from their beginning."""

    def __init__(self, model: PreTrainedModel, storage: torch.Tensor | None = None) -> None:
        self.model, self.decoder = model, decoder_of(model, storage)
        self.written: list[list[int]] = []
        self.rng = np.random.default_rng(2)
        self.error = 0.0

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(2, 33, length).tolist())

    def admit(self, prompts: list[tuple[int, ...]], rows: list[int]) -> None:
        self.decoder.admit(self.decoder.prefill(prompts), rows)
        self.written += [list(prompts[row]) for row in rows]

    def keep(self, rows: list[int]) -> None:
        self.decoder.keep(rows)
        self.written = [self.written[row] for row in rows]

    def step(self, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            tokens = self.rng.integers(2, 33, len(self.written)).tolist()
            logits_BV = self.decoder.step(torch.tensor(tokens))
            for row, token in enumerate(tokens):
                self.written[row].append(token)
                alone = self.model(input_ids=torch.tensor([self.written[row]]), use_cache=False).logits[0, -1]
                self.error = max(self.error, float((logits_BV[row] - alone).abs().max()))
        return logits_BV


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rows_that_join_and_leave_are_those_of_the_models_own_forward(
    checkpoint: Checkpoint, kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr(weights, "PACKED_BYTES", 0)
    rows = Rows(load_agent(checkpoint(kind)).model)
    assert (rows.decoder.weights.turns_TD is not None) == packed
    first = [rows.prompt(length) for length in (9, 40, 3, 16)]
    rows.admit(first, [0, 0, 0, 1, 2, 2, 3])  # shared, alone, too short to be shared, alone
    rows.step(3)
    rows.keep([0, 6, 2, 3])
    rows.step(15)  # beyond the first room of a slot
    rows.admit([rows.prompt(70), rows.prompt(12)], [1, 0, 1] + [0] * 9)  # more than one group of a prompt
    rows.step(2)
    rows.keep([14, 1, 5, 9, 10])
    rows.step(2)
    rows.keep([0, 1])  # below MIN_ROWS: the step pads
    rows.step(18)
    rows.admit([rows.prompt(8)], [0, 0])
    rows.step(2)
    rows.keep([2, 1, 0])  # any order
    rows.step(1)
    rows.keep([])
    rows.admit(first, [3, 3])
    rows.step(1)
    assert rows.error < 2e-5


@torch.inference_mode()
def test_what_other_weights_left_in_memory_is_not_read(checkpoint: Checkpoint) -> None:
    model = load_agent(checkpoint("llama")).model
    rows = Rows(model, torch.full((1 << 16,), float("nan")))
    rows.admit([rows.prompt(9), rows.prompt(5)], [0, 0, 1, 1, 1])
    rows.step(2)
    rows.keep([4, 1])
    rows.step(40)
    assert rows.error < 2e-5


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_noise_between_batches_is_far_below_the_margin_of_ambiguous_draws(checkpoint: Checkpoint, kind: str) -> None:
    model = load_agent(checkpoint(kind)).model
    rng = np.random.default_rng(3)
    prompt = tuple(rng.integers(2, 33, 20).tolist())
    others = [tuple(rng.integers(2, 33, length).tolist()) for length in (5, 11, 30)]
    found = []
    for company in ([], [0], [0] * 7, [1, 2, 3], [0, 0, 0, 1, 1, 2, 3, 3] * 5):
        decoder = decoder_of(model)
        decoder.admit(decoder.prefill([prompt, *others]), [0, *company])
        tokens = [torch.full((1 + len(company),), 3 + step) for step in range(12)]
        found.append(torch.stack([decoder.step(token)[0].softmax(-1) for token in tokens]))
    assert max(float((one - found[0]).abs().max()) for one in found) < AMBIGUITY_MARGIN / 2


def test_groups_that_share_their_prompts_write_what_each_row_writes_alone(checkpoint: Checkpoint) -> None:
    rng = np.random.default_rng(4)
    prompts = [tuple(rng.integers(2, 33, length).tolist()) for length in (12, 30, 5, 60, 9)]
    requests = [
        GenerationRequest(f"{p}/{g}", prompt, 100 * p + g) for p, prompt in enumerate(prompts) for g in range(11)
    ]
    params = SamplingParams(max_tokens=40)
    together = BuiltinEngine(batch_size=24).generate(checkpoint("qwen3"), "d", requests, params)
    engine = BuiltinEngine()
    alone = [engine.generate(checkpoint("qwen3"), "d", [request], params)[0] for request in requests]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_prompts_of_any_lengths_are_read_as_the_model_reads_them(
    checkpoint: Checkpoint, kind: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_agent(checkpoint(kind)).model
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(2, 33, length).tolist()) for length in (1, 40, 7, 16, 90)]
    decoder = decoder_of(model)
    found = decoder.prefill(prompts)
    compiled = step == "native" and kind != "llama-biases"  # it has biases behind the attention
    assert (decoder.logits_alone(prompts[1]) is not None) == compiled
    monkeypatch.setattr(fast, "native_prefill", lambda kernels, weights, prompts: None)
    own = decoder.prefill(prompts)
    torch.testing.assert_close(found.logits_PV, own.logits_PV, rtol=0, atol=2e-5)
    for row, length in enumerate(found.lengths):
        assert length == len(prompts[row])
        torch.testing.assert_close(
            found.cache[:, :, row, :, :length], own.cache[:, :, row, :, :length], rtol=1e-5, atol=2e-5
        )


@pytest.mark.parametrize("step", ["native"], indirect=True)
@torch.inference_mode()
def test_compiled_logits_alone_know_no_company(checkpoint: Checkpoint) -> None:
    decoder = decoder_of(load_agent(checkpoint("qwen3")).model)
    ids = tuple(range(3, 30))
    alone = decoder.logits_alone(ids)
    rows = Rows(decoder.model)
    rows.admit([rows.prompt(9), rows.prompt(30)], [0, 0, 1])
    rows.step(3)
    assert alone is not None
    again = rows.decoder.logits_alone(ids)
    assert again is not None
    assert torch.equal(alone, again)
    assert rows.decoder.logits_alone(range(3, 30 + fast.LENGTH_STEP * 20)) is None  # longer than it is made for


@torch.inference_mode()
def test_a_position_without_angles_is_an_error_and_not_read(checkpoint: Checkpoint) -> None:
    model = load_agent(checkpoint("llama")).model
    few = weights.decoder_weights(model, 14)
    assert few is not None
    decoder = FastDecoder(model, few, 0)
    decoder.admit(decoder.prefill([tuple(range(3, 15))]), [0, 0])
    for _ in range(2):
        decoder.step(torch.tensor([5, 6]))
    with pytest.raises(IndexError):
        decoder.step(torch.tensor([5, 6]))
