"""A home made by an earlier version answers from the cache: nothing is computed again, and every command reads it.

``old_home/home.tar.xz`` was made by commit d1e5ac1 with ``old_home/make.sh``, on x86-64: a campaign of two iterations
with evaluation, a sweep, a pinned version, a version whose files were collected, and a checkpoint folder that was
evaluated by itself. It is never made anew: if a test here fails, homes of users have stopped answering. A further
home, of a later version, goes beside it.
"""

import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = Path(__file__).with_name("old_home")
CAMPAIGN = "old-home"
# In the home's time `math` was the verifier of a config that names none. Now it is `strict`, on purpose, and its
# verdicts are other artifacts. Who goes on with such a campaign names the verifier that it was begun with.
AS_THEN = ("--set", "verify.verifier=math")
CHECKPOINT = "checkpoint --benchmark arithmetic --limit 8 --max-tokens 20 --verifier math"
# Of the campaign: 2 warm starts, 4 evaluations, and in two iterations 2 samples, 20 calls of the agents, 2 references.
STAGES = 30


class OldHome:
    """The home and what lay beside it, unpacked; and the command, run there."""

    def __init__(self, place: Path) -> None:
        self.place, self.root = place, place / "home"
        for name in ("campaign.yaml", "sweep.yaml"):
            shutil.copy(FIXTURE / name, place / name)
        with tarfile.open(FIXTURE / "home.tar.xz") as packed:
            packed.extractall(place, filter="data")
        self.artifacts = self.objects()
        self.records = self.files("campaigns/*/stages.jsonl")

    def files(self, pattern: str) -> dict[str, str]:
        """Path → digest."""
        paths = [path for path in sorted(self.root.glob(pattern)) if path.is_file()]
        return {str(p.relative_to(self.root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}

    def accuracies(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return seeds, mean, deviation, difference and interval of the sweep's variants and agents."""
        kept = ("seeds", "mean", "deviation", "difference", "low", "high")
        with (self.root / "sweeps" / "old-sweep" / "summary.csv").open() as file:
            return {(row["variant"], row["agent"]): tuple(row[k] for k in kept) for row in csv.DictReader(file)}

    def objects(self) -> dict[str, str]:
        return self.files("store/objects/**/*")

    def __call__(self, *words: str) -> str:
        """The command in a process of its own, as a user starts it."""
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *words],
            cwd=self.place,
            env={**_foreign_to_us(os.environ), **self._settings(), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=patience(240),
        )
        text = done.stdout + done.stderr
        assert done.returncode == 0, text
        assert "Traceback" not in text, text
        return text

    def look(self, *words: str) -> str:
        """The same in this process: most of a short command's time goes into imports."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.place)
            for name in os.environ.keys() - _foreign_to_us(os.environ).keys():
                patch.delenv(name)
            done = CliRunner().invoke(app, list(words), env=self._settings(), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    def _settings(self) -> dict[str, str]:
        own = {"HACRL_HOME": str(self.root), "HOME": str(self.place)}
        return {**own, "COLUMNS": "300", "OMP_NUM_THREADS": "1"}

    def assert_nothing_was_computed(self) -> None:
        assert self.objects() == self.artifacts, "artifacts of the old home changed, or new ones appeared"
        assert self.files("campaigns/*/stages.jsonl") == self.records, "a campaign's record names other artifacts"
        assert not (self.root / "store" / "damaged").exists(), "an artifact of the old home was taken for damaged"


def _foreign_to_us(environment: Mapping[str, str]) -> dict[str, str]:
    """Neither settings nor servers of whoever runs the tests."""
    ours = ("HACRL_", "PREFECT_", "MLFLOW_")
    return {name: value for name, value in environment.items() if not name.startswith(ours)}


@pytest.fixture
def old(tmp_path: Path) -> OldHome:
    """Each test its own: one that finds something missing computes it, and would hide it from the next."""
    return OldHome(tmp_path)


# -- from the cache ------------------------------------------------------------------------------------------


def test_the_whole_campaign_is_answered_from_the_cache(old: OldHome) -> None:
    text = old("run", "campaign.yaml", *AS_THEN)
    assert f"All {STAGES} stages were in the cache; nothing had to run" in text
    assert not (old.root / "prefect").exists(), "a server was started although nothing had to run"
    old.assert_nothing_was_computed()


def test_the_sweep_computes_nothing_and_its_results_are_those_of_then(old: OldHome) -> None:
    before, accuracies = old.files("sweeps/old-sweep/*.csv"), old.accuracies()
    assert len(before) == 3
    assert "0 stages ran (0 planned)" in old(
        "sweep", "sweep.yaml", "--set", "settings={iterations: 1, verify.verifier: math}"
    )
    after = old.files("sweeps/old-sweep/*.csv")
    # The summary is a view: its statistics and the order of its rows changed since, its accuracies did not.
    assert {name for name in before if after[name] != before[name]} <= {"sweeps/old-sweep/summary.csv"}
    assert old.accuracies() == accuracies
    old.assert_nothing_was_computed()


@pytest.mark.parametrize(
    "words",
    [
        tuple(CHECKPOINT.split()),  # taken in by adopt
        ("old-home/ada",),
        ("old-home/ben@0", "--benchmark", "held_out"),
    ],
    ids=["checkpoint folder", "last version", "first version"],
)
def test_evaluations_are_answered_from_the_cache(old: OldHome, words: tuple[str, ...]) -> None:
    assert "from the cache" in old.look("eval", *words)
    old.assert_nothing_was_computed()


# -- read by every command -----------------------------------------------------------------------------------


SAYS = {
    "status --all": r"old-home\s+complete\s+2/2",
    "status old-home": r"old-home/ben\s+0\.17",
    "rollouts old-home --prompts 2": r"(?s)right answer:.*advantage.*right answer:",
    "logs old-home --lines 0": r"complete: 30 stages ran",
    "store verify": r"artifacts are whole .* 1 collected; 0 damaged",
    "store ls old-home": r"old-home\s+ben\s+verify\s+2",
    "store ls old-home --versions --json": r'(?s)ada@1".*"files": false.*ben@1".*"pinned": true',
    "report old-home --no-pictures": r"report\.html",
}


@pytest.mark.parametrize("command", SAYS)
def test_commands_read_it(old: OldHome, command: str) -> None:
    text = old.look(*command.split())
    assert re.search(SAYS[command], text), text
    old.assert_nothing_was_computed()


def test_it_names_no_folder_of_the_machine_that_made_it() -> None:
    named = re.compile(rb"/(?:home|mnt|root|tmp|Users|var|work)/")
    with tarfile.open(FIXTURE / "home.tar.xz") as packed:
        for member in packed.getmembers():
            file = packed.extractfile(member)
            assert file is None or not named.search(file.read()), member.name
