"""The hand-written step: taken where it should be, right where norms and biases are not those of a fresh model, proved
twice.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hacrl_core.agents.agent import load_agent
from hacrl_core.agents.checkpoints import save_model
from hacrl_core.generation.builtin import BuiltinEngine, fast
from hacrl_core.generation.builtin.decoder import GenericDecoder
from hacrl_core.generation.builtin.fast import FastDecoder, build_fast_decoder
from hacrl_core.generation.builtin.weights import DecoderWeights, decoder_weights
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence

Checkpoint = Callable[[str], Path]
REQUESTS = [
    GenerationRequest(f"{p}/{g}", tuple(range(3 + p, 6 + 3 * p)), 10 * p + g) for p in range(4) for g in range(4)
]
PARAMS = SamplingParams(max_tokens=24)


@pytest.mark.parametrize("kind", ["llama", "llama-biases", "mistral", "qwen2", "qwen3"])
def test_fast_log_probs_match_the_scoring_pass(checkpoint: Checkpoint, kind: str) -> None:
    folder = checkpoint(kind)
    agent = load_agent(folder)
    norms = [p.detach() for n, p in agent.model.named_parameters() if "norm" in n]
    biases = [p.detach() for n, p in agent.model.named_parameters() if n.endswith("bias")]
    assert all(float((norm - 1).abs().mean()) > 0.1 for norm in norms)
    assert all(float(bias.abs().mean()) > 0.05 for bias in biases)
    assert len(biases) == {"qwen2": 6, "llama-biases": 14}.get(kind, 0)
    engine = BuiltinEngine(batch_size=6)
    got = engine.generate(folder, "d", REQUESTS, PARAMS)
    assert engine._loaded is not None
    assert isinstance(engine._loaded.decoder, FastDecoder)
    sequences = [TrainSequence(r.prompt_token_ids, g.token_ids) for r, g in zip(REQUESTS, got, strict=True)]
    for ours, scored in zip(got, score_sequences(agent, sequences, token_budget=512), strict=True):
        np.testing.assert_allclose(ours.policy_logprobs, scored, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["gpt2", "mistral-window"])
def test_other_shapes_go_through_transformers(checkpoint: Checkpoint, kind: str) -> None:
    agent = load_agent(checkpoint(kind))
    assert build_fast_decoder(agent.model, agent.pad_token_id, agent.context_length) is None


def test_the_first_two_sets_of_weights_are_proved_and_no_more(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved: list[FastDecoder] = []
    probe = fast._probe

    def counted(decoder: FastDecoder) -> tuple[float, float]:
        proved.append(decoder)
        return probe(decoder)

    monkeypatch.setattr(fast, "_probe", counted)
    agent, other = load_agent(checkpoint("qwen2")), load_agent(checkpoint("qwen2"))
    counts = []
    for model in [agent.model] * 4 + [other.model]:
        assert build_fast_decoder(model, 0, 128) is not None
        counts.append(len(proved))
    assert counts == [1, 2, 2, 2, 3]


def test_a_step_that_fails_its_proof_is_tried_on_every_set_of_weights_and_never_used(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "_probe", lambda _: (1.0, 1e-5))
    model = load_agent(checkpoint("llama")).model
    assert [build_fast_decoder(model, 0, 128) for _ in range(4)] == [None] * 4


def test_a_fault_that_fresh_norms_hide_is_found_on_the_next_weights(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_norm(model: PreTrainedModel, context_length: int) -> DecoderWeights | None:
        weights = decoder_weights(model, context_length)
        return None if weights is None else replace(weights, final_norm=torch.ones_like(weights.final_norm))

    fresh, trained = tmp_path / "fresh", tmp_path / "trained"
    agent = load_agent(checkpoint("llama, fresh"))
    save_model(agent, fresh)
    with torch.no_grad():
        agent.model.model.norm.weight.mul_(1.01)
    save_model(agent, trained)
    wanted = BuiltinEngine().generate(trained, "two", REQUESTS, PARAMS)
    monkeypatch.setattr(fast, "decoder_weights", without_norm)
    engine = BuiltinEngine()
    engine.generate(fresh, "one", REQUESTS, PARAMS)
    assert engine._loaded is not None
    model = engine._loaded.agent.model
    assert isinstance(engine._loaded.decoder, FastDecoder)
    with caplog.at_level(logging.WARNING):
        got = engine.generate(trained, "two", REQUESTS, PARAMS)
    assert engine._loaded.agent.model is model  # reloaded, not built anew
    assert isinstance(engine._loaded.decoder, GenericDecoder)
    assert "off the model's own forward" in caplog.text
    assert [g.token_ids for g in got] == [g.token_ids for g in wanted]
