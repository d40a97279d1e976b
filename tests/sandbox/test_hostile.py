"""Hostile programs: nothing escapes, nothing hangs, no worker dies, nothing passes that should not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hacrl_core.errors import ConfigError
from hacrl_core.verification import close_pool
from hacrl_core.verification.jail import kernel, landlock
from tests.patience import patience
from tests.sandbox.cases import Place
from tests.sandbox.hostile import all_programs
from tests.sandbox.judge import run_programs, write_verifier
from tests.sandbox.place import attacked_place
from tests.sandbox.run_all import GOOD, Outcome, run_all
from tests.sandbox.users import run_as_ordinary_user

_NOWHERE = Place("/x/secret", "/x", "/x/store", "/x", "/x", 1, "/x/s", 1, 1, 1)
_NAMES = [each.name for each in all_programs(_NOWHERE) if not each.slow]
linux = pytest.mark.skipif(not kernel.LINUX, reason="the sandbox exists on Linux only")


def test_there_are_enough_of_them_and_no_two_alike() -> None:
    programs = all_programs(_NOWHERE)
    assert len(programs) >= 200
    assert len({each.name for each in programs}) == len(programs)


@pytest.mark.parametrize("name", _NAMES)
def test_a_hostile_program_achieves_nothing(name: str, quick: Outcome) -> None:
    result = quick.results[name]
    assert "kind" in result, result  # the verifier itself must not fail
    assert result["passed"] == 0, result


def test_workers_live_and_nothing_is_damaged(quick: Outcome) -> None:
    assert quick.dead_workers == 0
    assert quick.damage == []
    assert quick.still_works


@linux
@pytest.mark.hostile
def test_all_of_them(tmp_path: Path) -> None:
    outcome = run_all(tmp_path)
    assert outcome.held, outcome
    assert outcome.results["hog-loop"]["kind"] == "timeout"
    assert outcome.results["hog-sleep"]["kind"] == "timeout"
    assert outcome.results["hog-memory-list"]["kind"] == "memory"
    assert outcome.results["hog-output"]["kind"] == "output_limit"


@linux
@pytest.mark.hostile
@pytest.mark.parametrize(
    "without",
    [
        ("namespaces",),
        ("Landlock",),
        pytest.param(("namespaces", "unreadable memory"), id="landlock-and-seccomp-alone"),
    ],
)
def test_each_layer_holds_alone(without: tuple[str, ...], tmp_path: Path) -> None:
    """Without namespaces Landlock and seccomp hold everything; without Landlock the private root and seccomp do."""
    if "namespaces" in without and landlock.version() < landlock.SCOPED:
        pytest.skip(f"Landlock version {landlock.version()} does not hold signals")
    # Without Landlock a program sees its jail: own /proc and /tmp, a root folder of what is allowed, this package.
    own = (
        "import-hacrl",
        "proc",
        "tmp",
        "list-",
        "scan-",
        "tempfile",
        "symlink",
        "mkfifo",
        "mkdir",
        "read-parent",
        "memory-file",
    )
    hides = "Landlock" in without

    def chosen(each: Any) -> bool:
        return not each.slow and not (hides and each.family == "escape" and any(part in each.name for part in own))

    outcome = run_all(tmp_path, chosen, without=without)
    assert outcome.held, (outcome.escapes, outcome.errors, outcome.dead_workers, outcome.damage)


@linux
@pytest.mark.parametrize("without", [("seccomp",), ("namespaces", "Landlock")])
def test_programs_are_refused_where_the_sandbox_has_a_hole(without: tuple[str, ...], tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path)
    try:
        for mode in (None, "required"):
            with pytest.raises(ConfigError, match=r"the sandbox cannot hold (programs|verifiers) on this machine"):
                run_programs(verifier, [GOOD], sandbox=mode, without=without)
        assert run_programs(verifier, [GOOD], sandbox="best", without=without)[0]["kind"] == "passed"
    finally:
        close_pool()


@linux
def test_without_a_sandbox_only_where_the_user_says_so(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path)
    reads_home = f"print(open({str(tmp_path / 'sandbox_judge.py')!r}).read(1) == '\\n')"
    problem = {"tests": [{"input": "", "output": "True"}]}
    try:
        assert run_programs(verifier, [(reads_home, problem)], sandbox="off")[0]["kind"] == "passed"
        assert run_programs(verifier, [(reads_home, problem)])[0]["passed"] == 0
    finally:
        close_pool()


@linux
@pytest.mark.hostile
def test_the_programs_do_what_they_say_where_nothing_holds_them(tmp_path: Path) -> None:
    """An attack that never works would prove nothing: most of them succeed in a plain process."""
    with attacked_place(tmp_path) as place:
        tried = [each for each in all_programs(place) if each.works_outside]
        harmless = [each for each in tried if "store" not in each.name or each.name.startswith("read")]
        failed = [each.name for each in harmless if not _escapes(each.program)]
    for left in Path("/tmp").glob("left-by-a-program*"):
        left.rmdir() if left.is_dir() and not left.is_symlink() else left.unlink()
    for left in [Path("/tmp/copy-of-secret"), *Path("/tmp").glob("hard-*")]:
        left.unlink(missing_ok=True)
    assert len(harmless) >= 80
    assert failed == []


def _escapes(program: str) -> bool:
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60), check=False
    )
    return run.stdout.rstrip().endswith("ESCAPED")


@linux
@pytest.mark.hostile
@pytest.mark.skipif(os.geteuid() != 0, reason="these tests run as an ordinary user already")
def test_all_of_them_as_an_ordinary_user() -> None:
    run = run_as_ordinary_user(["-m", "tests.sandbox.run_all"])
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["user"] != 0
    assert summary["held"] is True
    assert summary["programs"] >= 200
