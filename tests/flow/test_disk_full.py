"""A disk that really is full: on a small file system where the tests may mount one, else by a limit on file sizes."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from flows.home import Home
from flows.record.record import read_entries
from flows.stage_calls import StageCalls
from flows.store.inspect import verify_store
from flows.store.space import disk_estimate, estimate
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.removal import size_of
from hacrl_core.errors import StageError
from tests.flow.conftest import tiny
from tests.flow.homes import digests, home_over, own_copy, run_here

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(shared_store, tmp_path_factory) -> Home:
    home = home_over(shared_store, tmp_path_factory.mktemp("undisturbed"))
    run_here(campaign(), home)
    return home


def campaign(**changes):
    return tiny(**{"iterations": 3, "evaluate": {}, **changes})


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"))


def calls(config) -> StageCalls:
    return StageCalls(config)


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
    home = own_copy(undisturbed, "tiny", small_disk / "home", ("warmstart",), record=False)
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


@pytest.fixture
def no_large_files() -> Iterator[None]:
    """What a quota does, without the right to set one: no file of this process may grow beyond 50 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_may_not_grow_is_the_same_error(tmp_path, undisturbed, request):
    home = own_copy(undisturbed, "tiny", tmp_path / "home", ("warmstart",), record=False)
    request.getfixturevalue("no_large_files")
    with pytest.raises(StageError, match=r"update \w+ iteration 1: the disk of .* is full; free some space"):
        run_here(campaign(iterations=1), home)
    assert verify_store(quiet(), home, repair=False) == 0
    assert list((home.store / "staging").iterdir()) == []


def test_the_estimate_is_near_what_a_campaign_takes_and_says_when_the_disk_is_smaller(
    undisturbed, tmp_path, monkeypatch
):
    config = campaign()
    entries = read_entries(undisturbed.campaign("tiny"))
    took = sum(size_of(Store(undisturbed.store).folder(entry.stage, entry.key)) for entry in entries)
    empty = Home(tmp_path / "empty")
    empty.root.mkdir()
    need = estimate(config, Store(empty.store), [], calls(config))
    assert need.unknown == ()
    assert 0.5 * took < need.bytes < 2 * took
    kept = estimate(campaign(keep={"last": 1}), Store(empty.store), [], calls(config))
    assert {count for _, count in kept.versions.values()} == {2}  # the last and the one being written
    assert set(kept.origins) == set(config.agents)  # and the first
    longer = estimate(campaign(iterations=5), Store(undisturbed.store), entries, calls(config))
    assert {count for _, count in longer.versions.values()} == {2}
    assert longer.origins == {}
    line, warning = disk_estimate(config, empty, Store(empty.store), [], calls(config))
    assert line.startswith("disk: needs about ")
    assert warning is None
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    _, warning = disk_estimate(config, empty, Store(empty.store), [], calls(config))
    assert "1.0 kB free, and the campaign needs about" in warning
    assert "--set keep.last=2" in warning


@pytest.mark.parametrize("keep", [None, {"last": 1}])
def test_halfway_the_estimate_is_what_is_written_from_then_on(undisturbed, keep):
    """After one of three iterations; with a policy the old version is there while the next one is written."""
    config, store = campaign(keep=keep), Store(undisturbed.store)
    entries = read_entries(undisturbed.campaign("tiny"))
    done = [entry for entry in entries if not entry.iteration]
    to_come = [entry for entry in entries if entry.iteration]
    assert {entry.iteration for entry in to_come} == {1, 2}
    versions = [size_of(store.folder(e.stage, e.key)) for e in to_come if e.stage == "update"]
    tables = sum(size_of(store.folder(e.stage, e.key)) for e in to_come if e.stage != "update")
    need = estimate(config, store, done, calls(config))
    assert need.origins == {}
    assert {count for _, count in need.versions.values()} == {2 if keep is None else 1}
    written = tables + sum(versions) / (1 if keep is None else 2)
    assert need.bytes == pytest.approx(written, rel=0.05)
