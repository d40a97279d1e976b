"""Randomly initialised ``transformers`` models of a named family and chosen size."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from hacrl_core.config.warmstart import ModelConfig

_INIT_STD = 0.02


def make_model(config: ModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model_config = AutoConfig.for_model(
        config.architecture,
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden_size // config.heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    _initialise(model, seed)
    return model


@torch.no_grad()
def _initialise(model: PreTrainedModel, seed: int) -> None:
    """Draw the weights from a generator of our own: the library draws from the process's, which other threads share."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # biases and norms
        else:
            parameter.normal_(0.0, _INIT_STD, generator=generator)
