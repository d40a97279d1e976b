"""What a process keeps loaded: loaded when needed, kept apart by agent, closed as one."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hacrl_core import generation
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.warm import LoadedAgent, WarmModels


class Engine:
    def __init__(self, config, *, own_code=False):
        self.config, self.closed = config, False

    def close(self):
        self.closed = True


def test_a_stage_context_needs_no_torch():
    code = (
        "import sys, stages.spec; stages.spec.Context().warm.close(); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_problems_are_loaded_once_per_key():
    warm, loads = WarmModels(), []
    for key in ("a", "a", "b", "b", "a"):
        assert warm.problems(key, lambda key=key: loads.append(key) or key) == key
    assert loads == ["a", "b", "a"]


def test_one_engine_is_kept_and_replaced_when_its_config_changes(monkeypatch):
    monkeypatch.setattr(generation, "create_engine", Engine)
    warm, config = WarmModels(), GenerateConfig(max_tokens=8)
    first = warm.engine(config, "cpu")
    limited = config.model_copy(update={"max_prompt_tokens": 7})
    assert warm.engine(limited, "cpu") is first, "the limit on prompts is the stages' to check"
    second = warm.engine(config.model_copy(update={"batch_size": 3}), "cpu")
    assert second is not first
    assert (first.closed, second.closed) == (True, False)


def test_agents_of_one_process_are_kept_apart_and_closed_together(monkeypatch):
    monkeypatch.setattr(generation, "create_engine", Engine)
    warm, config = WarmModels(), GenerateConfig(max_tokens=8)
    engines = {name: warm.for_agent(name).engine(config, "cpu") for name in ("ada", "ben")}
    assert engines["ada"] is not engines["ben"]
    assert warm.for_agent("ada").engine(config, "cpu") is engines["ada"]
    assert not warm.has_engine
    warm.close()
    assert all(engine.closed for engine in engines.values())
    assert not warm.for_agent("ada").has_engine


@pytest.mark.parametrize(("gigabytes", "stays"), [(70, True), (40, False)])
def test_the_reference_leaves_the_newest_version_on_a_gpu_that_has_room(gigabytes, stays, monkeypatch):
    """10 GB of weights: the first version, the newest one's gradient and moments, and as much again to spare."""
    import torch

    class Weights:
        def parameters(self):
            return [torch.empty(2_500_000_000, device="meta")]

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((gigabytes - 10) * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * 10**9)
    monkeypatch.setattr(WarmModels, "_load", lambda self, path, digest, device, attention: LoadedAgent(
        digest, device, SimpleNamespace(model=Weights())))  # fmt: skip
    warm = WarmModels()
    assert not warm.has_room_for_first("cuda:0"), "nothing is known before a version is loaded"
    assert warm.has_room_for_first("cpu")
    newest = warm.agent("path", "newest", device="cuda:0")
    assert warm.has_room_for_first("cuda:0") is stays
    if stays:
        warm.first_version("path", "first", device="cuda:0")
        assert warm.agent("path", "newest", device="cuda:0") is newest, "the update finds it where score left it"
        assert warm.has_room_for_first("cuda:0"), "it is there already"


def test_tokenizer_files_are_read_again_only_where_they_are_others(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr("hacrl_core.agents.agent.load_tokenizer", lambda path, own_code: path.name)
    monkeypatch.setattr("hacrl_core.rendering.tokenizer_fingerprint", lambda tokenizer: f"fingerprint of {tokenizer}")
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), read_bytes(path))[1])
    for version, words in (("one", "a"), ("two", "a"), ("three", "b")):
        (tmp_path / version).mkdir()
        for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
            (tmp_path / version / name).write_text(words)
    warm = WarmModels()
    assert [warm.tokenizer(tmp_path / name)[0] for name in ("one", "one", "two", "three")] == ["one"] * 3 + ["three"]
    assert read == ["chat_template.jinja", "tokenizer.json"] * 3
    (tmp_path / "three" / "tokenizer.json").write_text("longer")
    assert warm.tokenizer(tmp_path / "three")[1] == "fingerprint of three"
    assert len(read) == 8
