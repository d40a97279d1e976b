"""The vLLM engine against a server that somebody else runs: a real one, started here as the documentation says."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hacrl_core.agents.agent import load_agent
from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.errors import EngineError
from hacrl_core.generation.protocols import Generation, GenerationRequest, SamplingParams
from hacrl_core.generation.vllm import VllmEngine
from hacrl_core.generation.vllm.process import WORKER_FOLDER

pytestmark = pytest.mark.slow
REQUESTS = [GenerationRequest(f"r{i}", tuple(range(5, 12 + i % 3)), i) for i in range(8)]
STARTUP_SECONDS = 280
AgentMaker = Callable[..., Path]


@pytest.fixture(scope="module")
def agents(make_agent: AgentMaker) -> tuple[Path, Path]:
    return make_agent("qwen3", tied=True, seed=0), make_agent("qwen3", tied=True, seed=1)


@pytest.fixture(scope="module")
def url(vllm_python: Path, agents: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (
        f"-P -m vllm.entrypoints.openai.api_server --model {agents[0]} --host 127.0.0.1 --port {port} --dtype float32"
    )
    command += " --enforce-eager --kv-cache-memory-bytes 67108864 --max-num-seqs 16 --no-enable-chunked-prefill"
    command += " --worker-extension-cls hacrl_vllm_extension.WeightSwap"  # and no --logprobs-mode: see the last test
    environment = {"PYTHONPATH": str(WORKER_FOLDER), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [vllm_python, *command.split()],
            env=dict(os.environ) | environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        address = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + STARTUP_SECONDS
            while not _answers(address):
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.5)
            yield address
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def assert_from(checkpoint: Path, generations: list[Generation]) -> None:
    model = load_agent(checkpoint).model
    for request, generation in zip(REQUESTS, generations, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *generation.token_ids]])
        with torch.no_grad():
            logprobs_TV = model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs_TV.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(generation.policy_logprobs, expected, atol=1e-3)


@pytest.mark.timeout(STARTUP_SECONDS + 120)
def test_server(url: str, agents: tuple[Path, Path]) -> None:
    engine = VllmEngine(VllmEngineConfig(url=url, max_sequences=8))
    assert engine.version.startswith("vllm 0.")
    old, new = agents
    free = SamplingParams(max_tokens=16)
    before = engine.generate(old, "old", REQUESTS, free)
    assert_from(old, before)
    assert_from(new, engine.generate(new, "new", REQUESTS, free))  # a weight swap

    engine._backend.swap(old, "somebody else's")
    assert_from(new, engine.generate(new, "new", REQUESTS, free))  # noticed, and put right
    assert engine.generate(old, "old", REQUESTS, free) == before
    assert engine.generate(old, "old", REQUESTS[3:4], free) == before[3:4]

    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        engine.generate(old, "old", REQUESTS, SamplingParams(max_tokens=4, temperature=0.5))


def test_no_server_there(agents: tuple[Path, Path]) -> None:
    engine = VllmEngine(VllmEngineConfig(url="http://127.0.0.1:9"))
    with pytest.raises(EngineError, match=r"vLLM server http://127.0.0.1:9: .*start it"):
        engine.generate(agents[0], "old", REQUESTS, SamplingParams(max_tokens=4))
