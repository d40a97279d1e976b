import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import time
from pathlib import Path

import pytest

from hacrl_core.artifacts import Store
from hacrl_core.artifacts import files as files_module
from hacrl_core.artifacts import store as store_module
from hacrl_core.artifacts.files import file_sha256, hash_and_sync, hash_files, hashed_file
from hacrl_core.artifacts.locks import exclusive, is_held, try_exclusive
from hacrl_core.artifacts.removal import collect, remove
from hacrl_core.contracts.manifest import SEAL, Identity, Provenance, digest_of
from hacrl_core.errors import InputGoneError, NewerArtifactError
from tests.patience import patience

PROVENANCE = Provenance(started=0.0, finished=1.0, seconds=1.0)


def identity(**config):
    return Identity(stage="thing", stage_version=1, config=config, inputs={})


def publish(store, who, text="hello", measured="1 ms"):
    staged = store.stage_folder(who.key)
    (staged / "data.txt").write_text(text)
    (staged / "times.txt").write_text(measured)
    return store.publish(staged, who, {"times.txt": ("file", 0, True)}, {"thing/size": 5.0}, {}, PROVENANCE)


def rewrite(folder, **changes):
    """The manifest with other fields and a digest that fits them, as another version or a stranger would write it."""
    path = folder / "manifest.json"
    raw = {**json.loads(path.read_text()), **changes}
    raw["details"].pop(SEAL)
    raw["details"][SEAL] = digest_of(raw)
    path.write_text(json.dumps(raw))


def test_published_is_found_by_a_new_process_and_staging_is_empty(tmp_path):
    ref = publish(Store(tmp_path), identity(a=1))
    found = Store(tmp_path).lookup(identity(a=1))
    assert found == ref
    assert Store(tmp_path).lookup(identity(a=2)) is None
    assert list((tmp_path / "staging").iterdir()) == []
    assert Store(tmp_path).manifest("thing", ref.key).metrics == {"thing/size": 5.0}


def test_content_digest_leaves_out_what_was_measured(tmp_path):
    first = publish(Store(tmp_path / "1"), identity(a=1), measured="1 ms")
    second = publish(Store(tmp_path / "2"), identity(b=2), measured="2 ms")
    third = publish(Store(tmp_path / "3"), identity(a=1), text="other")
    assert first.digest == second.digest != third.digest


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "no manifest"])
def test_damage_is_found_reported_and_set_aside(tmp_path, damage):
    ref = publish(Store(tmp_path), identity(a=1))
    data, manifest = ref.path / "data.txt", ref.path / "manifest.json"
    if damage == "flip":
        data.write_text("jello")
    elif damage == "truncate":
        data.write_text("hell")
    elif damage == "remove":
        data.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:100])
    else:
        manifest.unlink()
    told = []
    store = Store(tmp_path, on_problem=told.append)
    assert store.lookup(identity(a=1)) is None
    assert len(told) == 1
    assert str(tmp_path) in told[0]
    assert len(list((tmp_path / "damaged").iterdir())) == 1
    again = publish(store, identity(a=1))
    assert Store(tmp_path).lookup(identity(a=1)) == again


def test_what_a_newer_version_wrote_is_refused_and_left_as_it_is(tmp_path):
    ref = publish(Store(tmp_path), identity(a=1))
    rewrite(ref.path, manifest_version=2)
    with pytest.raises(NewerArtifactError, match="manifest version 2, this one knows 1"):
        Store(tmp_path).lookup(identity(a=1))
    assert not (tmp_path / "damaged").exists()
    assert (ref.path / "data.txt").read_text() == "hello"


def test_a_collected_artifact_is_known_and_comes_back_under_its_first_manifest(tmp_path):
    store = Store(tmp_path)
    ref = publish(store, identity(a=1))
    first = store.manifest("thing", ref.key)
    assert collect(store, "thing", ref.key, "test") == len("hello") + len("1 ms")
    assert not (ref.path / "data.txt").exists()
    fresh = Store(tmp_path)
    assert fresh.lookup(identity(a=1)) is None
    assert fresh.lookup(identity(a=1), collected=True) == ref
    with pytest.raises(InputGoneError) as problem, fresh.reading([ref]):
        pass
    assert pickle.loads(pickle.dumps(problem.value)).keys == (ref.key,)
    assert publish(fresh, identity(a=1), measured="2 ms") == ref
    back = Store(tmp_path)
    assert back.lookup(identity(a=1)) == ref
    assert back.manifest("thing", ref.key).provenance == first.provenance
    assert (ref.path / "times.txt").read_text() == "2 ms"
    assert collect(back, "thing", ref.key, "test") > 0


