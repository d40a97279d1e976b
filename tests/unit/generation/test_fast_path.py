"""The hand-written step: taken where it should be, right where norms and biases are not those of a fresh model, proved
twice.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hacrl_core.agents.agent import Agent, load_agent
from hacrl_core.agents.checkpoints import save_model
from hacrl_core.generation.builtin import BuiltinEngine, fast
from hacrl_core.generation.builtin import engine as engine_module
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


def noisy(model: PreTrainedModel, size: float) -> None:
    """Let the model's forward without a cache differ from all others, as another order of summation does."""
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if kwargs.get("use_cache") is False:
            places = torch.arange(out.logits.shape[-1], device=out.logits.device)
            out.logits += size * torch.sin(places.float())
        return out

    model.forward = changed


def test_noise_of_the_models_own_forward_is_no_reason_to_refuse_the_step(checkpoint: Checkpoint) -> None:
    model = load_agent(checkpoint("llama")).model
    noisy(model, 4e-4)
    error, allowed = fast._probe(decoder_of(model))
    assert 1e-4 < error < allowed < 3 * error


def decoder_of(model: PreTrainedModel, **changes: Any) -> FastDecoder:
    weights = decoder_weights(model, 128)
    assert weights is not None
    return FastDecoder(model, replace(weights, **changes), 0)


def test_a_fault_of_the_step_as_small_as_that_noise_is_found(checkpoint: Checkpoint) -> None:
    model = load_agent(checkpoint("llama")).model
    weights = decoder_weights(model, 128)
    assert weights is not None
    error, allowed = fast._probe(decoder_of(model, epsilon=weights.epsilon + 4e-6))
    assert 1e-4 < error < 3e-3
    assert allowed < error / 3


def test_noise_beyond_any_rounding_is_refused_whoever_makes_it(checkpoint: Checkpoint) -> None:
    model = load_agent(checkpoint("llama")).model
    noisy(model, 1e-2)
    error, allowed = fast._probe(decoder_of(model))
    assert allowed < error


class LargestTensor(TorchDispatchMode):
    """The size of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_settling_a_draw_takes_the_memory_of_one_row_of_logits(
    checkpoint: Checkpoint, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = load_agent(checkpoint(kind))
    ids = [3 + place % 20 for place in range(100)]
    vocabulary = agent.model.config.vocab_size
    with torch.inference_mode():
        head = agent.model.get_output_embeddings()
        rows: list[int] = []
        head.register_forward_hook(lambda module, given, out: rows.append(out.numel() // vocabulary))
        whole = engine_module._logits_alone(agent, ids)
        assert rows == [100]  # a few numbers: as always, bit for bit
        monkeypatch.setattr(engine_module, "WHOLE_LOGITS", 99 * vocabulary)
        last = engine_module._logits_alone(agent, ids)
        assert rows == [100, 1]
    torch.testing.assert_close(last, whole, atol=1e-5, rtol=0)


def test_settling_a_draw_of_a_large_vocabulary_makes_no_tensor_of_all_positions() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60_000,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    agent = Agent(LlamaForCausalLM(config).eval(), None, (1,), Path("large"))
    with torch.inference_mode(), LargestTensor() as seen:
        assert engine_module._logits_alone(agent, list(range(200))).shape == (1, 60_000)
    assert seen.largest < 20 * 60_000  # the head's weight; all positions would be 200 × 60,000
