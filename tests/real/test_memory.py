"""What the learner's stages hold: never all logits, nothing of the update once it is over, about what was estimated."""

import gc

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from hacrl_core.agents.agent import Agent
from hacrl_core.config.generation import GenerateConfig, VllmEngineConfig
from hacrl_core.config.training import LoraConfig, ScoreConfig, UpdateConfig
from hacrl_core.learning.memory import PROCESS_BYTES, estimate, host_bytes, on_one_host, trainable
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence
from hacrl_core.learning.shape import shape_of
from hacrl_core.learning.trainer import Trainer
from hacrl_core.warm import give_back_memory
from stages import memory as peak

MB = 1 << 20
VOCABULARY, ROWS, PROMPT, RESPONSE = 60_000, 16, 8, 64


class _Tokenizer:
    pad_token_id = 0


@pytest.fixture
def agent(tmp_path):
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128, tie_word_embeddings=True, eos_token_id=1,
    )  # fmt: skip
    torch.set_num_threads(1)
    return Agent(LlamaForCausalLM(config), _Tokenizer(), (1,), tmp_path)


@pytest.fixture
def sequences():
    rng = np.random.default_rng(0)
    rows = rng.integers(2, VOCABULARY, size=(ROWS, PROMPT + RESPONSE)).tolist()
    return [TrainSequence(tuple(row[:PROMPT]), tuple(row[PROMPT:])) for row in rows]


def grows_by(act):
    """Highest resident size while ``act`` runs, above what it was before."""
    gc.collect()
    give_back_memory()
    peak.begin()
    before = peak.end().host_bytes
    act()
    return peak.end().host_bytes - before


def likelihood(logprobs_BT, mask_BT, rows_B):
    return -(logprobs_BT * mask_BT).sum() / ROWS, {}


def test_scoring_and_updating_never_hold_all_logits(agent, sequences):
    """The logits of this minibatch would take 246 MB, and as much again for their gradient."""
    whole = 4 * ROWS * RESPONSE * VOCABULARY
    chunk = 4 * 256 * VOCABULARY  # the fused loss goes by 256 tokens
    assert whole > 230 * MB > 3 * chunk
    assert grows_by(lambda: score_sequences(agent, sequences, token_budget=4096)) < chunk + 40 * MB
    trainer = Trainer(agent, UpdateConfig(learning_rate=1e-6))
    moments = 8 * VOCABULARY * 16
    assert grows_by(lambda: trainer.step(sequences, likelihood)) < chunk + moments + 60 * MB


def test_what_an_update_frees_goes_back_to_the_system():
    """Blocks of the size of activations: the C library keeps them unless it is told."""
    kept = [torch.ones(100_000) for _ in range(1000)]
    after = [torch.ones(10)]  # something that stays behind them
    full = _resident()
    del kept
    give_back_memory()
    assert full - _resident() > 300 * MB
    assert len(after) == 1


def _resident():
    peak.begin()
    return peak.end().host_bytes


# -- the estimate ------------------------------------------------------------------------------------------------------

SMOL = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip


def guess(config=SMOL, *, generate=None, prompt=56, **update):
    settings = GenerateConfig(**{"max_tokens": 200, "batch_size": 16} | (generate or {}))
    return estimate(shape_of(config), settings, ScoreConfig(), UpdateConfig(learning_rate=1e-6, **update), prompt)


def test_parameters_are_counted_without_memory():
    peak.begin()
    before = peak.end().host_bytes
    shape = shape_of(SMOL)
    assert shape.parameters == 134_515_008  # SmolLM2-135M, tied embeddings once
    assert peak.end().host_bytes - before < 100 * MB
    assert (shape.layers, shape.hidden, shape.query, shape.key, shape.mlp) == (30, 576, 576, 192, 1536)
    qwen = AutoConfig.for_model(
        "qwen3", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=1
    )
    assert (shape_of(qwen).query, shape_of(qwen).key) == (128, 64)


def test_each_saving_saves():
    plain = guess()
    assert guess(token_budget=1024).update < guess(token_budget=2048).update < guess(token_budget=4096).update
    assert guess(gradient_checkpointing=True, token_budget=4096).update < guess(token_budget=1024).update
    adapters = LoraConfig(rank=16, alpha=32)
    assert guess(lora=adapters).update < plain.update - 10 * SMOL.num_hidden_layers * MB
    assert trainable(shape_of(SMOL), adapters) == 30 * 16 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert guess(generate={"batch_size": 64}).generate > plain.generate
    assert guess(generate={"engine": {"kind": "builtin", "dtype": "bfloat16"}}).generate < plain.generate
    wide = VllmEngineConfig(max_length=256, max_sequences=16, tensor_parallel_size=4)
    assert guess(generate={"engine": wide}).generate < plain.generate
    assert min(plain.generate, plain.score, plain.update) > PROCESS_BYTES + 4 * 134_515_008


def test_an_embedding_costs_its_gradient_twice_where_it_is_trained():
    """Weight, gradient and two moments, and the gradient of a microbatch before it is added: 20 bytes a parameter."""
    wide = LlamaConfig(**{**SMOL.to_dict(), "vocab_size": 2 * SMOL.vocab_size})
    more, logits = SMOL.vocab_size * SMOL.hidden_size, 4 * 256 * SMOL.vocab_size
    assert guess(wide).update - guess().update == 20 * more + logits
    adapters = LoraConfig(rank=16, alpha=32)
    assert guess(wide, lora=adapters).update - guess(lora=adapters).update == 4 * more + logits


def test_ranks_of_one_machine_are_added_up_and_what_is_offloaded_is_in_the_hosts_memory():
    shape = shape_of(SMOL)
    two = UpdateConfig(learning_rate=1e-6, ranks=2)
    away = two.model_copy(update={"offload": "optimizer"})
    each, spared = guess(ranks=2), guess(ranks=2, offload="optimizer")
    assert guess().update > each.update > guess(ranks=4).update
    assert host_bytes(shape, two) == 0
    assert host_bytes(shape, away) == 16 * shape.parameters
    assert each.update - spared.update == 8 * shape.parameters
    together = on_one_host(each, shape, two)
    assert (together.score, together.update) == (2 * each.score, 2 * each.update)
    assert together.generate == each.generate + PROCESS_BYTES + 2 * shape.parameters
    # Offloading frees nothing where there is no other memory.
    assert on_one_host(spared, shape, away).update == together.update


def test_sequences_longer_than_the_budget_count_whole():
    assert guess(token_budget=64).update == guess(token_budget=256).update
