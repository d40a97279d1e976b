"""A disk that really is full: on a small file system of its own where the tests may mount one, and by a limit on file sizes anywhere."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from flows.calls import Calls
from flows.home import Home
from flows.records import read_entries
from flows.storing.checking import verify_store
from flows.storing.space import estimate, tell_need
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.collecting import size_of
from hacrl_core.errors import StageError
from hacrl_core.problems import load_problems
from tests.flow.conftest import tiny
from tests.flow.homes import digests, run_here

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Home:
    home = Home(tmp_path_factory.mktemp("undisturbed"))
    run_here(campaign(), home)
    return home


def campaign(**changes):
    return tiny(**{"iterations": 3, "evaluate": {}, **changes})


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"))


def calls(config) -> Calls:
    return Calls(config, load_problems(config.problems).content_digest)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"this user may not mount a small file system: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_one_clear_error_leaves_a_whole_store_and_goes_on_when_there_is_space(small_disk, undisturbed):
    home = Home(small_disk / "home")
    shutil.copytree(undisturbed.store / "objects" / "warmstart", home.store / "objects" / "warmstart")
    with pytest.raises(StageError, match=r"the disk of .* is full; free some space .* and run the same command again"):
        run_here(campaign(), home)
    assert list((home.store / "staging").iterdir()) == []
    assert verify_store(quiet(), home, repair=False) == 0
    saved = set(digests(home, "tiny"))
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    ran = run_here(campaign(), home)
    assert ran
    assert not saved & set(ran)
    assert digests(home, "tiny") == digests(undisturbed, "tiny")


def test_a_file_that_may_not_grow_is_the_same_error(tmp_path, undisturbed):
    """RLIMIT_FSIZE: what a quota or an odd file system does, without the right to mount; in a process of its own, since it may not be raised again."""
    home = Home(tmp_path / "home")
    shutil.copytree(undisturbed.store / "objects" / "warmstart", home.store / "objects" / "warmstart")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(campaign().model_dump(mode="json", exclude_none=True)))
    code = (
        "import sys, pathlib\n"
        "from tests.flow.homes import run_here\n"
        "from flows.home import Home\n"
        "from hacrl_core.config.campaign import CampaignConfig\n"
        "from hacrl_core.config.loading import load_config\n"
        "from hacrl_core.errors import StageError\n"
        "try:\n"
        "    run_here(load_config(pathlib.Path(sys.argv[1]), CampaignConfig), Home(pathlib.Path(sys.argv[2])))\n"
        "except StageError as problem:\n"
        "    print('told:', problem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tiny.yaml"), str(home.root)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert "told: update" in done.stdout, done.stdout + done.stderr
    assert "is full; free some space" in done.stdout
    assert verify_store(quiet(), home, repair=False) == 0
    run_here(campaign(), home)
    assert digests(home, "tiny") == digests(undisturbed, "tiny")


def test_the_estimate_is_near_what_a_campaign_takes_and_says_when_the_disk_is_smaller(
    undisturbed, tmp_path, monkeypatch
):
    config = campaign()
    took = sum(size_of(folder) for folder in (undisturbed.store / "objects").glob("*/*"))
    empty = Home(tmp_path / "empty")
    empty.root.mkdir()
    need = estimate(config, Store(empty.store), [], calls(config))
    assert need.unknown == ()
    assert 0.5 * took < need.bytes < 2 * took
    kept = estimate(campaign(keep={"last": 1}), Store(empty.store), [], calls(config))
    assert {count for _, count in kept.versions.values()} == {3}  # the first, the last and the one being written
    entries = read_entries(undisturbed.campaign("tiny"))
    longer = estimate(campaign(iterations=5), Store(undisturbed.store), entries, calls(config))
    assert {count for _, count in longer.versions.values()} == {3}
    line, warning = tell_need(config, empty, Store(empty.store), [], calls(config))
    assert line.startswith("disk: needs about ")
    assert warning is None
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    _, warning = tell_need(config, empty, Store(empty.store), [], calls(config))
    assert "1.0 kB free, and the campaign needs about" in warning
    assert "--set keep.last=2" in warning
