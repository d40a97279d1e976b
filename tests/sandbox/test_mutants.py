"""Generated hostile programs: attacks from every place in a program, and lies against every form of test."""

import json
import os
from pathlib import Path

import pytest

from hacrl_core.verification import close_pool
from hacrl_core.verification.jail import kernel
from tests.sandbox.cases import Place
from tests.sandbox.judge import run_programs, write_verifier
from tests.sandbox.mutants import FORMS, LIES, attacks, fake_mutants, mutants
from tests.sandbox.run_all import generated, run_all
from tests.sandbox.users import run_as_ordinary_user

pytestmark = pytest.mark.skipif(not kernel.LINUX, reason="the sandbox exists on Linux only")
_NOWHERE = Place("/x/secret", "/x", "/x/store", "/x", "/x", 1, "/x/s", 1, 1, 1)


def test_every_attack_and_every_lie_is_among_them() -> None:
    names = [each.name for each in mutants(_NOWHERE, 0, 200)]
    assert len(set(names)) == 200
    assert all(any(name.startswith(f"mutant-{attack}-") for name in names) for attack in attacks(_NOWHERE))
    assert len(list(fake_mutants(_NOWHERE))) == len(FORMS) * len(LIES)


@pytest.mark.parametrize("form", ["all-map", "not-any-map", "filter", "no-import"])
def test_a_test_is_decided_by_its_own_functions(form: str, tmp_path: Path) -> None:
    """A program that raises StopIteration, or defines a math of its own, once passed tests of these forms."""
    lies = ["raise-StopIteration", "forged-error", "module", "forged-object"]
    test = FORMS[form].replace("X", "4711")
    right = ("def f(n): return 4711 + n * n", {"tests": [test]})
    try:
        found = run_programs(write_verifier(tmp_path), [right, *((LIES[lie], {"tests": [test]}) for lie in lies)])
    finally:
        close_pool()
    assert [each["passed"] for each in found] == [1, 0, 0, 0, 0], found


@pytest.mark.hostile
@pytest.mark.parametrize("without", [(), ("namespaces",)], ids=["all layers", "without namespaces"])
def test_generated_programs_achieve_nothing(without: tuple[str, ...], tmp_path: Path) -> None:
    # Landlock holds what is in files and folders, not whether a path exists: docs/sandbox.md says so.
    outcome = run_all(
        tmp_path,
        lambda each: not (without and each.name.startswith("mutant-secret-path-only-")),
        generated(len(without), 400),
        without=without,
    )
    assert outcome.held, (outcome.escapes, outcome.errors, outcome.dead_workers, outcome.damage)


@pytest.mark.hostile
@pytest.mark.skipif(os.geteuid() != 0, reason="these tests run as an ordinary user already")
def test_generated_programs_achieve_nothing_as_an_ordinary_user() -> None:
    run = run_as_ordinary_user(["-m", "tests.sandbox.run_all", "--mutants", "300", "--seed", "7"])
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["user"] != 0
    assert summary["programs"] >= 900
