"""Environments of the package verifiers as tasks: its real classes, of version 0.4."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from hacrl_core.config.problems import TaskProblems
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.errors import ConfigError
from hacrl_core.problems import load_problems
from hacrl_core.tasks import environments
from hacrl_core.tasks.digest import task_digest
from hacrl_core.verification import close_pool, verify_batch

pytestmark = pytest.mark.verifiers

# Written as the package's own `vf-init` lays out an environment: data, a task with rewards, a taskset.
TASKSET = """
import verifiers.v1 as vf


class ReverseData(vf.TaskData):
    answer: str
    level: int


class ReverseTask(vf.Task[ReverseData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def length(self, trace: vf.Trace) -> float:
        if trace.last_reply == "crash":
            raise RuntimeError("the scorer fell over")
        return float(len(trace.last_reply) == len(self.data.answer))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class ReverseConfig(vf.TasksetConfig):
    num_tasks: int = 40


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self) -> list[ReverseTask]:
        words = [f"word{number}" for number in range(self.config.num_tasks)]
        same = {"system_prompt": "Be brief.", "level": 1}
        make = lambda word: ReverseData(prompt=f"Reverse {word}.", answer=word[::-1], **same)
        return [ReverseTask(make(word), self.config.task) for word in words]


__all__ = ["ReverseTaskset"]
"""

TOOLS = """
import verifiers.v1 as vf
from reverse_words import ReverseConfig, ReverseTask, ReverseTaskset


class ToolTask(ReverseTask):
    @vf.reward(weight=1.0)
    async def ran(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0


class ToolTaskset(vf.Taskset[ToolTask, ReverseConfig]):
    def load(self) -> list[ToolTask]:
        return []


__all__ = ["ToolTaskset"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the environments' packages lie, found by Python here and in the workers."""
    pytest.importorskip("verifiers", reason="make test-verifiers installs it")
    package = tmp_path / "reverse_words"
    package.mkdir()
    (package / "__init__.py").write_text(TASKSET)
    (tmp_path / "needs_more.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("reverse_words", "needs_more"):
        sys.modules.pop(name, None)
    environments._taskset.cache_clear()
    close_pool()
    importlib.invalidate_caches()
    yield tmp_path
    close_pool()


def test_an_environment_gives_its_problems_and_its_own_weighted_rewards(folder: Path) -> None:
    config = TaskProblems(task="verifiers:reverse-words", split="all", options={"num_tasks": 12})
    problems = list(load_problems(config).problems)
    assert len(problems) == 12
    first = problems[0]
    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert first.answer == "0drow"
    responses = ["0drow", "abcde", "no", "crash"]
    verify = VerifyConfig(verifier="verifiers:reverse-words", workers=1, timeout_seconds=60)
    verdicts = verify_batch(responses, [first.answer] * 4, verify, problems=[first] * 4)
    assert [str(v.verdict) for v in verdicts] == ["correct", "incorrect", "incorrect", "error"], verdicts
    assert [v.raw for v in verdicts[:3]] == [1.5, 0.5, 0.0]
    assert verdicts[1].parts == {"exact": 0.0, "length": 1.0}
    assert verdicts[1].metrics == {"turns": 1.0}
    assert "the scorer fell over" in verdicts[3].message


def test_splits_share_no_question_and_the_environments_source_is_part_of_its_identity(folder: Path) -> None:
    sets = [
        load_problems(TaskProblems(task="verifiers:reverse-words", split=s)).problems for s in ("training", "held_out")
    ]
    asked = [{json.dumps(p.messages) for p in problems} for problems in sets]
    assert len(asked[0]) + len(asked[1]) == 40
    assert asked[0].isdisjoint(asked[1])
    before = task_digest("verifiers:reverse-words")
    source = folder / "reverse_words" / "__init__.py"
    source.write_text(source.read_text().replace("weight=0.5", "weight=0.25"))
    assert task_digest("verifiers:reverse-words") != before


def test_environments_that_need_more_than_one_response_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="verifiers:needs-more: its reward ran needs a runtime"):
        load_problems(TaskProblems(task="verifiers:needs-more", split="all"))
    with pytest.raises(ConfigError, match="verifiers:not-there: cannot be loaded"):
        load_problems(TaskProblems(task="verifiers:not-there"))
