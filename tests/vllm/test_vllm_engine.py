"""The vLLM engine for real: numbers against our own forward, weight swaps, crashes, and what is left behind."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hacrl_core.agents.agent import Agent, load_agent
from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.errors import EngineError
from hacrl_core.generation.protocols import Generation, GenerationRequest, SamplingParams
from hacrl_core.generation.vllm import VllmEngine
from hacrl_core.generation.vllm.process import Launcher

pytestmark = pytest.mark.timeout(
    600
)  # the first test waits for vLLM to be imported: half a minute, minutes on a busy machine
PROMPTS = [tuple(3 + (7 * i + j) % 90 for j in range(4 + 3 * i)) for i in range(4)]
REQUESTS = [GenerationRequest(f"r{i}", PROMPTS[i % 4], (i + 1) * (2**63 // 20)) for i in range(16)]
FREE = SamplingParams(max_tokens=24)
AgentMaker = Callable[..., Path]


@functools.cache
def agent_of(checkpoint: Path) -> Agent:
    return load_agent(checkpoint)


def reference_logprobs(
    checkpoint: Path, generation: Generation, prompt: Sequence[int], params: SamplingParams
) -> np.ndarray:
    """Log-prob of each response token under the distribution of ``params``, one forward and plain loops."""
    ids = torch.tensor([[*prompt, *generation.token_ids]])
    with torch.no_grad():
        logits_TV = agent_of(checkpoint).model(ids).logits[0, len(prompt) - 1 : -1].double() / params.temperature
    found = []
    for token, logits_V in zip(generation.token_ids, logits_TV, strict=True):
        order = logits_V.argsort(descending=True).tolist()
        kept = order[: params.top_k or None]
        weights = logits_V[kept].softmax(0)
        inside = [i for i, before in enumerate((weights.cumsum(0) - weights).tolist()) if before < params.top_p]
        place = kept.index(token)
        assert place in inside, "a token outside top-k or top-p was sampled"
        found.append(float(weights[place].log() - weights[inside].sum().log()))
    return np.array(found)


def assert_from(
    checkpoint: Path, generations: Sequence[Generation], requests: Sequence[GenerationRequest] = REQUESTS
) -> None:
    for request, generation in zip(requests, generations, strict=True):
        assert generation.request_id == request.request_id
        expected = reference_logprobs(checkpoint, generation, request.prompt_token_ids, SamplingParams())
        np.testing.assert_allclose(generation.policy_logprobs, expected, atol=1e-3)


def processes_of(group: int) -> list[int]:
    """Every process in a process group, zombies included."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            found.append(int(stat.parent.name))
    return found


def assert_gone(groups: Sequence[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while any(processes_of(group) for group in groups) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [processes_of(group) for group in groups] == [[]] * len(groups)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logprobs_and_weight_swaps(engine: VllmEngine, make_agent: AgentMaker, family: str, tied: bool) -> None:
    old, new = make_agent(family, tied=tied, seed=0), make_agent(family, tied=tied, seed=1)
    before = engine.generate(old, "old", REQUESTS, FREE)
    worker = engine._backend.pid
    assert_from(old, before)
    assert all(g.policy_logprobs == g.sampling_logprobs for g in before)

    after = engine.generate(new, "new", REQUESTS, FREE)
    assert_from(new, after)
    assert [g.token_ids for g in after] != [g.token_ids for g in before]
    assert engine.generate(old, "old", REQUESTS, FREE) == before  # and back, with nothing of the other left in a cache
    assert engine._backend.pid == worker, "the swap needed a restart"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, max_tokens=16),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.8, max_tokens=16),
    ],
    ids=["temperature", "top-k-and-top-p"],
)
def test_two_kinds_of_logprobs(warm: tuple[VllmEngine, Path], params: SamplingParams) -> None:
    engine, checkpoint = warm
    generations = engine.generate(checkpoint, "warm", REQUESTS, params)
    assert_from(checkpoint, generations)
    for request, generation in zip(REQUESTS, generations, strict=True):
        expected = reference_logprobs(checkpoint, generation, request.prompt_token_ids, params)
        np.testing.assert_allclose(generation.sampling_logprobs, expected, atol=1e-3)


