"""Checkpoints that no stage has read yet count in the disk estimate: folders, GGUF files, hub ids."""

from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flows.store.checkpoint_sizes import checkpoint_parameters
from hacrl_core.config.agents import CheckpointConfig


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """Metadata of every kind before the tensors, which are quantised: 4 × 64 + 10 elements."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float64("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "ä text")
    writer.add_array("a.list", ["one", "zwei", "trois"])
    writer.add_array("a.numbers", [1.0, 2.0])
    data = gguf.quants.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm.weight", np.ones(10, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_quantised_file_counts_its_elements(gguf_file: Path) -> None:
    config = CheckpointConfig(path=str(gguf_file.parent), gguf_file=gguf_file.name)
    assert checkpoint_parameters(config) == 4 * 64 + 10


def test_a_folder_counts_all_its_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(7, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors", metadata={"x": "y"})
    assert checkpoint_parameters(CheckpointConfig(path=str(tmp_path))) == 22


def test_a_hub_id_counts_by_its_files_in_the_cache_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    assert checkpoint_parameters(CheckpointConfig(path="some/model")) == 15
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    assert checkpoint_parameters(CheckpointConfig(path="Qwen/Qwen3-4B-Base")) == pytest.approx(4.022e9, rel=1e-3)
    assert checkpoint_parameters(CheckpointConfig(path="some/model")) is None


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 40])
def test_a_broken_file_is_not_counted(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(content)
    assert checkpoint_parameters(CheckpointConfig(path=str(tmp_path), gguf_file="broken.gguf")) is None
