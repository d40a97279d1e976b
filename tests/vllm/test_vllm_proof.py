"""How far vLLM's log-probs may be from ours; needs no vLLM."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.errors import EngineError
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.vllm import VllmEngine
from hacrl_core.generation.vllm.engine import _remedy
from hacrl_core.generation.vllm.process import find_python
from hacrl_core.generation.vllm.proof import Expected, deviation, differ, expect, limit

AgentMaker = Callable[..., Path]


@pytest.fixture(scope="module")
def expected(make_agent: AgentMaker) -> Expected:
    return expect(make_agent("llama", tied=True, seed=0), "digest", "auto")


def test_what_is_expected_of_a_checkpoint(expected: Expected, make_agent: AgentMaker) -> None:
    assert (expected.dtype, expected.context_length, expected.stop_token_ids) == ("float32", 512, (1,))
    assert len(expected.probe) == len(expected.probe_logprobs) + 1 == 48
    assert np.logaddexp.reduce(expected.next_logprobs_V) == pytest.approx(0, abs=1e-9)
    again = expect(make_agent("llama", tied=True, seed=0), "digest", "bfloat16")
    assert again.dtype == "bfloat16"
    np.testing.assert_array_equal(again.probe_logprobs, expected.probe_logprobs)


def test_only_equal_shapes_are_swapped(expected: Expected, make_agent: AgentMaker) -> None:
    assert expect(make_agent("llama", tied=True, seed=1), "other", "auto").shape == expected.shape
    assert expect(make_agent("llama", tied=False, seed=0), "other", "auto").shape != expected.shape
    assert expect(make_agent("qwen3", tied=True, seed=0), "other", "auto").shape != expected.shape


def test_shape_ignores_who_wrote_it(expected: Expected, make_agent: AgentMaker, tmp_path: Path) -> None:
    source = make_agent("llama", tied=True, seed=0)
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"transformers_version": "0", "_name_or_path": "x"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert expect(tmp_path, "copy", "auto").shape == expected.shape


def test_limits(expected: Expected) -> None:
    half = dataclasses.replace(expected, dtype="bfloat16")
    assert limit(expected, 0.01, None) == 0.01
    assert limit(half, 0.01, None) == 0.25
    assert limit(expected, 0.01, 2e-6) == 2e-5  # after a swap: the floor,
    assert limit(half, 0.01, 0.03) == pytest.approx(0.09)  # three times the rounding of a fresh start,
    assert limit(expected, 0.01, 0.009) == 0.01  # and never more than a fresh start is allowed


def test_deviation(expected: Expected) -> None:
    assert deviation(expected, list(expected.probe_logprobs)) == 0
    assert deviation(expected, list(expected.probe_logprobs + 0.5)) == pytest.approx(0.5)
    assert deviation(expected, [float("nan"), *expected.probe_logprobs[1:]]) == float("inf")
    moved = dataclasses.replace(expected, probe_logprobs=expected.probe_logprobs + 0.002)
    assert differ(moved, expected)
    assert not differ(expected, expected)


def test_a_missing_environment_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"no Python interpreter at nowhere/python; run `make vllm`"):
        find_python("nowhere/python")
    monkeypatch.setenv("HACRL_VLLM_PYTHON", "elsewhere/python")
    with pytest.raises(EngineError, match="elsewhere/python"):
        find_python(None)


def test_an_environment_without_vllm_is_one_clear_error(make_agent: AgentMaker) -> None:
    engine = VllmEngine(VllmEngineConfig(python=sys.executable))
    request = GenerationRequest("r", (5, 6), 0)
    with pytest.raises(
        EngineError, match=r"cannot import vLLM; run `make vllm` again; last lines[\s\S]*No module named 'vllm'"
    ):
        engine.generate(make_agent("llama", tied=True, seed=0), "a", [request], SamplingParams(max_tokens=1))
    assert engine.version == "vllm unknown"


@pytest.mark.parametrize(
    ("vllm_says", "remedy"),
    [
        (
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",
            "raise it, or lower",
        ),
        (
            "(1.2 GiB KV cache is needed, which is larger than the available KV cache memory (1 GiB).",
            "raise it, or lower",
        ),
        (
            "Free memory on device cuda:0 (3/24 GiB) on startup is less than desired GPU memory utilization (0.9",
            "lower it",
        ),
        ("(5.1/7.7 GiB) on startup is less than desired CPU memory utilization (0.9, 7 GiB).", "lower it"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "ran out of memory: lower"),
        ("ValueError: memory format not supported", "vLLM failed"),
    ],
)
def test_short_memory_has_the_remedy_that_helps(vllm_says: str, remedy: str) -> None:
    assert remedy in _remedy(vllm_says)
