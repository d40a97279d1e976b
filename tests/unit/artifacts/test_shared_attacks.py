"""A store in front of a bucket under attack: a kill between files and manifest, stale lists, a cache too small."""

import multiprocessing
import os
import threading
import time

import pytest

from hacrl_core.artifacts.bucket import Bucket, Stat
from hacrl_core.artifacts.shared import SharedStore
from hacrl_core.config.operation import StoreConfig
from hacrl_core.errors import InputGoneError
from tests.patience import patience
from tests.unit.artifacts.test_shared import objects, store
from tests.unit.artifacts.test_store import identity, publish


class Dying(Bucket):
    """The process ends when the files are there and the manifest is not."""

    def create(self, path, data):
        if path.startswith("manifests/"):
            os._exit(9)
        return super().create(path, data)


def _publish_and_die(bucket, home) -> None:
    mine = SharedStore(home / "store", Dying(StoreConfig(bucket=f"file://{bucket}")))
    publish(mine, identity(a=1))
    mine.uploads.flush(10)


@pytest.mark.slow
def test_a_kill_between_files_and_manifest_shows_nobody_anything_and_is_made_good(tmp_path):
    bucket = tmp_path / "bucket"
    process = multiprocessing.get_context("spawn").Process(target=_publish_and_die, args=(bucket, tmp_path / "a"))
    process.start()
    process.join(patience(30))
    assert process.exitcode == 9
    assert {path.partition("/")[0] for path in objects(bucket)} - {"probe", "leases"} == {"blobs"}
    theirs = store(bucket, tmp_path / "b")
    assert theirs.lookup(identity(a=1)) is None
    # The same command again: the queue has outlived the process.
    mine = store(bucket, tmp_path / "a")
    assert mine.uploads.flush(10)
    theirs = store(bucket, tmp_path / "c")
    found = theirs.lookup(identity(a=1))
    assert found is not None
    assert (found.path / "data.txt").read_text() == "hello"


def test_a_download_that_was_cut_short_with_a_length_that_fits_is_not_used(tmp_path):
    bucket = tmp_path / "bucket"
    mine = store(bucket, tmp_path / "a")
    ref = publish(mine, identity(a=1))
    mine.uploads.flush(10)
    # What a server sends is all that is hashed: the shorter object has another digest.
    blob = next(path for path in (bucket / "blobs").iterdir() if path.read_text() == "hello")
    blob.write_text("he")
    told: list[str] = []
    theirs = store(bucket, tmp_path / "b", told)
    with pytest.raises(InputGoneError), theirs.reading([ref]):
        pass
    assert any("is damaged and not used" in text for text in told)
    assert not (theirs.folder("thing", ref.key) / "data.txt").exists()


class Stale(Bucket):
    """Lists what was there at first, for ever."""

    def __init__(self, settings: StoreConfig) -> None:
        super().__init__(settings)
        self.listed: list[Stat] = list(super().list(""))

    def list(self, prefix):
        return iter([stat for stat in self.listed if stat.path.startswith(prefix)])


def test_a_bucket_that_lists_late_answers_look_ups_and_its_garbage_keeps_what_is_new(tmp_path):
    from flows.store.bucket_care import carry_out, plan

    bucket = tmp_path / "bucket"
    mine = store(bucket, tmp_path / "a")
    old = publish(mine, identity(a=1), text="in both")
    mine.uploads.flush(10)
    for path in bucket.rglob("*"):
        then = time.time() - 3 * 3600
        os.utime(path, (then, then))
    stale = SharedStore(tmp_path / "b" / "store", Stale(StoreConfig(bucket=f"file://{bucket}")))
    # After the list was made, another machine publishes an artifact that shares a file with garbage.
    new = publish(mine, identity(a=2), text="in both")
    mine.uploads.flush(10)
    assert stale.lookup(identity(a=2), collected=True) is not None
    garbage = plan(stale, 3600)
    assert [stat.path for stat in garbage.manifests] == [f"manifests/thing/{old.key}.json"]
    stale.bucket.listed = list(Bucket.list(stale.bucket, ""))
    carry_out(stale, garbage)
    theirs = store(bucket, tmp_path / "c")
    with theirs.reading([new]):
        assert (theirs.folder("thing", new.key) / "data.txt").read_text() == "in both"


def test_readers_of_a_cache_smaller_than_one_artifact_always_get_their_files(tmp_path):
    bucket = tmp_path / "bucket"
    mine = store(bucket, tmp_path / "a", cache_bytes=1)
    refs = [publish(mine, identity(a=number), text=f"{number}" * 5000) for number in range(4)]
    mine.uploads.flush(10)
    ended = threading.Event()

    def evict() -> None:
        while not ended.is_set():
            mine.uploads.evict(1)

    evicting = threading.Thread(target=evict)
    evicting.start()
    try:
        for _ in range(10):
            for number, ref in enumerate(refs):
                with mine.reading([ref]):
                    assert (ref.path / "data.txt").read_text() == f"{number}" * 5000
    finally:
        ended.set()
        evicting.join()
