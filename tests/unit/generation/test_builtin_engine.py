"""The built-in engine against full forwards, alone and in company."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hacrl_core.agents.agent import load_agent
from hacrl_core.agents.checkpoints import save_model
from hacrl_core.config.generation import BuiltinEngineConfig
from hacrl_core.errors import EngineError
from hacrl_core.generation.builtin import BuiltinEngine
from hacrl_core.generation.builtin.fast import PROBED, _move, build_fast_decoder
from hacrl_core.generation.protocols import Generation, GenerationRequest, SamplingParams

KINDS = ["llama", "qwen3", "gpt2", "mistral-window"]
Checkpoint = Callable[[str], Path]


def requests_of(prompts: int, samples: int, seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [
        GenerationRequest(f"{p}/{g}", prompt, seed=1000 * p + g)
        for p in range(prompts)
        for prompt in [tuple(rng.integers(2, 30, size=rng.integers(1, 20)).tolist())]
        for g in range(samples)
    ]


def run(folder: Path, requests: list[GenerationRequest], params: SamplingParams, **options: object) -> list[Generation]:
    batch_size = options.pop("batch_size", 256)
    engine = BuiltinEngine(BuiltinEngineConfig(**options), batch_size=batch_size)
    try:
        return engine.generate(folder, "digest", requests, params)
    finally:
        engine.close()


@cache
def cached_model(folder: Path) -> PreTrainedModel:
    return load_agent(folder).model


def forward_logprobs(folder: Path, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
    model = cached_model(folder)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_match_a_full_forward(checkpoint: Checkpoint, kind: str, fast_path: bool) -> None:
    folder, requests = checkpoint(kind), requests_of(5, 3)
    params = SamplingParams(max_tokens=24, temperature=0.7, top_k=9, top_p=0.8)
    for request, got in zip(requests, run(folder, requests, params, batch_size=4, fast_path=fast_path), strict=True):
        raw = forward_logprobs(folder, request.prompt_token_ids, got.token_ids)
        for t, token in enumerate(got.token_ids):
            assert got.policy_logprobs[t] == pytest.approx(float(raw[t, token]), abs=1e-5)
            assert got.sampling_logprobs[t] == pytest.approx(reference_filtered(raw[t], params)[token], abs=1e-5)


def reference_filtered(logprobs_V: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """Temperature, top-k, top-p with Python loops; log-probs of the tokens that stay."""
    weights = sorted(((float(lp) / params.temperature, i) for i, lp in enumerate(logprobs_V)), reverse=True)
    weights = [(np.exp(w), i) for w, i in weights[: params.top_k or None]]
    total, before, kept = sum(w for w, _ in weights), 0.0, []
    for weight, i in weights:
        if before / total >= params.top_p:
            break
        kept.append((weight, i))
        before += weight
    return {i: float(np.log(w / before)) for w, i in kept}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [SamplingParams(max_tokens=40), SamplingParams(max_tokens=25, top_p=0.9, top_k=5)])
def test_a_rollout_depends_on_its_seed_and_prompt_only(
    checkpoint: Checkpoint, kind: str, params: SamplingParams
) -> None:
    folder, requests = checkpoint(kind), requests_of(9, 4)
    expected = {g.request_id: g for g in run(folder, requests, params)}
    order = np.random.default_rng(1).permutation(len(requests))
    for batch_size, chosen in (
        (1, requests[2:5]),
        (3, requests),
        (8, [requests[i] for i in order]),
        (64, requests[::5]),
    ):
        for got in run(folder, chosen, params, batch_size=batch_size):
            assert got.token_ids == expected[got.request_id].token_ids
            assert got.text == expected[got.request_id].text
            np.testing.assert_allclose(got.policy_logprobs, expected[got.request_id].policy_logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_draw_the_same_tokens(checkpoint: Checkpoint, kind: str) -> None:
    folder, requests, params = checkpoint(kind), requests_of(6, 4), SamplingParams(max_tokens=30)
    fast = run(folder, requests, params, batch_size=7)
    generic = run(folder, requests, params, batch_size=7, fast_path=False)
    assert [g.token_ids for g in fast] == [g.token_ids for g in generic]


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_argmax(checkpoint: Checkpoint, kind: str, fast_path: bool) -> None:
    folder, requests = checkpoint(kind), requests_of(4, 1)
    params = SamplingParams(max_tokens=20, temperature=0)
    for request, got in zip(requests, run(folder, requests, params, fast_path=fast_path), strict=True):
        raw = forward_logprobs(folder, request.prompt_token_ids, got.token_ids)
        assert list(got.token_ids) == raw.argmax(-1).tolist()
        assert set(got.sampling_logprobs) == {0.0}


def test_finish_reasons_and_end_tokens(checkpoint: Checkpoint) -> None:
    got = run(checkpoint("llama"), requests_of(20, 8), SamplingParams(max_tokens=30))
    assert {g.finish_reason for g in got} == {"stop", "length"}
    for g in got:
        assert (1 in g.token_ids) == (g.finish_reason == "stop")
        assert 1 not in g.token_ids[:-1]
        assert "<eos>" not in g.text
        assert len(g.token_ids) == 30 or g.finish_reason == "stop"


def test_stop_strings_cut_the_text_before_and_the_tokens_after(checkpoint: Checkpoint) -> None:
    folder, requests = checkpoint("llama"), requests_of(20, 8)
    free = {g.request_id: g for g in run(folder, requests, SamplingParams(max_tokens=30))}
    texts = [g.text for g in free.values() if len(g.text) > 8]
    strings = (texts[0][3:5], texts[1][4:7])
    for got in run(folder, requests, SamplingParams(max_tokens=30, stop_strings=strings)):
        whole = free[got.request_id]
        cuts = [whole.text.find(s) for s in strings if s in whole.text]
        if cuts:
            assert got.finish_reason == "stop"
            assert got.text == whole.text[: min(cuts)]
            written = "".join(free[got.request_id].text[: len(got.token_ids)])
            assert any(written.endswith(s) for s in strings)
        else:
            assert got == whole
        assert got.token_ids == whole.token_ids[: len(got.token_ids)]


def test_progress_and_order(checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    requests = requests_of(6, 3)
    engine = BuiltinEngine(batch_size=4)
    got = engine.generate(
        checkpoint("qwen3"), "d", requests, SamplingParams(max_tokens=9), lambda *now: seen.append(now)
    )
    assert [g.request_id for g in got] == [r.request_id for r in requests]
    assert seen[-1] == (18, sum(len(g.token_ids) for g in got))


def test_new_weights_are_loaded_when_the_digest_changes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    agent = load_agent(checkpoint("llama"))
    with torch.no_grad():
        agent.model.lm_head.weight.mul_(0)
    agent.model.save_pretrained(tmp_path)
    agent.tokenizer.save_pretrained(tmp_path)
    engine, requests, params = BuiltinEngine(), requests_of(1, 4), SamplingParams(max_tokens=5)
    first = engine.generate(checkpoint("llama"), "one", requests, params)
    flat = engine.generate(tmp_path, "two", requests, params)
    assert np.concatenate([g.policy_logprobs for g in flat]) == pytest.approx(-np.log(33), abs=1e-6)
    assert engine.generate(checkpoint("llama"), "one", requests, params) == first


@pytest.mark.parametrize("kind", KINDS)
def test_weights_loaded_into_the_model_at_hand_give_what_a_new_engine_gives(
    checkpoint: Checkpoint, tmp_path: Path, kind: str
) -> None:
    one, two, agent = tmp_path / "one", tmp_path / "two", load_agent(checkpoint(kind))
    save_model(agent, one)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in agent.model.parameters():  # biases and norms too: the fast path keeps joined copies of them
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    save_model(agent, two)
    engine, requests, params = BuiltinEngine(), requests_of(2, 4), SamplingParams(max_tokens=9)
    before = engine.generate(one, "one", requests, params)
    assert engine._loaded is not None
    kept = engine._loaded.agent.model
    after = engine.generate(two, "two", requests, params)
    assert engine._loaded.agent.model is kept
    assert engine._loaded.agent.checkpoint == two
    assert after == run(two, requests, params) != before


def test_new_weights_are_loaded_when_the_version_before_was_removed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path / "one")
    engine, requests, params = BuiltinEngine(), requests_of(2, 4), SamplingParams(max_tokens=9)
    before = engine.generate(tmp_path / "one", "one", requests, params)
    shutil.rmtree(tmp_path / "one")
    assert engine.generate(checkpoint("llama"), "two", requests, params) == before


def test_a_model_of_few_positions_is_left_to_its_own_forward(checkpoint: Checkpoint) -> None:
    agent = load_agent(checkpoint("llama"))
    assert build_fast_decoder(agent.model, 0, PROBED - 1) is None
    assert build_fast_decoder(agent.model, 0, PROBED) is not None


def test_another_architecture_is_not_loaded_into_the_model_at_hand(checkpoint: Checkpoint) -> None:
    engine, requests, params = BuiltinEngine(), requests_of(2, 4), SamplingParams(max_tokens=9)
    engine.generate(checkpoint("llama"), "one", requests, params)
    assert engine.generate(checkpoint("qwen3"), "two", requests, params) == run(checkpoint("qwen3"), requests, params)


@pytest.mark.parametrize(("slots", "length"), [(5, 9), (9, 4), (3, 4), (3, 20), (40, 6)])
def test_slots_of_another_shape_keep_their_rows_in_place(slots: int, length: int) -> None:
    storage = torch.randn(10_000)
    old = storage[: 2 * 2 * 5 * 3 * 4 * 2].view(2, 2, 5, 3, 4, 2)
    live = old[:, :, :3]
    wanted = live.clone()
    cache = storage[: 2 * 2 * slots * 3 * length * 2].view(2, 2, slots, 3, length, 2)
    _move(live, cache, forward=cache.numel() <= old.numel())
    assert torch.equal(cache[:, :, :3, :, :4], wanted)


def test_memory_kept_from_a_call_does_not_reach_into_the_next(checkpoint: Checkpoint) -> None:
    engine, short = BuiltinEngine(batch_size=16), SamplingParams(max_tokens=6)
    first = engine.generate(checkpoint("qwen3"), "d", requests_of(4, 4), short)
    engine.generate(checkpoint("qwen3"), "d", requests_of(8, 5, seed=3), SamplingParams(max_tokens=90))
    assert engine.generate(checkpoint("qwen3"), "d", requests_of(4, 4), short) == first


@pytest.mark.parametrize(
    ("prompt", "limit", "max_tokens", "words"),
    [
        ((), None, 5, "no tokens"),
        ((3,) * 12, 10, 5, "max_prompt_tokens = 10; raise it"),
        ((3,) * 100, None, 40, "context of 128; lower max_tokens"),
    ],
)
def test_impossible_requests_are_refused(
    checkpoint: Checkpoint, prompt: tuple[int, ...], limit: int | None, max_tokens: int, words: str
) -> None:
    engine = BuiltinEngine(max_prompt_tokens=limit)
    with pytest.raises(EngineError, match=words) as caught:
        engine.generate(
            checkpoint("gpt2"), "d", [GenerationRequest("r", prompt, 0)], SamplingParams(max_tokens=max_tokens)
        )
    assert "\n" not in str(caught.value)


def test_out_of_memory_names_the_remedy(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = BuiltinEngine(batch_size=32)
    requests, params = requests_of(2, 2), SamplingParams(max_tokens=5)
    before = engine.generate(checkpoint("llama"), "d", requests, params)
    assert engine._loaded is not None

    def exhausted(tokens: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 60)

    with monkeypatch.context() as patch:
        patch.setattr(engine._loaded.decoder, "step", exhausted)
        with pytest.raises(EngineError, match=r"out of memory on cpu with batch_size 32; lower generate.batch_size"):
            engine.generate(checkpoint("llama"), "d", requests, params)
    assert engine.generate(checkpoint("llama"), "d", requests, params) == before  # usable afterwards


@pytest.mark.parametrize(
    "loader", ["agents.agent.AutoModelForCausalLM.from_pretrained", "generation.builtin.engine.build_fast_decoder"]
)
def test_out_of_memory_while_loading_names_another_remedy(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, loader: str
) -> None:
    monkeypatch.setattr(f"hacrl_core.{loader}", lambda *_, **__: torch.empty(1 << 60))
    with pytest.raises(EngineError, match=r"out of memory loading it on cpu; run fewer agents at once") as caught:
        run(checkpoint("llama"), requests_of(1, 1), SamplingParams(max_tokens=5))
    assert "batch_size" not in str(caught.value)
    assert "\n" not in str(caught.value)
