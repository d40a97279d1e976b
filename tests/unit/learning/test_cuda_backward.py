"""The body's backward pass on a GPU without a GPU: layers run again, bfloat16, adapters."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_backward import Autocast, GpuAgent, cast_again, fake_gpu, moved_to_gpu, pretended_autocast
from learning_models import tiny_model, tiny_tokenizer
from test_cuda_without_gpu import ROWS, objective_of, sequences
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from hacrl_core.config.training import LoraConfig, UpdateConfig
from hacrl_core.learning import lora
from hacrl_core.learning import trainer as trainer_module
from hacrl_core.learning.fused import linear_loss, rowwise
from hacrl_core.learning.fused.head import hidden_states
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.trainer import Trainer

KINDS = ["llama", "qwen3", "gemma3"]
LAYERS = 1  # every operation on a fake tensor takes its time
LORA = LoraConfig(rank=2, alpha=4.0)
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16 and checkpointing": {"autocast": "bf16", "gradient_checkpointing": True},
    "LoRA in bf16": {"autocast": "bf16", "lora": LORA},
}
mm = torch.ops.aten.mm.default


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(rowwise, "_refusal", "no GPU")
    monkeypatch.setattr(torch, "autocast", pretended_autocast)
    with fake_gpu() as waits:
        yield waits


def trainer_on(kind: str, budget: int = 99, **mode: Any) -> Trainer:
    model = tiny_model(kind, tied=kind != "llama", num_hidden_layers=LAYERS)
    agent = GpuAgent(model, tiny_tokenizer(), (1,), Path("tiny"))  # type: ignore[arg-type]
    half = mode.get("autocast") == "bf16"
    wrapped = None
    if mode.get("lora"):
        with unset_fake_temporarily():  # peft fills adapters with numbers: attached first, moved then
            wrapped = lora.attach(model, LORA, None, 0, as_merged=half)
    moved_to_gpu(model)
    if half:
        cast_again(model)
    with mock.patch.object(lora, "attach", return_value=wrapped):
        return Trainer(agent, UpdateConfig(learning_rate=1e-4, token_budget=budget, **mode))


class Products(TorchDispatchMode):
    """The types of the matrix products, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []  # of the body; the head writes into a buffer of its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is mm:
            self.types.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def waits_of(made: Trainer, microbatches: int, waits: list[str]) -> list[str]:
    made.config = made.config.model_copy(update={"token_budget": 11 * ROWS // microbatches})
    waits.clear()
    made.gradient_norm(sequences(), objective_of())
    return list(waits)


CASES = [
    *((kind, "bf16 and checkpointing") for kind in KINDS),
    ("llama", "LoRA in bf16"),
]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_the_backward_pass_fits_and_waits_not_per_microbatch(kind: str, mode: str, gpu: list[str]) -> None:
    made = trainer_on(kind, **MODES[mode])
    one, two = (waits_of(made, microbatches, gpu) for microbatches in (1, 2))
    assert 0 < len(one) == len(two), sorted(set(two))


def test_layers_are_run_again_and_in_bfloat16(gpu: list[str]) -> None:
    seen: dict[str, list[torch.dtype]] = {}
    for name in ("plain", "bf16 and checkpointing"):
        made = trainer_on("llama", 9999, **MODES[name])
        with Products() as products:
            made.gradient_norm(sequences(), objective_of())
        seen[name] = products.types
    forward = LAYERS * 7  # linear layers
    # A product forward and two backward for each linear layer; running it again stops before a layer's last product.
    again = 4 * forward - LAYERS
    assert {name: len(types) for name, types in seen.items()} == {
        "plain": 3 * forward,
        "bf16 and checkpointing": again,
    }
    assert set(seen["plain"]) == {torch.float32}
    assert set(seen["bf16 and checkpointing"]) == {torch.bfloat16}


class _Faulty(torch.autograd.Function):
    fault: Callable[[Tensor], Tensor] = torch.clone

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return _Faulty.fault(slopes[0])


def on_the_host(slopes: Tensor) -> Tensor:
    return slopes * torch.ones(slopes.shape)


def of_two_types(slopes: Tensor) -> Tensor:
    flat = slopes.reshape(-1, slopes.shape[-1])
    return torch.mm(flat, torch.ones(flat.shape[1], flat.shape[1], dtype=torch.bfloat16, device=flat.device))


def waits(slopes: Tensor) -> Tensor:
    return slopes * float(slopes.sum())


def planted(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], Tensor]) -> None:
    states = trainer_module.response_states
    monkeypatch.setattr(_Faulty, "fault", staticmethod(fault))
    monkeypatch.setattr(trainer_module, "response_states", lambda model, batch: _Faulty.apply(states(model, batch)))


@pytest.mark.parametrize(("fault", "says"), [(on_the_host, "at least two devices"), (of_two_types, "different types")])
def test_faults_of_the_backward_pass_are_found(
    fault: Callable[[Tensor], Tensor], says: str, gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, fault)
    with pytest.raises((RuntimeError, TypeError), match=says):
        trainer_on("llama").gradient_norm(sequences(), objective_of())


def test_a_wait_in_the_backward_pass_is_counted_in_every_microbatch(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, waits)
    made = trainer_on("llama")
    one, two = (waits_of(made, microbatches, gpu) for microbatches in (1, 2))
    assert len(two) - len(one) == 1


def test_scoring_and_old_logprobs_in_bfloat16_wait_once(gpu: list[str]) -> None:
    made = trainer_on("gemma3", 11 * ROWS // 2, autocast="bf16")
    made.logprobs(sequences())  # the head is looked at once per model
    gpu.clear()
    made.logprobs(sequences())
    assert len(gpu) == 1, gpu
    score_sequences(made.agent, sequences(), token_budget=11 * ROWS // 2, autocast="bf16")
    assert len(gpu) == 2, gpu


def test_old_logprobs_come_from_the_same_chunks_as_the_steps(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    fused = trainer_module.fused_pass
    for name, size in (("_CHUNK_ELEMENTS", 0), ("_CHUNK_TOKENS", 9), ("_CHUNK_TOKENS_GPU", 36)):
        monkeypatch.setattr(linear_loss, name, size)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[5])
        return fused(*args, **kwargs)

    monkeypatch.setattr(trainer_module, "fused_pass", recorded)
    made = trainer_on("llama", 9999, autocast="bf16")
    made.logprobs(sequences())
    made.gradient_norm(sequences(), objective_of())
    assert seen[0] == seen[1]
    assert len(seen[0]) == ROWS * 9 // 36


@pytest.mark.parametrize("kind", KINDS)
def test_the_pretended_autocast_is_torchs_own(kind: str) -> None:
    ids = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])
    found = []
    for casts in (torch.autocast("cpu", torch.bfloat16), Autocast()):
        model = tiny_model(kind)
        with casts:
            states = hidden_states(model, ids)
        states.float().square().sum().backward()
        found.append((states, [p.grad for p in model.model.parameters()]))
    (states, gradients), (our_states, our_gradients) = found
    assert torch.equal(states, our_states)
    assert states.dtype == our_states.dtype
    for gradient, ours in zip(gradients, our_gradients, strict=True):
        assert gradient is not None
        assert ours is not None
        torch.testing.assert_close(gradient, ours, rtol=0.02, atol=1e-3)