def test_greedy_stop_strings_and_text(warm: tuple[VllmEngine, Path]) -> None:
    engine, checkpoint = warm
    greedy = SamplingParams(temperature=0, max_tokens=24)
    generations = engine.generate(checkpoint, "warm", REQUESTS, greedy)
    assert_from(checkpoint, generations)
    assert {x for g in generations for x in g.sampling_logprobs} == {0.0}
    tokenizer = agent_of(checkpoint).tokenizer
    assert [g.text for g in generations] == [
        tokenizer.decode(g.token_ids, skip_special_tokens=True) for g in generations
    ]

    longest = max(generations, key=lambda g: len(g.text))
    stop = longest.text[3:5]
    at = longest.text.find(stop)
    stopped = {
        g.request_id: g for g in engine.generate(checkpoint, "warm", REQUESTS, SamplingParams(0, 1, 0, 24, (stop,)))
    }
    cut = stopped[longest.request_id]
    assert (cut.text, cut.finish_reason) == (longest.text[:at], "stop")
    assert (
        cut.token_ids == longest.token_ids[: at + 2]
    )  # one character is one token here; the tokens hold the string itself


def test_end_token_is_part_of_the_response(warm: tuple[VllmEngine, Path]) -> None:
    engine, checkpoint = warm
    many = [GenerationRequest(f"e{i}", PROMPTS[0], i) for i in range(64)]
    generations = engine.generate(checkpoint, "warm", many, SamplingParams(temperature=2.0, max_tokens=96))
    stopped = [g for g in generations if g.finish_reason == "stop"]
    assert stopped
    assert all(g.token_ids[-1] == 1 and 1 not in g.token_ids[:-1] for g in stopped)
    assert all(len(g.token_ids) == 96 for g in generations if g.finish_reason == "length")
    assert {len(g.policy_logprobs) - len(g.token_ids) for g in generations} == {0}


def test_a_response_depends_on_its_own_seed(warm: tuple[VllmEngine, Path]) -> None:
    engine, checkpoint = warm
    progress: list[tuple[int, int]] = []
    together = engine.generate(checkpoint, "warm", REQUESTS, FREE, lambda *counts: progress.append(counts))
    alone = engine.generate(checkpoint, "warm", REQUESTS[5:6], FREE)
    assert alone[0].token_ids == together[5].token_ids
    assert len({g.token_ids for g in together}) == len(together)
    assert progress[-1] == (len(REQUESTS), sum(len(g.token_ids) for g in together))


def test_limits_are_one_clear_line(warm: tuple[VllmEngine, Path]) -> None:
    engine, checkpoint = warm
    long = [GenerationRequest("long", tuple([5] * 250), 0)]
    with pytest.raises(EngineError, match=r"250 prompt tokens.*exceed the limit of 256.*lower max_tokens"):
        engine.generate(checkpoint, "warm", long, FREE)
    with pytest.raises(EngineError, match="the prompt has no tokens"):
        engine.generate(checkpoint, "warm", [GenerationRequest("empty", (), 0)], FREE)
    with pytest.raises(EngineError, match="same request_id"):
        engine.generate(checkpoint, "warm", REQUESTS[:1] * 2, FREE)
    with pytest.raises(EngineError, match=r"temperatures up to 2, not 2.5"):
        engine.generate(checkpoint, "warm", REQUESTS, SamplingParams(temperature=2.5))
    assert engine.generate(checkpoint, "warm", [], FREE) == []
    assert engine._backend is not None, "a bad request ended the worker"


