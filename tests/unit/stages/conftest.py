"""Each ``test_<stage>.py`` here shows one stage.

It builds the stage's inputs and its slice of config, calls ``run_stage`` as a campaign does, and reads the tables of
the artifact.
"""

from pathlib import Path

import pytest
import torch
from stage_bench import LLAMA, Bench, sample_slice, warmstart_slice

from hacrl_core.artifacts import ArtifactRef, Store


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Store(tmp_path / "store"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """One store for the stages that need agents: each is trained once."""
    torch.set_num_threads(1)
    return Bench(Store(tmp_path_factory.mktemp("stages") / "store"))


@pytest.fixture(scope="session")
def ada(shared: Bench) -> ArtifactRef:
    """A Llama with a token per character."""
    return shared.run("warmstart", warmstart_slice(), seed=1).ref


@pytest.fixture(scope="session")
def ben(shared: Bench) -> ArtifactRef:
    """A Qwen3 with merged tokens, so that ada's responses have other tokens in its eyes."""
    model = {**LLAMA, "architecture": "qwen3", "hidden_size": 24}
    changes = {"model": model, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    return shared.run("warmstart", warmstart_slice(**changes), seed=2).ref


@pytest.fixture(scope="session")
def prompts(shared: Bench) -> ArtifactRef:
    """Three easy additions."""
    return shared.run("sample", sample_slice(prompts=3)).ref
