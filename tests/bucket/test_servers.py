"""The store over real S3 servers: races, damage, errors, a bucket that is away, a server that overwrites."""

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.artifacts.remote import blob_path
from hacrl_core.artifacts.shared import SharedStore
from hacrl_core.config.operation import StoreConfig
from hacrl_core.errors import ConfigError, InputGoneError
from tests.bucket.servers import CREDENTIALS, Faults, careless_server, proxy
from tests.unit.artifacts.test_store import PROVENANCE, identity, publish

pytestmark = pytest.mark.bucket
WRITERS, KEYS = 8, 200


def store(settings: StoreConfig, home: Path, told: list[str] | None = None, **options) -> SharedStore:
    said = told.append if told is not None else None
    return SharedStore(home / "store", Bucket(settings), said, **options)


def check_interface(bucket: Bucket) -> None:
    """What the store relies on, asked of a bucket; it is empty afterwards."""
    assert bucket.read("a/b") is None
    assert bucket.stat("a/b") is None
    assert bucket.create("a/b", b"one")
    assert not bucket.create("a/b", b"two")
    assert bucket.read("a/b") == b"one"
    found = bucket.stat("a/b")
    assert found is not None
    assert found.size == 3
    assert abs(found.modified - time.time()) < 60
    assert bucket.replace("a/b", b"three", found.etag)
    assert not bucket.replace("a/b", b"four", found.etag)
    assert bucket.read("a/b") == b"three"
    assert [stat.path for stat in bucket.list("a/")] == ["a/b"]
    bucket.delete("a/b")
    bucket.delete("a/b")
    assert list(bucket.list("a/")) == []
    bucket.probe()
    assert list(bucket.list("")) == []


def check_large_files(settings: StoreConfig, tmp_path: Path) -> None:
    """A file of several parts arrives as it was."""
    mine, theirs = store(settings, tmp_path / "a"), store(settings, tmp_path / "b")
    staged = mine.stage_folder("x")
    content = os.urandom(17 << 20)
    (staged / "weights").write_bytes(content)
    ref = mine.publish(staged, identity(a=1), {}, {}, {}, PROVENANCE)
    assert mine.uploads.flush(60)
    with theirs.reading([ref]):
        assert (theirs.folder("thing", ref.key) / "weights").read_bytes() == content


def test_the_interface_means_the_same_on_every_server(address, fresh):
    check_interface(Bucket(fresh(address)))


def test_a_bucket_that_does_not_exist_is_one_line(moto_server, tmp_path):
    # SeaweedFS makes a bucket for whoever may.
    nowhere = store(StoreConfig(bucket="s3://nowhere/x", endpoint=moto_server), tmp_path / "a")
    with pytest.raises(
        ConfigError, match=rf"bucket s3://nowhere/x at {moto_server}: there is no such bucket; create it"
    ):
        nowhere.uploads.start()


def test_large_files_travel_in_parts(address, fresh, tmp_path, monkeypatch):
    monkeypatch.setattr("hacrl_core.artifacts.bucket._CHUNK", 5 << 20)
    check_large_files(fresh(address), tmp_path)


def _write(number: int, settings: StoreConfig, home: Path, results) -> None:
    os.environ.update(CREDENTIALS)
    mine = store(settings, home)
    mine.uploads.start()
    for key in range(KEYS):
        # Each writer has content of its own for every fourth key, as GPUs do, and the same for the others.
        publish(mine, identity(key=key), text=f"{key} of {number if key % 4 == 0 else 'all'}")
    done = mine.uploads.flush(120)
    mine.uploads.close()
    read = {}
    for key in range(KEYS):
        found = mine.lookup(identity(key=key))
        read[key] = (found.path / "data.txt").read_text() if found is not None else None
    results.put((number, done, read))


