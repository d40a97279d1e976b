"""Real vLLM: two replicas behind one queue, one of them killed; an engine that sleeps between two calls."""

import os
import signal
from collections.abc import Iterator

import pytest

from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.vllm import VllmEngine
from hacrl_core.generation.vllm.process import WorkerFailed
from tests.vllm.conftest import AgentMaker
from tests.vllm.test_vllm_engine import PROMPTS, assert_from, processes_of

MANY = [GenerationRequest(f"r{i}", PROMPTS[i // 8 % 4], i) for i in range(64)]
PARAMS = SamplingParams(max_tokens=64)


@pytest.fixture
def pair(vllm_config: VllmEngineConfig) -> Iterator[VllmEngine]:
    engine = VllmEngine(vllm_config.model_copy(update={"replicas": 2, "max_sequences": 8, "memory_share": 0.2}))
    yield engine
    engine.close()


def same_up_to_rounding(ours, theirs) -> None:
    """Batches of other shapes round differently, and a draw on the edge may fall the other way."""
    assert [g.request_id for g in ours] == [g.request_id for g in theirs]
    same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.token_ids == b.token_ids]
    assert len(same) >= 0.9 * len(theirs)
    for a, b in same:
        assert a.policy_logprobs == pytest.approx(b.policy_logprobs, abs=1e-4)


def test_two_replicas_and_one_that_dies(engine: VllmEngine, pair: VllmEngine, make_agent: AgentMaker) -> None:
    checkpoint, new = make_agent("qwen3", tied=True, seed=0), make_agent("qwen3", tied=True, seed=1)
    alone = engine.generate(checkpoint, "a", MANY, PARAMS)
    engine.close()
    together = pair.generate(checkpoint, "a", MANY, PARAMS)
    assert_from(checkpoint, together[:4], MANY[:4])
    same_up_to_rounding(together, alone)
    victim, other = pair._backend.pids
    finished: list[int] = []

    def kill_in_the_middle(done: int, tokens: int) -> None:
        finished.append(done)
        if done > 8 and victim in pair._backend.pids:
            os.kill(victim, signal.SIGKILL)

    again = pair.generate(checkpoint, "a", MANY, PARAMS, kill_in_the_middle)
    same_up_to_rounding(again, alone)
    assert max(finished) == len(MANY)
    assert pair._backend.pids == [other]
    assert not processes_of(victim)
    # The next weights bring the dead one back, with the same proofs.
    assert_from(new, pair.generate(new, "b", MANY, PARAMS)[:4], MANY[:4])
    assert len(pair._backend.pids) == 2
    assert other in pair._backend.pids


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sleep_wake_and_both_proofs(vllm_config: VllmEngineConfig, make_agent: AgentMaker, tied: bool) -> None:
    old, new = make_agent("llama", tied=tied, seed=0), make_agent("llama", tied=tied, seed=1)
    engine = VllmEngine(vllm_config.model_copy(update={"keep": "sleep"}))
    try:
        before = engine.generate(old, "old", MANY[:8], PARAMS)
        worker = engine._backend.pid
        engine.rest()
        assert_from(new, engine.generate(new, "new", MANY[:8], PARAMS), MANY[:8])
        engine.rest()
        # The same weights as before the sleep are gone, too, and come back.
        assert_from(new, engine.generate(new, "new", MANY[:8], PARAMS), MANY[:8])
        engine.rest()
        assert engine.generate(old, "old", MANY[:8], PARAMS) == before
        assert engine._backend.pid == worker, "waking needed a restart"
    finally:
        engine.close()


def test_an_engine_that_wakes_with_other_weights_is_not_sampled_from(
    vllm_config: VllmEngineConfig, make_agent: AgentMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, other = make_agent("llama", tied=False, seed=0), make_agent("llama", tied=False, seed=1)
    engine = VllmEngine(vllm_config.model_copy(update={"keep": "sleep"}))
    try:
        before = engine.generate(checkpoint, "a", MANY[:8], PARAMS)
        worker = engine._backend.pid
        engine.rest()
        swap = type(engine._backend).swap
        monkeypatch.setattr(type(engine._backend), "swap", lambda self, folder, digest: swap(self, other, digest))
        assert engine.generate(checkpoint, "a", MANY[:8], PARAMS) == before
        assert engine._backend.pid != worker
        # Asleep it has no weights, and refuses to say anything about them.
        engine.rest()
        with pytest.raises(WorkerFailed, match="but None is loaded"):
            engine._backend.score([PROMPTS[0]])
    finally:
        engine.close()