def test_other_content_of_a_collected_artifact_is_an_artifact_of_its_own(tmp_path):
    store = Store(tmp_path)
    first = publish(store, identity(a=1))
    collect(store, "thing", first.key, "test")
    other = publish(store, identity(a=1), text="other")
    assert other.key != first.key
    assert other.digest != first.digest
    fresh = Store(tmp_path)
    # Who knows the first by its manifest still does; who needs files gets the other.
    assert fresh.lookup(identity(a=1), collected=True) == first
    assert fresh.lookup(identity(a=1)) == other
    assert fresh.manifest("thing", other.key).identity.inputs == {"instead of": first.digest}
    # The other is collected as well, and a third computation repeats the first one's content.
    collect(fresh, "thing", other.key, "test")
    assert fresh.lookup(identity(a=1)) is None
    third = publish(fresh, identity(a=1), text="third")
    assert third.key not in (first.key, other.key)
    assert fresh.lookup(identity(a=1)) == third
    assert publish(fresh, identity(a=1)) == first
    assert fresh.lookup(identity(a=1)) == first


def test_a_look_up_hashes_only_what_changed_and_a_reader_everything_once(tmp_path, monkeypatch):
    ref = publish(Store(tmp_path), identity(a=1))
    settle(ref)
    hashed = []
    monkeypatch.setattr(store_module, "hash_files", lambda paths: (hashed.extend(paths), hash_files(paths))[1])
    store = Store(tmp_path)
    assert store.lookup(identity(a=1)) == store.lookup(identity(a=1)) == ref
    assert hashed == []
    with store.reading([ref]), store.reading([ref]):
        assert sorted(path.name for path in hashed) == ["data.txt", "times.txt"]
    hashed.clear()
    # A copy of the same bytes is hashed once, because its time is new.
    (ref.path / "data.txt").write_text("hello")
    assert Store(tmp_path).lookup(identity(a=1)) == ref
    assert [path.name for path in hashed] == ["data.txt"]
    # Bits that rotted without a trace in the file's times are found when a stage reads them.
    before = (ref.path / "data.txt").stat()
    (ref.path / "data.txt").write_text("jello")
    os.utime(ref.path / "data.txt", ns=(before.st_atime_ns, before.st_mtime_ns - 10**9))
    assert Store(tmp_path).lookup(identity(a=1)) == ref
    with pytest.raises(InputGoneError), Store(tmp_path).reading([ref]):
        pass
    assert Store(tmp_path).lookup(identity(a=1)) is None


def test_a_version_has_two_parts_and_who_does_not_train_reads_one(tmp_path, monkeypatch):
    def version(store, who, moments, weights="weights"):
        staged = store.stage_folder(who.key)
        (staged / "training").mkdir()
        (staged / "model.txt").write_text(weights)
        (staged / "training" / "moments.txt").write_text(moments)
        return store.publish(staged, who, {}, {}, {}, PROVENANCE)

    store = Store(tmp_path)
    refs = [version(store, identity(a=1), "one"), version(store, identity(a=2), "two")]
    other = version(store, identity(a=3), "one", "other")
    one, two, three = (store.manifest(ref.stage, ref.key) for ref in (*refs, other))
    assert one.content_digest != two.content_digest
    assert one.part_digest("training", inside=False) == two.part_digest("training", inside=False)
    assert one.part_digest("training") == three.part_digest("training") != two.part_digest("training")
    assert one.part_digest("training", inside=False) != three.part_digest("training", inside=False)
    hashed = []
    monkeypatch.setattr(store_module, "hash_files", lambda paths: (hashed.extend(paths), hash_files(paths))[1])
    (refs[0].path / "training" / "moments.txt").write_text("eno")
    fresh = Store(tmp_path)
    for _ in range(2):
        with fresh.reading([refs[0]], apart_from="training"):
            assert [path.name for path in hashed] == ["model.txt"]
    # Whoever trains on finds the damage that nobody else had to look at.
    with pytest.raises(InputGoneError), fresh.reading([refs[0]]):
        pass
    (refs[1].path / "model.txt").write_text("weighty")
    with pytest.raises(InputGoneError), fresh.reading([refs[1]], apart_from="training"):
        pass


def settle(ref):
    """As if the artifact had been published a second ago: times of files have a coarse clock."""
    for path in ref.path.iterdir():
        if path.name != "manifest.json":
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))


