"""``hacrl task try`` and ``hacrl task check`` on good and on broken tasks."""

import tarfile
from pathlib import Path
from textwrap import dedent

import pytest
from typer.testing import CliRunner

from flows.cli import app
from hacrl_core.agents.lessons import lessons, taught_text
from hacrl_core.config.problems import TaskProblems

GOOD = """
    from hacrl import Example, Problem, Verdict
    def problems():
        for i in range(40):
            yield Problem(f"double {i}", answer=str(2 * i), tags={"kind": "even" if i % 2 == 0 else "odd"},
                          solution=f"it is {2 * i}")
    def verify(response, problem):
        found = response.split()[-1] if response.split() else ""
        return Verdict(float(found == problem.answer), answer=found, parts={"words": len(response.split()[:9])})
    examples = [Example(Problem("double 4", answer="8"), right=["8", "so 8"], wrong=["9"], hostile=["8 " * 3 + "?"])]
"""


def run(tmp_path: Path, name: str, source: str, *command: str) -> tuple[int, str]:
    (tmp_path / name).write_text(dedent(source))
    verb, *further = command
    done = CliRunner().invoke(app, ["task", verb, str(tmp_path / name), *further], env={"COLUMNS": "160"})
    return done.exit_code, " ".join(done.output.split())


def test_a_good_task_passes_and_is_shown(tmp_path: Path) -> None:
    code, text = run(tmp_path, "doubling.py", GOOD, "check")
    assert code == 0, text
    assert "all as they should be" in text
    code, text = run(tmp_path, "doubling.py", GOOD, "try", "-n", "2")
    assert code == 0, text
    assert "double 0" in text
    assert "it is 0" in text
    assert "words 3" in text


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("float(found == problem.answer)", "0.0", "a right answer is judged incorrect"),
        ("float(found == problem.answer)", "1.0", "a wrong answer is judged correct"),
        (
            "found = response.split()[-1]",
            "float(response) ; found = response.split()[-1]",
            "the verifier ends in error",
        ),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, old: str, new: str, fault: str) -> None:
    assert old in GOOD
    code, text = run(tmp_path, "doubling.py", GOOD.replace(old, new), "check")
    assert code == 1
    assert fault in text


def test_a_task_that_hangs_on_hostile_text_ends_in_time_and_a_broken_one_in_one_line(tmp_path: Path) -> None:
    hangs = GOOD.replace("found = ", "import re\n        re.match(r'(a+)+$', response[:40] + '!')\n        found = ")
    code, text = run(tmp_path, "hanging.py", hangs, "check", "--timeout", "0.3")
    assert code == 0, text
    code, text = run(tmp_path, "broken.py", "import nothing_like_it\n", "check")
    assert code == 2
    assert "nothing_like_it" in text
    assert "Traceback" not in text


def test_a_warm_start_is_taught_the_tasks_solutions_in_the_wanted_mixture(tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text(dedent(GOOD))
    corpus = TaskProblems(task=str(tmp_path / "doubling.py"))
    drawn = lessons(corpus, {"even": 3.0, "odd": 1.0}, 0, 400)
    share = sum(problem.tags["kind"] == "even" for problem in drawn) / 400
    assert 0.65 < share < 0.85
    assert {taught_text(problem) for problem in drawn} <= {f"it is {2 * i}" for i in range(40)}
    assert lessons(corpus, {}, 3, 5) == lessons(corpus, {}, 3, 5) != lessons(corpus, {}, 4, 5)


def test_an_agent_of_a_real_campaign_answers(tmp_path: Path) -> None:
    """The stored home's agent was trained on sums: what it says is shown with the verdict of this task."""
    stored = Path(__file__).resolve().parents[2] / "contract" / "old_home" / "home.tar.xz"
    with tarfile.open(stored) as packed:
        packed.extractall(tmp_path, filter="data")
    source = """
        from hacrl import Problem, Verdict
        def problems():
            for i in range(1, 5):
                yield Problem(f"{i}+{i}=?", answer=str(2 * i))
        def verify(response, problem):
            return Verdict(0.25 if response else 0.0, correct=False, answer=f"heard for {problem.answer}")
    """
    further = ["--agent", "old-home/ada@latest", "-n", "3", "--max-tokens", "12", "--home", str(tmp_path / "home")]
    code, text = run(tmp_path, "sums.py", source, "try", *further)
    assert code == 0, text
    assert "old-home/ada" in text
    assert [f"{i}+{i}=?" in text for i in range(1, 5)] == [True, True, True, False]
    assert text.count("0.25") == 3
    assert [f"for {2 * i}" in text for i in range(1, 4)] == [True, True, True]
    code, text = run(tmp_path, "sums.py", source, "try", "--agent", "old-home/eve", "--home", str(tmp_path / "home"))
    assert code == 2
    assert "eve" in text
    assert "Traceback" not in text
