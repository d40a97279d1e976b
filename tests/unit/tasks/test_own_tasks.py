"""A task of one's own: what it may say, what its digest follows, and what reaches verdicts, stage by stage."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.problems import TaskProblems
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.errors import ConfigError
from hacrl_core.problems import load_problems
from hacrl_core.tasks.digest import task_digest
from hacrl_core.tasks.forms import form_of
from hacrl_core.verification import verify_batch
from tests.patience import patience

TASK = """
    import random
    from hacrl import Problem, Verdict
    from helper import strip

    reward_range = (-1.0, 3.0)

    def problems(seed, digits=1):
        numbers = random.Random(seed)
        while True:
            a, b = numbers.randrange(10 ** digits), numbers.randrange(10 ** digits)
            yield Problem(f"{a}+{b}", answer=str(a + b), tags={"digits": str(digits)}, terms=[a, b])

    def verify(response, problem):
        found = strip(response)
        right = found == str(sum(problem.terms))
        parts = {"right": 2.0 if right else -1.0, "short": 1.0 if len(found) < 4 else 0.0}
        return Verdict(sum(parts.values()), correct=right, parts=parts, metrics={"length": len(found)}, answer=found)
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("def strip(text):\n    return text.strip()\n")
    path = tmp_path / "sums_task.py"
    path.write_text(dedent(TASK))
    return path


def judge(name: str, responses: list[str], problems: Any, **settings: Any) -> list[Any]:
    config = VerifyConfig(verifier=name, workers=1, **settings)
    return verify_batch(responses, [p.answer for p in problems], config, problems=problems)


def test_the_public_names_cost_nothing_to_import() -> None:
    code = (
        "import sys, hacrl; hacrl.Verdict(1.0); print([m for m in ('torch', 'numpy', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=patience(60)
    )
    assert done.stdout.strip() == "[]"


def test_a_verdict_carries_raw_reward_parts_metrics_and_answer(task: Path) -> None:
    problems = load_problems(TaskProblems(task=str(task), size=2)).problems
    right = str(sum(problems[0].columns["terms"]))
    good, bad = judge(str(task), [right, "12345"], problems)
    assert (good.verdict, good.raw, good.reward, good.parts) == ("correct", 3.0, 1.0, {"right": 2.0, "short": 1.0})
    assert (bad.verdict, bad.raw, bad.reward, bad.metrics) == ("incorrect", -1.0, 0.0, {"length": 5.0})
    assert bad.extracted_answer == "12345"


def test_problems_are_new_in_every_iteration_and_never_held_out(task: Path) -> None:
    endless = load_problems(TaskProblems(task=str(task), options={"digits": 2}))
    first, again, second = (endless.for_iteration(7, i, 20) for i in (0, 0, 1))
    assert first == again
    assert first != second
    held_out = load_problems(TaskProblems(task=str(task), split="held_out", size=200, options={"digits": 2})).problems
    assert {p.problem_id for p in held_out}.isdisjoint(
        p.problem_id for i in range(20) for p in endless.for_iteration(1, i, 20)
    )


def test_the_digest_follows_the_users_own_imports_and_nothing_else(task: Path) -> None:
    before = task_digest(str(task))
    (task.parent / "unrelated.py").write_text("x = 1\n")
    assert task_digest(str(task)) == before
    (task.parent / "helper.py").write_text("def strip(text):\n    return text\n")
    assert task_digest(str(task)) != before


def test_a_moved_task_keeps_its_digest(task: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    for name in ("sums_task.py", "helper.py"):
        (other / name).write_text((task.parent / name).read_text())
    assert task_digest(str(other / "sums_task.py")) == task_digest(str(task))


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("x = 1\n", "neither 'problems' nor 'verify'"),
        ("import no_such_thing\n", "cannot be imported: ModuleNotFoundError"),
        ("def problems():\n    yield 3\n", "problem 1 is a int"),
        ("def problems():\n    raise RuntimeError('mine')\n    yield\n", r"problems\(\) failed: RuntimeError: mine"),
        ("problems = [{'answer': '1'}]\n", "has no prompt"),
        ("problems = [{'prompt': 'q', 'answer': '1', 'x': object()}]\n", "column x cannot be written as JSON"),
        ("reward_range = 3\nproblems = []\n", "reward_range is 3"),
    ],
)
def test_a_broken_task_is_one_clear_line(tmp_path: Path, source: str, match: str) -> None:
    (tmp_path / "broken_task.py").write_text(source)
    with pytest.raises(ConfigError, match=match):
        load_problems(TaskProblems(task=str(tmp_path / "broken_task.py"), split="all"))