def test_a_file_hashed_while_written_has_its_digest_and_one_changed_since_is_hashed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "_SYNC_BYTES", 1000)
    content = os.urandom(5000)
    for name in ("same", "changed"):
        with hashed_file(tmp_path / name) as file:
            for start in range(0, len(content), 600):
                file.write(memoryview(content)[start : start + 600])
    with (tmp_path / "changed").open("ab") as more:
        more.write(b"!")
    read = []
    monkeypatch.setattr(files_module, "file_sha256", lambda path: (read.append(path.name), file_sha256(path))[1])
    assert hash_and_sync([tmp_path / "same", tmp_path / "changed"]) == [
        (5000, hashlib.sha256(content).hexdigest()),
        (5001, hashlib.sha256(content + b"!").hexdigest()),
    ]
    assert read == ["changed"]


def test_nothing_is_taken_from_under_a_reader_or_from_who_has_just_looked(tmp_path):
    store = Store(tmp_path)
    ref = publish(store, identity(a=1))
    with store.reading([ref]):
        assert collect(Store(tmp_path), "thing", ref.key, "test") == 0
        assert remove(Store(tmp_path), "thing", ref.key, time.time() + 1) == 0
    os.utime(ref.path / "manifest.json", (1, 1))
    Store(tmp_path).lookup(identity(a=1))
    assert remove(store, "thing", ref.key, time.time() - 60) == 0
    assert remove(store, "thing", ref.key, time.time() + 1) > 0
    assert not ref.path.exists()
    assert list((tmp_path / "trash").iterdir()) == []


def test_an_input_damaged_after_it_was_looked_up_is_not_read(tmp_path):
    ref = publish(Store(tmp_path), identity(a=1))
    (ref.path / "data.txt").write_text("jello")
    told = []
    with pytest.raises(InputGoneError), Store(tmp_path, on_problem=told.append).reading([ref]):
        pass
    assert "content differs from its sha256" in told[0]


def test_a_lost_race_keeps_the_winner(tmp_path):
    store, who = Store(tmp_path), identity(a=1)
    late = store.root / "late"
    late.mkdir()
    (late / "data.txt").write_text("mine")
    winner = publish(store, who, text="theirs")
    ref = store.publish(late, who, {}, {}, {}, PROVENANCE)
    assert ref == winner
    assert (ref.path / "data.txt").read_text() == "theirs"
    assert not late.exists()


def test_cleaning_removes_what_the_dead_left_and_spares_the_living(tmp_path):
    store = Store(tmp_path)
    dead = store.stage_folder("k1")
    with store.lock("k2"):
        living = store.stage_folder("k2")
        assert store.remove_stale_staging() == 1
        assert living.exists()
        assert not dead.exists()


def _hold(path: Path, ready) -> None:
    with exclusive(path):
        ready.set()
        time.sleep(60)


def test_a_lock_dies_with_its_holder_and_says_who_holds_it(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "x.lock", ready))
    process.start()
    assert ready.wait(patience(30))
    assert try_exclusive(tmp_path / "x.lock") is None
    told = []

    def kill(holder):
        told.append(holder)
        process.kill()

    with exclusive(tmp_path / "x.lock", on_wait=kill):
        assert told == [f"process {process.pid}"]
    process.join()
    handle = try_exclusive(tmp_path / "x.lock")
    assert handle is not None
    os.close(handle)


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_lock_is_held_though_its_text_finds_no_room_and_let_go_when_taking_it_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", full)
    handle = try_exclusive(tmp_path / "x.lock")
    assert handle is not None
    assert is_held(tmp_path / "x.lock")
    os.close(handle)
    assert not is_held(tmp_path / "x.lock")

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", stopped)
    with pytest.raises(KeyboardInterrupt):
        try_exclusive(tmp_path / "x.lock")
    assert not is_held(tmp_path / "x.lock")


def test_collecting_and_removing_need_no_room(tmp_path, monkeypatch):
    store = Store(tmp_path)
    ref, other = publish(store, identity(a=1)), publish(store, identity(a=2))
    monkeypatch.setattr(Path, "mkdir", full)
    monkeypatch.setattr("hacrl_core.artifacts.removal.replace_synced", full)
    assert collect(store, "thing", ref.key, "test") == len("hello") + len("1 ms")
    assert sorted(path.name for path in ref.path.iterdir()) == ["collected.json", "manifest.json"]
    assert remove(store, "thing", other.key, time.time() + 1) > 0
    assert not other.path.exists()
