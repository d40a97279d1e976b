"""A GGUF file of an exported agent, read back by transformers: the same logits, the same tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from flows.agents.gguf_file import write_gguf, write_modelfile
from hacrl_core.errors import ConfigError

SHAPE: dict[str, Any] = {
    "vocab_size": 330,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# Readers of GGUF take the heads of Qwen3 for 128 and the layers of Gemma 3 for those of the published ones.
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=128),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=256, query_pre_attn_scalar=256, sliding_window=16),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = ["<|user|>", "<|end|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["hello world 12+34=46, the answer is \\boxed{46}"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    return tokenizer


def checkpoint(config: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms of 1 would hide a forgotten one
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id]}))
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_tokens_are_the_same_when_read_back(family: str, tmp_path: Path) -> None:
    model = checkpoint(CONFIGS[family], tmp_path)
    write_gguf(tmp_path, tmp_path / "a.gguf")
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32).eval()
    ids = torch.randint(0, 330, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, back(ids).logits)
    text = "<|user|>12+34=?<|end|><|assistant|> hello world é"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    assert tokenizer(text, add_special_tokens=False).input_ids == make_tokenizer()(text).input_ids


def test_half_precision_is_half_the_size_and_close(tmp_path: Path) -> None:
    model = checkpoint(CONFIGS["llama"], tmp_path)
    whole = write_gguf(tmp_path, tmp_path / "a.gguf").stat().st_size
    assert write_gguf(tmp_path, tmp_path / "b.gguf", "f16").stat().st_size < 0.7 * whole
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="b.gguf", dtype=torch.float32).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, back(ids).logits, atol=0.02)


def test_the_modelfile_has_the_format_of_training(tmp_path: Path) -> None:
    checkpoint(CONFIGS["llama"], tmp_path)
    assert write_modelfile(tmp_path, "a.gguf", 0.7).read_text() == (
        'FROM ./a.gguf\nTEMPLATE """<|user|>{{ .Prompt }}<|end|><|assistant|>"""\n'
        'PARAMETER stop "<|end|>"\nPARAMETER temperature 0.7\n'
    )


def test_what_gguf_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint(Olmo2Config(**SHAPE), tmp_path / "olmo")
    with pytest.raises(ConfigError, match="olmo2 is not written as GGUF; only llama, mistral"):
        write_gguf(tmp_path / "olmo", tmp_path / "a.gguf")
    odd = Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=16)
    checkpoint(odd, tmp_path / "gemma")
    with pytest.raises(ConfigError, match="this Gemma's layers"):
        write_gguf(tmp_path / "gemma", tmp_path / "a.gguf")
    checkpoint(CONFIGS["llama"], tmp_path / "llama")
    with pytest.raises(ConfigError, match="choose one of f32, f16"):
        write_gguf(tmp_path / "llama", tmp_path / "a.gguf", "q4")
    assert not (tmp_path / "a.gguf").exists()
