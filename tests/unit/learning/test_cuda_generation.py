"""Decoding steps and draws on CUDA tensors without numbers: devices fit, and the host does not wait in the loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fake_cuda import fake_cuda, moved_to_cuda
from learning_models import tiny_model, tiny_tokenizer
from torch import Tensor

from hacrl_core.agents.agent import Agent
from hacrl_core.generation.builtin.decoder import Decoder, GenericDecoder
from hacrl_core.generation.builtin.fast import FastDecoder
from hacrl_core.generation.builtin.sampling import draw
from hacrl_core.generation.builtin.weights import decoder_weights
from hacrl_core.generation.protocols import SamplingParams

KINDS = ["llama", "qwen3", "gemma3"]


@pytest.fixture
def cuda() -> Iterator[list[str]]:
    with fake_cuda() as waits:
        yield waits


def agent_on_cuda(kind: str, **changes: object) -> Agent:
    model = moved_to_cuda(tiny_model(kind, tied=kind != "llama", **changes))
    assert isinstance(model, transformers.PreTrainedModel)
    return Agent(model, tiny_tokenizer(), (1,), Path("tiny"))  # type: ignore[arg-type]


def decoder_of(agent: Agent) -> Decoder:
    weights = decoder_weights(agent.model, agent.context_length)
    if weights is None:
        return GenericDecoder(agent.model, agent.pad_token_id)
    return FastDecoder(agent.model, weights, agent.pad_token_id)


PARAMS = [
    SamplingParams(max_tokens=3),
    SamplingParams(max_tokens=3, temperature=0.0),
    SamplingParams(max_tokens=3, temperature=0.7, top_k=5, top_p=0.9),
]


def waits_of_steps(decoder: Decoder, agent: Agent, steps: int, waits: list[str]) -> list[str]:
    """Where the host waits inside the decoder while it makes so many steps."""
    prefill = decoder.prefill([(3, 4, 5), (3, 4)])
    decoder.admit(prefill, [0, 1])
    waits.clear()
    for _ in range(steps):
        decoder.step(torch.zeros(2, dtype=torch.int64, device="cuda:0"))
    decoder.reset()
    return list(waits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoding_step_does_not_wait_for_the_gpu(kind: str, cuda: list[str]) -> None:
    agent = agent_on_cuda(kind)
    decoder = decoder_of(agent)
    few, many = (waits_of_steps(decoder, agent, steps, cuda) for steps in (2, 6))
    assert len(few) == len(many), sorted(set(many))


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch, fault: Any) -> Iterator[None]:
    step = FastDecoder.step
    monkeypatch.setattr(FastDecoder, "step", lambda self, tokens_B: fault(step(self, tokens_B)))
    yield


def test_a_wait_in_every_step_is_found(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_on_cuda("llama")

    def waiting(logits_BV: Tensor) -> Tensor:
        float(logits_BV.sum())
        return logits_BV

    with planted(monkeypatch, waiting):
        few, many = (waits_of_steps(decoder_of(agent), agent, steps, cuda) for steps in (2, 6))
    assert len(many) - len(few) == 4


@pytest.mark.parametrize("params", PARAMS, ids=["plain", "greedy", "nucleus"])
def test_drawing_stays_on_the_device(params: SamplingParams, cuda: list[str]) -> None:
    logits = torch.zeros(2, 8, device="cuda:0")
    drawn = draw(logits, torch.zeros(2, dtype=torch.float64, device="cuda:0"), params)
    assert {t.device.type for t in vars(drawn).values()} == {"cuda"}
    assert cuda == []


def test_random_numbers_that_stayed_on_the_host_are_found(cuda: list[str]) -> None:
    with pytest.raises(RuntimeError, match="device"):
        draw(torch.zeros(2, 8, device="cuda:0"), torch.zeros(2, dtype=torch.float64), PARAMS[0])