def test_eight_writers_of_two_hundred_keys_leave_one_manifest_each_and_read_nothing_wrong(weed, fresh, tmp_path):
    settings = fresh(weed)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    writers = [
        context.Process(target=_write, args=(number, settings, tmp_path / str(number), results))
        for number in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    answers = [results.get(timeout=500) for _ in writers]
    for writer in writers:
        writer.join(30)
    assert all(done for _, done, _ in answers)
    bucket = Bucket(settings)
    assert len(list(bucket.list("manifests/"))) == KEYS
    fresh_home = store(settings, tmp_path / "reader")
    for key in range(KEYS):
        found = fresh_home.lookup(identity(key=key))
        assert found is not None
        stands = (found.path / "data.txt").read_text()
        assert stands.startswith(f"{key} of ")
        assert {read[key] for _, _, read in answers} == {stands}, "everybody follows the winner"


def test_a_damaged_blob_is_never_used_and_is_mended(address, fresh, tmp_path):
    settings = fresh(address)
    told: list[str] = []
    mine, theirs = store(settings, tmp_path / "a"), store(settings, tmp_path / "b", told)
    ref = publish(mine, identity(a=1))
    mine.uploads.flush(30)
    output = next(o for o in mine.manifest("thing", ref.key).outputs if o.path == "data.txt")
    Bucket(settings).write(blob_path(output.sha256), b"jello")
    with pytest.raises(InputGoneError), theirs.reading([ref]):
        pass
    assert "is damaged and not used" in told[0]
    publish(theirs, identity(a=1))
    theirs.uploads.flush(30)
    with store(settings, tmp_path / "c").reading([ref]):
        pass


def test_errors_lost_answers_and_torn_downloads_change_nothing(weed, fresh, tmp_path):
    faults = Faults(error_share=0.05, lost_share=0.03, torn_share=0.03, delay=0.001)
    with proxy(weed, faults) as through:
        settings = fresh(weed, through)
        told: list[str] = []
        mine = store(settings, tmp_path / "a", told)
        mine.uploads.start()
        refs = []
        for number in range(60):
            with mine.lock(identity(a=number).key):
                refs.append(publish(mine, identity(a=number), text=f"text {number} " * 200))
        assert mine.uploads.flush(120)
        mine.uploads.close()
        assert [text for text in told if "published other content" in text or "damaged" in text] == []
        theirs = store(settings, tmp_path / "b", told)
        for number, ref in enumerate(refs):
            with theirs.reading([ref]):
                assert (theirs.folder("thing", ref.key) / "data.txt").read_text() == f"text {number} " * 200
    assert faults.counts["error"] > 5
    assert faults.counts["lost"] > 3
    assert faults.counts["torn"] > 0


def test_a_bucket_that_is_away_gets_everything_when_it_is_back(weed, fresh, tmp_path):
    faults = Faults()
    with proxy(weed, faults) as through:
        settings = fresh(weed, through)
        told: list[str] = []
        mine = store(settings, tmp_path / "a", told)
        mine.uploads.start()
        first = publish(mine, identity(a=0))
        assert mine.uploads.flush(30)
        faults.away = True
        refs = [first, *(publish(mine, identity(a=number)) for number in range(1, 6))]
        assert not mine.uploads.flush(2)
        assert any("uploaded when it answers" in text for text in told)
        threading.Timer(3.0, lambda: setattr(faults, "away", False)).start()
        assert mine.uploads.flush(60)
        mine.uploads.close()
    theirs = store(StoreConfig(bucket=settings.bucket, endpoint=weed), tmp_path / "b")
    for ref in refs:
        with theirs.reading([ref]):
            pass


def test_a_server_that_refuses_a_wrong_clock_is_one_that_is_away_and_the_clock_is_named(weed, fresh, tmp_path):
    faults = Faults(skewed=True)
    with proxy(weed, faults) as through:
        settings = fresh(weed, through)
        told: list[str] = []
        mine = store(settings, tmp_path / "a", told)
        mine.uploads.start()
        ref = publish(mine, identity(a=0))
        assert not mine.uploads.flush(2)
        assert "this machine's clock differs from the server's" in told[0]
        faults.skewed = False
        assert mine.uploads.flush(60)
        mine.uploads.close()
        with store(settings, tmp_path / "b").reading([ref]):
            pass
    assert faults.counts["skewed"] > 0


def test_a_server_that_ignores_conditions_is_refused_by_name(credentials, tmp_path):
    with careless_server() as address:
        careless = store(StoreConfig(bucket="s3://team/x", endpoint=address), tmp_path / "a")
        publish(careless, identity(a=1))
        with pytest.raises(ConfigError, match=rf"bucket s3://team/x at {address}: .*no conditional PUT"):
            careless.uploads.start()


def test_wrong_credentials_and_no_credentials_are_one_line(weed, fresh, tmp_path, monkeypatch):
    settings = fresh(weed)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ConfigError, match="refuses these credentials"):
        store(settings, tmp_path / "a").uploads.start()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigError, match="no credentials in the environment; set AWS_ACCESS_KEY_ID"):
        Bucket(settings)
