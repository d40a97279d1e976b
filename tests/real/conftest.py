"""Tiny checkpoints as people publish them: other families, precisions, end tokens, tokenizers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
SPECIALS = ("<|begin|>", "<|text_end|>", "<|turn|>", "<|eot|>")


def byte_tokenizer(specials: Sequence[str] = SPECIALS, *, adds_bos: bool = False) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{specials[0]} $A", special_tokens=[(specials[0], 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=specials[0], eos_token=specials[1], chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False
    )  # fmt: skip


def save_checkpoint(
    folder: Path, tokenizer: Any, *, kind: str = "llama", hidden: int = 16, seed: int = 0, eos: Any = 1, **more: Any
) -> Path:
    """A random model of this family with the tokenizer, as ``save_pretrained`` leaves it."""
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=512, eos_token_id=eos, bos_token_id=0,
        pad_token_id=None, **more,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=eos)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    return lambda name="theirs", tokenizer=None, **settings: save_checkpoint(
        tmp_path / name, tokenizer or byte_tokenizer(), **settings
    )
