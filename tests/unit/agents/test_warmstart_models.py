"""Every named family builds in the size asked for, from its own seed, whatever the process's random state."""

from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from hacrl_core.agents.warmstart import make_model, make_tokenizer
from hacrl_core.config.warmstart import Architecture, ModelConfig, TokenizerConfig

TOKENIZER = make_tokenizer(TokenizerConfig(kind="characters"), [], 64)


def tiny(architecture: str = "llama", **changes: object) -> ModelConfig:
    sizes = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 48}
    return ModelConfig.model_validate({"architecture": architecture, **sizes, **changes})


@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_each_family(architecture: str) -> None:
    model = make_model(tiny(architecture), TOKENIZER, seed=1)
    assert model.config.model_type == architecture
    assert model.config.num_key_value_heads == 2
    assert model.config.max_position_embeddings == 256
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == TOKENIZER.eos_token_id
    logits_BTV = model(input_ids=torch.arange(10)[None]).logits
    assert logits_BTV.shape == (1, 10, len(TOKENIZER))
    assert torch.isfinite(logits_BTV).all()


@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_weights_follow_from_the_seed_alone(architecture: str) -> None:
    torch.manual_seed(1)
    one = make_model(tiny(architecture), TOKENIZER, seed=5).state_dict()
    torch.manual_seed(2)
    two = make_model(tiny(architecture), TOKENIZER, seed=5).state_dict()
    other = make_model(tiny(architecture), TOKENIZER, seed=6).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_tied_embeddings() -> None:
    model = make_model(tiny(tie_word_embeddings=True), TOKENIZER, seed=1)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("change", "message"),
    [({"hidden_size": 36}, "hidden_size 36"), ({"kv_heads": 3}, "heads 4"), ({"architecture": "bert"}, "llama")],
)
def test_impossible_sizes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny(**change)  # type: ignore[arg-type]