def test_a_swap_that_went_wrong_is_never_sampled_from(
    engine: VllmEngine, make_agent: AgentMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is told to load other weights than it should; the probe finds out and a fresh worker takes over."""
    old, new = (make_agent("qwen3", tied=True, seed=seed) for seed in (0, 1))
    engine.generate(old, "old", REQUESTS[:2], FREE)
    worker = engine._backend.pid
    monkeypatch.setattr(type(engine._backend), "swap", lambda self, checkpoint, digest: _claim(self, old, digest))
    generations = engine.generate(new, "new", REQUESTS, FREE)
    assert engine._backend.pid != worker
    assert not processes_of(worker)
    assert_from(new, generations)


def _claim(backend: object, checkpoint: Path, digest: str) -> None:
    backend._begin("swap", digest, 60.0, checkpoint=str(checkpoint))
    backend._finish()


def test_kill_in_mid_generation(engine: VllmEngine, make_agent: AgentMaker) -> None:
    checkpoint = make_agent("llama", tied=False, seed=0)
    many = [GenerationRequest(f"k{i}", PROMPTS[i % 4], i) for i in range(128)]
    params = SamplingParams(max_tokens=128)
    calm = engine.generate(checkpoint, "a", many, params)
    worker = engine._backend.pid

    def kill_when_busy(finished: int, tokens: int) -> None:
        if tokens and engine._backend.pid == worker:
            os.kill(worker, signal.SIGKILL)

    again = engine.generate(checkpoint, "a", many, params, kill_when_busy)
    assert [g.request_id for g in again] == [g.request_id for g in calm]
    # What was not finished runs again in batches of other shapes, which round differently: a draw on the edge may fall
    # the other way.
    same = [(a, b) for a, b in zip(again, calm, strict=True) if a.token_ids == b.token_ids]
    assert len(same) >= 0.9 * len(many)
    for a, b in same:
        assert a.policy_logprobs == pytest.approx(b.policy_logprobs, abs=1e-4)
    assert engine._backend.pid != worker
    assert not processes_of(worker)


def test_a_worker_that_keeps_dying_is_an_error_with_its_last_words(
    vllm_config: VllmEngineConfig, make_agent: AgentMaker
) -> None:
    config = vllm_config.model_copy(update={"max_restarts": 0})
    engine = VllmEngine(config)
    checkpoint = make_agent("llama", tied=False, seed=0)
    engine.generate(checkpoint, "a", REQUESTS[:1], FREE)
    os.kill(engine._backend.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"worker \d+ was killed by signal 9; last lines of its stderr:\n"):
        engine.generate(checkpoint, "a", REQUESTS[:1], FREE)
    assert engine._backend is None


def test_a_checkpoint_vllm_cannot_load(
    engine: VllmEngine, make_agent: AgentMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_agent("llama", tied=False, seed=0)
    monkeypatch.setattr(type(engine), "_max_length", lambda self, expected: -5)
    with pytest.raises(EngineError, match=r"vLLM says .*\n"):
        engine.generate(checkpoint, "a", REQUESTS[:1], FREE)
    assert engine._backend is None


def test_nothing_is_left_behind(vllm_config: VllmEngineConfig, make_agent: AgentMaker, launcher: Launcher) -> None:
    engine = VllmEngine(vllm_config)
    engine.generate(make_agent("llama", tied=False, seed=0), "a", REQUESTS[:1], FREE)
    worker = engine._backend.pid
    descriptors = len(os.listdir("/proc/self/fd"))
    assert processes_of(worker)
    engine.close()
    assert not processes_of(worker)
    assert len(os.listdir("/proc/self/fd")) == descriptors - 3
    engine.close()


ORPHANING_SCRIPT = """
import os, sys
from hacrl_core.generation.vllm.process import Launcher
from pathlib import Path
launcher = Launcher.acquire(Path(sys.argv[1]))
print(launcher._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_launcher_dies_with_its_parent(vllm_python: Path) -> None:
    """kill -9 of the parent while vLLM is being imported."""
    output = subprocess.run(
        [sys.executable, "-c", ORPHANING_SCRIPT, vllm_python], capture_output=True, text=True, check=False
    )
    assert_gone([int(output.stdout)])


KILLED_SCRIPT = """
import os, sys
from pathlib import Path
from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.vllm import VllmEngine
config = VllmEngineConfig(enforce_eager=True, max_sequences=8, max_length=64, python=sys.argv[1])
engine = VllmEngine(config)
engine.generate(Path(sys.argv[2]), "a", [GenerationRequest("r", (5, 6), 0)], SamplingParams(max_tokens=4))
print(engine._backend._worker._launcher._process.pid, engine._backend.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_workers_die_with_a_killed_parent(vllm_python: Path, make_agent: AgentMaker) -> None:
    arguments = [vllm_python, make_agent("llama", tied=False, seed=0)]
    output = subprocess.run(
        [sys.executable, "-c", KILLED_SCRIPT, *arguments], capture_output=True, text=True, check=False
    )
    groups = [int(pid) for pid in output.stdout.split()]
    assert len(groups) == 2, output.stderr
    assert_gone(groups)
