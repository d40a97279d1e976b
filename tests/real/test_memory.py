"""What the learner's stages hold: never all logits, nothing of the update once it is over, about what was estimated."""

import gc
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from hacrl_core.agents import freed_memory
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


# In a process of its own: what earlier tests have freed would be used again. Every second block stays.
GAPS = """
from hacrl_core.agents.freed_memory import large_blocks_given_back
from stages import memory as peak

def resident():
    peak.begin()
    return peak.end().host_bytes >> 20

for wanted in (True, False):
    with large_blocks_given_back(wanted=wanted):
        blocks = [bytes([number]) * (4 << 20) for number in range(1, 61)]
        full = resident()
        del blocks[::2]
        print(full - resident())
        del blocks
"""


def test_blocks_that_a_pass_frees_go_back_while_it_runs():
    """120 MB in blocks of the size of a layer's activations: the C library keeps such gaps unless it is told."""
    done = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, text=True, check=True)
    given_back, kept_otherwise = map(int, done.stdout.split())
    assert given_back > 110
    assert kept_otherwise < 20


@pytest.mark.parametrize("checkpointing", [True, False])
def test_layers_that_run_again_leave_no_gaps(agent, sequences, monkeypatch, checkpointing):
    told = []
    monkeypatch.setattr(freed_memory, "_mallopt", lambda parameter, value: told.append(value >> 20))
    monkeypatch.setattr("hacrl_core.learning.trainer.is_large", lambda model: True)
    trainer = Trainer(agent, UpdateConfig(learning_rate=1e-6, gradient_checkpointing=checkpointing))
    trainer.step(sequences[:2], likelihood)
    trainer.logprobs(sequences[:2])
    assert told == ([2, 32] * 2 if checkpointing else [])


def test_scoring_in_bf16_frees_a_layers_copies_with_the_layer(tmp_path):
    """Autocast's own cache would keep a copy of every weight: 55 MB here."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=1,
    )  # fmt: skip
    agent = Agent(LlamaForCausalLM(config), _Tokenizer(), (1,), tmp_path)
    row = [TrainSequence(tuple(range(2, 10)), tuple(range(10, 26)))]
    score_sequences(agent, row, token_budget=64)
    assert grows_by(lambda: score_sequences(agent, row, token_budget=64, autocast="bf16")) < 40 * MB


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
