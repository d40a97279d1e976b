"""Real vLLM (the CPU build where there is no GPU) on tiny agents made here. Skipped without `make vllm`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.errors import EngineError
from hacrl_core.generation.vllm import VllmEngine
from hacrl_core.generation.vllm.process import Launcher, find_python

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
AgentMaker = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    try:
        return find_python(None)
    except EngineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def launcher(vllm_python: Path) -> Iterator[Launcher]:
    """vLLM imported once for all tests: every worker of this process is then forked from it."""
    launcher = Launcher.acquire(vllm_python)
    yield launcher
    launcher.release()


@pytest.fixture(scope="session")
def vllm_config(launcher: Launcher) -> VllmEngineConfig:
    """For an engine, or for a campaign's `generate.engine`: starts fast, takes little memory."""
    return VllmEngineConfig(enforce_eager=True, max_sequences=64, max_length=256, memory_share=0.5)


@pytest.fixture(scope="session")
def make_agent(tmp_path_factory: pytest.TempPathFactory) -> AgentMaker:
    """``make_agent("llama", tied=True, seed=1)``: the folder of a tiny random agent that reads and writes ASCII
    characters.
    """
    root = tmp_path_factory.mktemp("agents")

    def make(family: str, *, tied: bool, seed: int) -> Path:
        folder = root / f"{family}-{'tied' if tied else 'untied'}-{seed}"
        if not folder.exists():
            _write_agent(folder, family, tied, seed)
        return folder

    return make


@pytest.fixture
def engine(vllm_config: VllmEngineConfig) -> Iterator[VllmEngine]:
    engine = VllmEngine(vllm_config)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def warm(vllm_config: VllmEngineConfig, make_agent: AgentMaker) -> Iterator[tuple[VllmEngine, Path]]:
    """An engine that is up, for tests that do not harm it, and its agent (policy digest "warm")."""
    engine = VllmEngine(vllm_config)
    yield engine, make_agent("qwen3", tied=True, seed=0)
    engine.close()


def _write_agent(folder: Path, family: str, tied: bool, seed: int) -> None:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    named = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **named).save_pretrained(folder)
    config, model = FAMILIES[family]
    torch.manual_seed(seed)
    # A wide initialisation: the distributions are far from uniform, so wrong weights show.
    model(
        config(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).save_pretrained(folder)
