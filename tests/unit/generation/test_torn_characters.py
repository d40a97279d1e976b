"""A response cut inside a character of several bytes: its text has no replacement character that nobody wrote."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hacrl_core.agents.warmstart import make_tokenizer
from hacrl_core.config.warmstart import TokenizerConfig
from hacrl_core.generation.builtin import BuiltinEngine
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.stop_strings import StopStrings

TOKENIZER = make_tokenizer(TokenizerConfig(kind="characters"), [], 64)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("strings", [(), ("stop",)])
def test_torn_bytes_are_left_out_of_the_text(strings: tuple[str, ...]) -> None:
    stop = StopStrings(TOKENIZER, strings)
    for torn in range(1, 4):
        assert stop.text(ids("7€ 😀")[:-torn]) == "7€ "
    assert stop.text(ids("7€ 😀")) == "7€ 😀"


def test_the_stop_string_is_found_behind_torn_bytes() -> None:
    stop = StopStrings(TOKENIZER, ("stop",))
    torn = [*ids("😀")[:2], *ids("stop")]
    assert stop.completed(torn)
    assert "stop" not in stop.text(torn)


@pytest.mark.parametrize("strings", [(), ("0",)])
def test_the_engine_writes_no_torn_end(tmp_path: Path, strings: tuple[str, ...]) -> None:
    """A random model over bytes is cut inside characters all the time."""
    torch.manual_seed(0)
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id, bos_token_id=None, **settings)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    requests = [GenerationRequest(str(seed), tuple(ids("1+1")), seed) for seed in range(64)]
    engine = BuiltinEngine()
    written = engine.generate(tmp_path, "digest", requests, SamplingParams(max_tokens=5, stop_strings=strings))
    engine.close()
    raw = [TOKENIZER.decode(g.token_ids, skip_special_tokens=True) for g in written]
    assert any(text.endswith("\ufffd") for text in raw)
    assert not any(g.text.endswith("\ufffd") for g in written if g.finish_reason == "length")
