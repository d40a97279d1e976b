"""Stale weights in 16 bits, where log-probs cannot tell two policies apart that are one small update away."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.vllm import VllmEngine
from hacrl_core.generation.vllm.proof import differ, expect, limit

AgentMaker = Callable[..., Path]
Change = Callable[[str, torch.Tensor], torch.Tensor]
REQUESTS = [GenerationRequest(f"r{i}", (5, 6, 7 + i), i) for i in range(4)]
SHORT = SamplingParams(max_tokens=4)


def changed(checkpoint: Path, folder: Path, change: Change) -> Path:
    shutil.copytree(checkpoint, folder)
    tensors = {name: change(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def small_update(seed: int, size: float) -> Change:
    """A relative step far below bfloat16's 4e-3 between neighbours: few elements change, the log-probs hardly."""
    generator = torch.Generator().manual_seed(seed)
    return lambda name, tensor: tensor * (1 + size * torch.randn(tensor.shape, generator=generator))


def one_element(wanted: str) -> Change:
    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == wanted:
            tensor.view(-1)[-1] += 0.125
        return tensor

    return change


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False)])
def test_stale_weights_in_bfloat16(
    vllm_config: VllmEngineConfig,
    make_agent: AgentMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
    tied: bool,
) -> None:
    engine = VllmEngine(vllm_config.model_copy(update={"dtype": "bfloat16"}))
    try:
        first = make_agent(family, tied=tied, seed=0)
        second = changed(first, tmp_path / "second", small_update(1, 1e-4))
        third = changed(second, tmp_path / "third", small_update(2, 1e-5))
        engine.generate(first, "first", REQUESTS, SHORT)
        worker, backend = engine._backend.pid, engine._backend
        assert backend.differing(first) == []
        engine.generate(second, "second", REQUESTS, SHORT)
        assert engine._backend.pid == worker, "a small update was refused"

        places = {
            "model.embed_tokens.weight": "model.embed_tokens.weight",
            "model.layers.1.self_attn.k_proj.weight": "model.layers.1.self_attn.qkv_proj.weight",
            "model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.gate_up_proj.weight",
            "model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj.weight",
            "model.norm.weight": "model.norm.weight",
        }
        for number, (tensor, parameter) in enumerate(places.items()):
            folder = changed(second, tmp_path / f"one-{number}", one_element(tensor))
            assert backend.differing(folder) == [parameter]
        assert backend.differing(second) == [], "the comparison has changed the weights"

        old, new = expect(second, "second", "bfloat16"), expect(third, "third", "bfloat16")
        allowed = limit(new, engine.config.weight_tolerance, engine._fresh_deviation)
        assert engine._deviates(new) < allowed, "old weights, which the probe takes for the new ones"
        assert not differ(new, old)
        monkeypatch.setattr(type(backend), "swap", _swap_that_does_nothing(second))
        engine.generate(third, "third", REQUESTS, SHORT)
        assert "weight swap refused" in caplog.text
        assert "parameters are not the checkpoint's" in caplog.text
        assert engine._backend.pid != worker
        assert engine._backend.differing(third) == []
    finally:
        engine.close()


def _swap_that_does_nothing(loaded: Path) -> Callable[..., None]:
    """The worker is given the weights it has, under the new policy's name."""

    def swap(backend: object, checkpoint: Path, digest: str) -> None:
        backend._begin("swap", digest, 60.0, checkpoint=str(loaded))
        backend._finish()

    return swap
