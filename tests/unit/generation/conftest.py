"""Tiny agents with a character tokenizer, saved as ordinary checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ALPHABET = ["<pad>", "<eos>", *"0123456789+-=abcdefghijklmnop ."]


def character_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_model(kind: str) -> PreTrainedModel:
    vocab = len(ALPHABET)
    common = {
        "vocab_size": vocab,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.15,
    }
    decoder = common | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(7)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**decoder))
    if kind == "llama-biases":
        return LlamaForCausalLM(LlamaConfig(**decoder, attention_bias=True, mlp_bias=True))
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**decoder, sliding_window=None))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**decoder))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**decoder, head_dim=16, tie_word_embeddings=True))
    if kind == "mistral-window":
        return MistralForCausalLM(MistralConfig(**decoder, sliding_window=7))
    return GPT2LMHeadModel(GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=128))


def as_if_trained(model: PreTrainedModel) -> PreTrainedModel:
    """Norms are 1 and biases 0 in a fresh model, which hides what is done to them; in this one they are neither."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.2 * noise if name.endswith("bias") else 1 + 0.3 * noise)
    return model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = tiny_model(kind.removesuffix(", fresh"))
            (model if kind.endswith(", fresh") else as_if_trained(model)).save_pretrained(folder)
            character_tokenizer().save_pretrained(folder)
            made[kind] = folder
        return made[kind]

    return make
