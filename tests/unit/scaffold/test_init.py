"""``hacrl init``: what it writes is read, checked and trained on."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.campaign import run_campaign
from flows.cli import app
from flows.scaffold.campaign import read_origins
from flows.scaffold.write import write_campaign
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from hacrl_core.errors import ConfigError
from tests.flow.conftest import Inline

SMALL = (
    "iterations=1",
    "prompts_per_iteration=6",
    "samples_per_prompt=4",
    "update.minibatch_prompts=3",
    "agents.ada.warmstart.steps=40",
    "agents.ben.warmstart.steps=40",
    "agents.ada.warmstart.corpus_problems=128",
    "agents.ben.warmstart.corpus_problems=128",
)


@pytest.mark.docs
def test_a_task_of_ones_own_is_written_checked_and_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "my-first", "--task", "own"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "my-first: 2 agents are ready." in done.output
    assert done.output.rstrip().endswith("next: hacrl run my-first.yaml")
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == [
        "my-first.yaml",
        "my_first_task.py",
        "test_my_first_task.py",
    ]
    checked = CliRunner().invoke(app, ["task", "check", "my_first_task.py"], env={"COLUMNS": "160"})
    assert checked.exit_code == 0, checked.output
    config = load_config(tmp_path / "my-first.yaml", CampaignConfig, SMALL)
    inline = Inline(Store(tmp_path / "store"))
    run_campaign(config, StageCalls(config), inline)
    assert {"verify ada #0", "update ben #0", "evaluate ben held_out #1"} <= set(inline.ran)


@pytest.mark.docs
def test_the_tests_that_it_writes_pass_and_fail_with_a_broken_verifier(tmp_path: Path) -> None:
    written = write_campaign("mine", "own", (), tmp_path)
    assert written.task is not None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(written.test)]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    written.task.write_text(written.task.read_text().replace("found == problem.answer", "True"))
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1


@pytest.mark.parametrize("task", ["maths", "code", "reasoning_gym:chain_sum", "own"])
@pytest.mark.parametrize(
    "agents", [(), ("one", "two", "three"), ("org/Big Model", "other/big-model"), ("m/x.gguf", "ada")]
)
def test_every_task_and_kind_of_agent_gives_a_valid_config(task: str, agents: tuple[str, ...], tmp_path: Path) -> None:
    written = write_campaign("c", task, agents, tmp_path)
    config = load_config(written.config, CampaignConfig, ())
    assert len(config.agents) == max(2, len(agents))
    assert all(len(line) <= 160 for line in written.config.read_text().splitlines())


def test_agents_are_folders_files_hub_ids_or_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    found = read_origins(["local", "Qwen/Qwen3-0.6B", "gg/m.Q4.gguf", "other/qwen3-0.6b", "dora"])
    assert [(origin.name, origin.checkpoint is not None) for origin in found] == [
        ("local", True),
        ("qwen3-0.6b", True),
        ("m.q4", True),
        ("qwen3-0.6b-2", True),
        ("dora", False),
    ]


@pytest.mark.parametrize(
    ("name", "task", "agents", "words"),
    [
        ("a b", "maths", (), "use letters, digits"),
        ("../x", "maths", (), "use letters, digits"),
        ("a", "chess", (), "choose one of maths, code"),
        ("a", "reasoning_gym:", (), "choose one of maths, code"),
        ("a", "maths", ("ada", "ada"), "given twice"),
        ("a", "maths", ("///",), "gives no name"),
    ],
)
def test_mistakes_are_one_line(name: str, task: str, agents: tuple[str, ...], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        write_campaign(name, task, agents, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_task.py").write_text("mine")
    done = CliRunner().invoke(app, ["init", "a", "--task", "own"])
    assert done.exit_code == 2
    assert "exists already" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["a_task.py"]


def test_several_agents_follow_one_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "trio", "--agents", "ada", "ben", "cyd"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert list(load_config(tmp_path / "trio.yaml", CampaignConfig, ()).agents) == ["ada", "ben", "cyd"]