def test_an_unknown_option_and_a_missing_file_are_named(task: Path) -> None:
    with pytest.raises(ConfigError, match=r"no option colour; it has digits"):
        load_problems(TaskProblems(task=str(task), options={"colour": 1}))
    with pytest.raises(ConfigError, match="no such file"):
        load_problems(TaskProblems(task="nowhere/task.py"))


def test_a_task_may_be_a_package_with_a_dataset(tmp_path: Path) -> None:
    package = tmp_path / "colours"
    package.mkdir()
    rows = [{"question": f"colour {i}?", "gold": str(i), "hint": [i]} for i in range(30)]
    (package / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (package / "__init__.py").write_text(
        dedent("""
        from .scoring import score as verify
        problems = {"path": "rows.jsonl", "prompt": "{problem}",
                    "columns": {"problem": "question", "answer": "gold", "extra": ["hint"]}}
    """)
    )
    scoring = package / "scoring.py"
    scoring.write_text("def score(response, problem):\n    return response == str(problem.hint[0])\n")
    training = load_problems(TaskProblems(task=str(package))).problems
    held_out = load_problems(TaskProblems(task=str(package), split="held_out")).problems
    assert len(training) + len(held_out) == 30
    assert [v.reward for v in judge(str(package), [training[0].answer, "no"], training[:2])] == [1.0, 0.0]
    before = task_digest(str(package))
    scoring.write_text(scoring.read_text() + "# another\n")
    assert task_digest(str(package)) != before


def test_rewards_outside_the_declared_range_are_errors_that_say_so(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text("def verify(response, problem):\n    return 7.0\n")
    (tmp_path / "hang.py").write_text(
        "def verify(response, problem):\n    while response == 'spin': pass\n    return 1\n"
    )
    (found,) = verify_batch(["a"], ["a"], VerifyConfig(verifier=str(tmp_path / "wide.py")))
    assert found.verdict == "error"
    assert "outside [0, 1]" in found.message
    (found,) = verify_batch(["a"], ["a"], VerifyConfig(verifier=str(tmp_path / "wide.py"), reward_range=(0, 14)))
    assert (found.reward, found.raw) == (0.5, 7.0)
    config = VerifyConfig(verifier=str(tmp_path / "hang.py"), timeout_seconds=0.3)
    assert [v.verdict for v in verify_batch(["spin", "fine"], ["a", "a"], config)] == ["timeout", "correct"]


def campaign(**changes: Any) -> CampaignConfig:
    raw = {
        "name": "own",
        "iterations": 1,
        "problems": "my_task.py",
        "prompts_per_iteration": 2,
        "samples_per_prompt": 2,
        "agents": {"ada": {"checkpoint": {"path": "org/model"}}},
        "generate": {"max_tokens": 8},
        "update": {"learning_rate": 1e-4, "minibatch_prompts": 2},
    }
    return CampaignConfig.model_validate({**raw, **changes})


def test_a_task_brings_its_verifier_and_survives_the_record() -> None:
    config = campaign()
    assert (config.problems, config.verify.verifier) == (TaskProblems(task="my_task.py"), "task")
    assert CampaignConfig.model_validate_json(config.model_dump_json()) == config
    assert campaign(verify={"verifier": "exact"}).verify.verifier == "exact"
    assert campaign(problems="math").verify.verifier == "strict"
    assert campaign(problems="reasoning_gym:chain_sum").verify.verifier == "task"


def test_forms_are_recognised_by_their_parameters() -> None:
    def ours(response: str, problem: Any) -> float:
        return 0.0

    def pair(answer: str, truth: str) -> float:
        return 0.0

    def plain(completions: list[str], **kwargs: Any) -> list[float]:
        return [0.0]

    def chat(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        return [len(c[0]["content"]) for c in completions]

    def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return 0.0

    assert [form_of(f) for f in (ours, pair, plain, chat, verl)] == ["problem", "pair", "trl", "trl_chat", "verl"]
