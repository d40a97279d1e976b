"""adopt: an existing checkpoint in; a first agent in the store, plain float32 safetensors, out."""

import shutil
from pathlib import Path

import torch

from hacrl_core.agents.agent import load_agent
from hacrl_core.artifacts.sources import source_digest
from hacrl_core.config.agents import CheckpointConfig
from stages.adopt import AdoptSlice


def adopt_slice(folder: Path, **changes: object) -> AdoptSlice:
    checkpoint = CheckpointConfig(path=str(folder))
    return AdoptSlice(checkpoint=checkpoint, source_digest=source_digest(checkpoint), **changes)


def test_the_weights_are_taken_over_in_float32(bench, ada, tmp_path):
    theirs = load_agent(ada.path)
    theirs.model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    theirs.tokenizer.save_pretrained(tmp_path / "theirs")
    outcome = bench.run("adopt", adopt_slice(tmp_path / "theirs"))
    ours = load_agent(outcome.ref.path)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, other.float())
    assert outcome.metrics["adopt/parameters"] == sum(p.numel() for p in ours.model.parameters())


def test_the_files_decide_and_not_where_they_are(bench, ada, tmp_path):
    for name in ("here", "there"):
        shutil.copytree(ada.path, tmp_path / name)
    first = bench.run("adopt", adopt_slice(tmp_path / "here"))
    assert bench.run("adopt", adopt_slice(tmp_path / "there")).cached
    assert not bench.run("adopt", adopt_slice(tmp_path / "here", chat_template="{{ messages }}")).cached
    assert not first.cached
