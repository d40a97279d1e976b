"""A store in front of a bucket, over a local folder: what is known, what travels, and what is never trusted."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from hacrl_core.artifacts import leases as leases_module
from hacrl_core.artifacts import open_store
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.artifacts.opening import use_bucket
from hacrl_core.artifacts.removal import collect
from hacrl_core.artifacts.shared import SharedStore
from hacrl_core.config.operation import StoreConfig
from hacrl_core.errors import BucketError, ConfigError, InputGoneError
from tests.patience import patience
from tests.unit.artifacts.test_store import PROVENANCE, identity, publish


@pytest.fixture
def bucket(tmp_path) -> Path:
    return tmp_path / "bucket"


def store(bucket: Path, home: Path, told: list[str] | None = None, **options) -> SharedStore:
    settings = StoreConfig(bucket=f"file://{bucket}")
    said = told.append if told is not None else None
    return SharedStore(home / "store", Bucket(settings), said, **options)


def objects(bucket: Path) -> list[str]:
    return sorted(path.relative_to(bucket).as_posix() for path in bucket.rglob("*") if path.is_file())


def test_what_one_home_publishes_another_knows_and_reads(tmp_path, bucket):
    mine, theirs = store(bucket, tmp_path / "a"), store(bucket, tmp_path / "b")
    ref = publish(mine, identity(a=1))
    assert mine.uploads.is_queued(ref.key)
    assert objects(bucket) == []
    assert mine.uploads.flush(10)
    assert mine.uploads.is_durable(ref.key)
    manifest = mine.manifest("thing", ref.key)
    assert objects(bucket) == sorted(
        [f"manifests/thing/{ref.key}.json", *(f"blobs/{output.sha256}" for output in manifest.outputs)]
    )
    found = theirs.lookup(identity(a=1), collected=True)
    assert found is not None
    assert (found.key, found.digest) == (ref.key, ref.digest)
    assert not (found.path / "data.txt").exists()  # known, and nothing was downloaded
    with theirs.reading([found]):
        assert (found.path / "data.txt").read_text() == "hello"
    assert store(bucket, tmp_path / "b").lookup(identity(a=1)) == found
    assert theirs.lookup(identity(a=2)) is None


def test_what_a_newer_look_up_needs_is_downloaded_and_what_a_manifest_answers_is_not(tmp_path, bucket):
    mine, theirs = store(bucket, tmp_path / "a"), store(bucket, tmp_path / "b")
    ref = publish(mine, identity(a=1))
    mine.uploads.flush(10)
    found = theirs.lookup(identity(a=1))
    assert found is not None
    assert (found.path / "data.txt").read_text() == "hello"
    assert theirs.uploads.is_durable(ref.key)
    assert not theirs.uploads.waiting()


class Counted(Bucket):
    """A bucket that counts its requests."""

    def __init__(self, settings: StoreConfig) -> None:
        super().__init__(settings)
        self.asked: list[str] = []

    def _ask(self, path, request):
        self.asked.append(path)
        return super()._ask(path, request)


def test_a_look_up_is_one_request_and_none_for_what_is_known_here(tmp_path, bucket):
    mine = store(bucket, tmp_path / "a")
    ref = publish(mine, identity(a=1))
    mine.uploads.flush(10)
    counted = Counted(StoreConfig(bucket=f"file://{bucket}"))
    theirs = SharedStore(tmp_path / "b" / "store", counted)
    theirs.lookup(identity(a=1), collected=True)
    assert counted.asked == [f"manifests/thing/{ref.key}.json"]
    theirs.lookup(identity(a=1), collected=True)
    theirs.manifest("thing", ref.key)
    SharedStore(tmp_path / "b" / "store", counted).lookup(identity(a=1), collected=True)
    assert len(counted.asked) == 1
    for _ in range(3):
        assert theirs.lookup(identity(a=2)) is None
    assert len(counted.asked) == 2


def damage(bucket: Path, text: str) -> Path:
    path = next(p for p in (bucket / "blobs").iterdir() if p.read_text() == text)
    path.write_text(text[::-1])
    return path


def test_a_damaged_blob_is_never_used_and_whoever_has_the_content_mends_it(tmp_path, bucket):
    told: list[str] = []
    mine, theirs = store(bucket, tmp_path / "a"), store(bucket, tmp_path / "b", told)
    ref = publish(mine, identity(a=1))
    mine.uploads.flush(10)
    hurt = damage(bucket, "hello")
    with pytest.raises(InputGoneError), theirs.reading([ref]):
        pass
    assert theirs.lookup(identity(a=1)) is None
    assert theirs.lookup(identity(a=1), collected=True) is not None
    assert "is damaged and not used" in told[0]
    assert publish(theirs, identity(a=1)).digest == ref.digest  # computed again, under the manifest of the first
    theirs.uploads.flush(10)
    assert hurt.read_text() == "hello"
    assert store(bucket, tmp_path / "c").lookup(identity(a=1)) is not None


def test_a_missing_blob_and_a_damaged_manifest_count_as_absent_and_are_mended(tmp_path, bucket):
    mine = store(bucket, tmp_path / "a")
    ref = publish(mine, identity(a=1))
    mine.uploads.flush(10)
    manifest = bucket / f"manifests/thing/{ref.key}.json"
    manifest.write_text(manifest.read_text().replace("thing/size", "thing/mice"))
    told: list[str] = []
    theirs = store(bucket, tmp_path / "b", told)
    assert theirs.lookup(identity(a=1), collected=True) is None
    assert "its content differs from its own digest" in told[0]
    publish(theirs, identity(a=1))
    theirs.uploads.flush(10)
    third = store(bucket, tmp_path / "c")
    assert third.lookup(identity(a=1)) is not None
    for blob in (bucket / "blobs").iterdir():
        blob.unlink()
    with pytest.raises(InputGoneError), store(bucket, tmp_path / "d").reading([ref]):
        pass


def test_a_manifest_under_a_foreign_key_is_not_believed(tmp_path, bucket):
    mine = store(bucket, tmp_path / "a")
    ref = publish(mine, identity(a=1))
    mine.uploads.flush(10)
    (bucket / "manifests/thing" / f"{identity(a=2).key}.json").write_bytes(
        (bucket / f"manifests/thing/{ref.key}.json").read_bytes()
    )
    told: list[str] = []
    assert store(bucket, tmp_path / "b", told).lookup(identity(a=2)) is None
    assert "belongs to thing" in told[0]


def test_of_two_homes_with_other_content_the_first_in_the_bucket_wins_and_the_loser_follows(tmp_path, bucket):
    told: list[str] = []
    winner, loser = store(bucket, tmp_path / "a"), store(bucket, tmp_path / "b", told)
    first = publish(winner, identity(a=1), text="first")
    second = publish(loser, identity(a=1), text="second")
    winner.uploads.flush(10)
    loser.uploads.flush(10)
    assert "another machine published other content under this key first" in told[0]
    assert [path.name for path in (loser.root / "damaged").iterdir()]  # set aside, not deleted
    now = store(bucket, tmp_path / "b").lookup(identity(a=1))
    assert now is not None
    assert now.digest == first.digest != second.digest
    assert (now.path / "data.txt").read_text() == "first"


def test_the_same_content_twice_is_no_race(tmp_path, bucket):
    told: list[str] = []
    one, two = store(bucket, tmp_path / "a", told), store(bucket, tmp_path / "b", told)
    publish(one, identity(a=1), measured="1 ms")
    publish(two, identity(a=1), measured="2 ms")
    one.uploads.flush(10)
    two.uploads.flush(10)
    assert told == []
    assert two.uploads.is_durable(identity(a=1).key)


def test_the_queue_outlives_its_process_and_what_was_made_before_the_bucket_is_uploaded_when_met(tmp_path, bucket):
    root = tmp_path / "a" / "store"
    before = open_store(root)
    assert type(before).__name__ == "Store"
    publish(before, identity(a=1))
    publish(store(bucket, tmp_path / "a"), identity(a=2))
    use_bucket(root, StoreConfig(bucket=f"file://{bucket}"))
    later = open_store(root)
    assert isinstance(later, SharedStore)
    assert [queued.key for queued in later.uploads.waiting()] == [identity(a=2).key]
    later.lookup(identity(a=1))
    assert later.uploads.flush(10)
    there = store(bucket, tmp_path / "b")
    assert there.lookup(identity(a=1)) is not None
    assert there.lookup(identity(a=2)) is not None


class Away(Bucket):
    """A bucket that answers only when it is told to."""

    answers = False

    def _ask(self, path, request):
        if not self.answers:
            raise BucketError(f"bucket {self.name}: {path}: no route")
        return super()._ask(path, request)


def test_a_bucket_that_is_away_stops_nothing_and_gets_everything_later(tmp_path, bucket):
    told: list[str] = []
    away = Away(StoreConfig(bucket=f"file://{bucket}"))
    mine = SharedStore(tmp_path / "a" / "store", away, told.append)
    assert mine.lookup(identity(a=1)) is None
    with mine.lock(identity(a=1).key):
        ref = publish(mine, identity(a=1))
    assert mine.lookup(identity(a=1)) == ref
    assert not mine.uploads.flush(0.2)
    assert len([text for text in told if "no route" in text]) == 2  # asked and uploaded: each says it once
    away.answers = True
    assert mine.uploads.flush(10)
    assert store(bucket, tmp_path / "b").lookup(identity(a=1)) is not None


def test_a_reader_waits_for_a_bucket_that_comes_back(tmp_path, bucket):
    mine = store(bucket, tmp_path / "a")
    ref = publish(mine, identity(a=1))
    mine.uploads.flush(10)
    away = Away(StoreConfig(bucket=f"file://{bucket}"))
    theirs = SharedStore(tmp_path / "b" / "store", away)
    threading.Timer(0.7, lambda: setattr(away, "answers", True)).start()
    with theirs.reading([ref]):
        assert (theirs.folder("thing", ref.key) / "data.txt").read_text() == "hello"


def test_leases_let_one_compute_and_expire_by_the_servers_clock(tmp_path, bucket, monkeypatch):
    one, two = store(bucket, tmp_path / "a"), store(bucket, tmp_path / "b")
    who = identity(a=1)
    said: list[str] = []
    got: list[str] = []

    def second() -> None:
        assert two.lookup(who) is None
        with two.lock(who.key, said.append):
            found = two.lookup(who, collected=True)
            got.append("found" if found else "computes")

    one.lookup(who)
    with one.lock(who.key):
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.3)
        assert got == []
        publish(one, who)
    one.uploads.flush(10)
    waiting.join(patience(10))
    assert got == ["found"]
    assert "process" in said[0]
    assert not list((bucket / "leases").glob("*"))
    # A machine that died an hour ago by the server's clock; the wall clock of this one is wrong.
    key = identity(a=2).key
    (bucket / "leases").mkdir(exist_ok=True)
    (bucket / "leases" / key).write_text(json.dumps({"host": "dead", "pid": 1, "token": "x"}))
    monkeypatch.setattr(leases_module.time, "time", lambda: 0.0)
    assert two.leases.is_alive(key)
    os.utime(bucket / "leases" / key, (time.time(), (bucket / "leases" / key).stat().st_mtime - 3600))
    assert not two.leases.is_alive(key)
    with two.lock(key):
        assert json.loads((bucket / "leases" / key).read_text())["host"] != "dead"


def test_an_input_that_is_still_being_uploaded_is_waited_for(tmp_path, bucket):
    mine, theirs = store(bucket, tmp_path / "a"), store(bucket, tmp_path / "b")
    with mine.lock(identity(a=1).key):
        ref = publish(mine, identity(a=1))
    threading.Timer(0.7, lambda: mine.uploads.flush(10)).start()
    with theirs.reading([ref]):
        assert (theirs.folder("thing", ref.key) / "data.txt").read_text() == "hello"
    with pytest.raises(InputGoneError), theirs.reading([publish(store(bucket, tmp_path / "c"), identity(a=2))]):
        pass  # nobody uploads it: its machine is gone


def test_files_of_a_manifest_that_came_with_an_outcome_are_waited_for(tmp_path, bucket):
    """A driver knows what a node has made before the node has uploaded it."""
    node, driver = store(bucket, tmp_path / "node"), store(bucket, tmp_path / "driver")
    with node.lock(identity(a=1).key):
        ref = publish(node, identity(a=1))
    driver.learn((ref.path / "manifest.json").read_bytes())
    assert driver.is_collected("thing", ref.key)
    assert not driver.uploads.is_durable(ref.key)
    threading.Timer(0.7, lambda: node.uploads.flush(10)).start()
    with driver.reading([ref]):
        assert (driver.folder("thing", ref.key) / "data.txt").read_text() == "hello"
    lost = publish(store(bucket, tmp_path / "dead node"), identity(a=2))
    driver.learn((lost.path / "manifest.json").read_bytes())
    with pytest.raises(InputGoneError), driver.reading([lost]):
        pass  # the node is gone, and nobody else has the files


def test_the_cache_evicts_what_is_durable_and_nothing_else(tmp_path, bucket):
    mine = store(bucket, tmp_path / "a")
    old, new = publish(mine, identity(a=1), text="old" * 100), publish(mine, identity(a=2), text="new" * 100)
    mine.uploads.flush(10)
    only_here = publish(mine, identity(a=3), text="here" * 100)
    os.utime(old.path / "manifest.json", (1, 1))
    with mine.reading([new]):
        assert mine.uploads.evict(0) > 0
        assert mine.is_collected("thing", old.key)
        assert not mine.is_collected("thing", new.key)  # in use
        assert not mine.is_collected("thing", only_here.key)  # nowhere else
    with mine.reading([old]):
        assert (old.path / "data.txt").read_text() == "old" * 100


def test_a_version_that_a_policy_collected_comes_from_the_bucket_instead_of_being_computed(tmp_path, bucket):
    mine = store(bucket, tmp_path / "a")
    ref = publish(mine, identity(a=1))
    mine.uploads.flush(10)
    collect(mine, "thing", ref.key, "keep policy")
    assert mine.is_whole(ref)
    assert mine.lookup(identity(a=1)) == ref


class Careless(Bucket):
    """A server that ignores If-None-Match."""

    def create(self, path, data):
        self.write(path, data)
        return True


def test_a_bucket_without_conditional_writes_is_refused_by_name(tmp_path, bucket):
    careless = SharedStore(tmp_path / "a" / "store", Careless(StoreConfig(bucket=f"file://{bucket}")))
    publish(careless, identity(a=1))
    with pytest.raises(ConfigError, match=rf"bucket file://{bucket}: it overwrites .*no conditional PUT"):
        careless.uploads.start()
    with pytest.raises(ConfigError):
        careless.uploads.flush(5)
    assert objects(bucket) == []
    store(bucket, tmp_path / "b").uploads.probe()
    assert objects(bucket) == []


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"bucket": "s3://"}, "is no bucket"),
        ({"bucket": "ftp://x/y"}, "is no bucket"),
        ({"bucket": "file://relative/x"}, "three slashes"),
        ({"bucket": "s3://key:secret@team/x"}, "set them in the environment"),
        ({"bucket": "s3://team/x", "endpoint": "127.0.0.1:9000"}, "is no http"),
        ({"bucket": "s3://team/x", "cache_gb": 0}, "greater than 0"),
    ],
)
def test_wrong_addresses_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        StoreConfig(**settings)


def test_a_home_stays_with_its_bucket_and_the_environment_names_one_for_all_commands(tmp_path, monkeypatch):
    root = tmp_path / "store"
    use_bucket(root, StoreConfig(bucket=f"file://{tmp_path}/one"))
    use_bucket(root, StoreConfig(bucket=f"file://{tmp_path}/one", cache_gb=5))
    with pytest.raises(ConfigError, match="is in front of file://"):
        use_bucket(root, StoreConfig(bucket=f"file://{tmp_path}/two"))
    monkeypatch.setenv("HACRL_BUCKET", f"file://{tmp_path}/three")
    elsewhere = open_store(tmp_path / "other")
    assert isinstance(elsewhere, SharedStore)
    assert elsewhere.bucket.name.endswith("three")
    assert open_store(root).bucket.name.endswith("one")
    monkeypatch.setenv("HACRL_BUCKET", "nonsense")
    with pytest.raises(ConfigError, match="HACRL_BUCKET nonsense"):
        open_store(tmp_path / "other")


def test_without_a_bucket_nothing_is_new(tmp_path):
    plain = open_store(tmp_path / "store")
    publish(plain, identity(a=1))
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["objects", "staging"]
    assert PROVENANCE.seconds == 1.0
