"""Damage to a manifest is found wherever it strikes, and no manifest leads out of its artifact's folder."""

import json
import random
import shutil

import pytest

from hacrl_core.artifacts import Store, removal
from hacrl_core.artifacts import store as store_module
from hacrl_core.artifacts.files import file_sha256
from hacrl_core.artifacts.manifests import read_manifest
from hacrl_core.artifacts.removal import collect
from hacrl_core.contracts.manifest import SEAL, Manifest, digest_of
from hacrl_core.errors import ArtifactError, InputGoneError, NewerArtifactError
from tests.unit.artifacts.test_store import identity, publish


@pytest.fixture
def ref(tmp_path):
    return publish(Store(tmp_path / "store"), identity(a=1, rate=0.5))


def without_seal(path):
    """The manifest as earlier versions wrote it."""
    raw = json.loads(path.read_text())
    del raw["details"][SEAL]
    path.write_text(json.dumps(raw, indent=1))
    return raw


def test_every_flipped_bit_of_a_manifest_is_found(ref):
    path = ref.path / "manifest.json"
    good, known = path.read_bytes(), read_manifest(ref.path)
    unnoticed = []
    for place in range(len(good)):
        for bit in range(8):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
            try:
                found = read_manifest(ref.path)
            except NewerArtifactError:
                unnoticed.append((place, bit, "newer"))
            except ArtifactError:
                continue
            else:
                if found != known:
                    unnoticed.append((place, bit, "altered"))
    assert unnoticed == []


def test_random_bytes_in_a_manifest_are_found_or_mean_the_same(ref):
    path, dice = ref.path / "manifest.json", random.Random(7)
    good, known = path.read_bytes(), read_manifest(ref.path)
    for _ in range(1500):
        raw = bytearray(good)
        for _ in range(dice.randint(1, 3)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        path.write_bytes(raw)
        try:
            assert read_manifest(ref.path) == known
        except NewerArtifactError:
            pytest.fail(f"called newer: {bytes(raw)!r}")
        except ArtifactError:
            pass


def test_a_manifest_without_a_digest_is_read_as_before(ref):
    known = read_manifest(ref.path)
    without_seal(ref.path / "manifest.json")
    assert read_manifest(ref.path) == known
    assert Store(ref.path.parents[2]).lookup(identity(a=1, rate=0.5)) == ref


def test_an_earlier_version_accepts_a_manifest_with_a_digest(ref):
    """Its model refuses unknown fields, and takes any detail."""
    raw = json.loads((ref.path / "manifest.json").read_text())
    assert Manifest.model_validate(raw).content_digest == ref.digest
    assert raw["manifest_version"] == 1


@pytest.mark.parametrize("field", ["manifest_version", "outputs"])
def test_newer_is_said_only_where_the_digest_fits(ref, field):
    path = ref.path / "manifest.json"
    raw = without_seal(path)
    if field == "manifest_version":
        raw[field] = 3
    else:
        raw[field][0]["kind"] = "rollouts/99"
    for seal, error in ((digest_of(raw), NewerArtifactError), ("0" * 64, ArtifactError), (None, ArtifactError)):
        details = {**raw["details"], **({SEAL: seal} if seal else {})}
        path.write_text(json.dumps({**raw, "details": details}))
        store = Store(ref.path.parents[2])
        with pytest.raises(ArtifactError) as told:
            store.check(ref.path, store.manifest(ref.stage, ref.key), digests="none")
        assert type(told.value) is error


# -- paths -------------------------------------------------------------------------------------------------------------


def point_at(ref, path, target):
    """Let the measured output be another file; key and content digest stay, and everything fits."""
    manifest = ref.path / "manifest.json"
    raw = without_seal(manifest)
    for output in raw["outputs"]:
        if output["measured"]:
            output |= {"path": path, "bytes": target.stat().st_size, "sha256": file_sha256(target)}
    raw["details"][SEAL] = digest_of(raw)
    manifest.write_text(json.dumps(raw))


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim.txt"
    path.write_text("precious")
    return path


@pytest.mark.parametrize(
    "path", ["../../../../victim.txt", "/abs", "data.txt/../../x", "a//b", "./data.txt", "", ".", "a\\b", "a\0b",
             "manifest.json", "collected.json"]
)  # fmt: skip
def test_a_path_out_of_the_folder_makes_the_manifest_damaged(ref, victim, path):
    point_at(ref, str(victim) if path == "/abs" else path, victim)
    store = Store(ref.path.parents[2])
    with pytest.raises(ArtifactError, match="is not the path of a file below"):
        store.manifest(ref.stage, ref.key)
    assert collect(store, ref.stage, ref.key, "test") == 0
    with pytest.raises(InputGoneError), store.reading([ref]):
        pass
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_symbolic_link_is_never_followed(ref, victim, link):
    if link == "file":
        (ref.path / "leak").symlink_to(victim)
        point_at(ref, "leak", victim)
    else:
        (ref.path / "leak").symlink_to(victim.parent)
        point_at(ref, "leak/victim.txt", victim)
    told: list[str] = []
    store = Store(ref.path.parents[2], on_problem=told.append)
    assert collect(store, ref.stage, ref.key, "test") == 0
    assert store.lookup(identity(a=1, rate=0.5)) is None
    assert "symbolic link" in told[0]
    assert victim.read_text() == "precious"


def test_putting_back_does_not_write_through_a_link(tmp_path):
    store, who, outside = Store(tmp_path / "store"), identity(a=1), tmp_path / "outside"
    outside.mkdir()

    def stage():
        staged = store.stage_folder(who.key)
        (staged / "part").mkdir()
        (staged / "part" / "data.txt").write_text("hello")
        return staged

    published = store.publish(stage(), who, {}, {}, {}, read_manifest(publish(store, identity(b=2)).path).provenance)
    assert collect(store, "thing", who.key, "test") > 0
    assert not (published.path / "part").exists()
    (published.path / "part").symlink_to(outside)
    with pytest.raises(ArtifactError, match="symbolic link"):
        store.publish(stage(), who, {}, {}, {}, read_manifest(published.path).provenance)
    assert list(outside.iterdir()) == []


# -- a collect during a look-up ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked_by_somebody_who_was_killed", [False, True])
def test_the_mark_of_a_collected_artifact_is_on_the_disk_before_a_file_goes(
    ref, monkeypatch, marked_by_somebody_who_was_killed
):
    order, discard = [], removal._discard
    monkeypatch.setattr(removal, "sync", lambda folder: order.append(folder))
    monkeypatch.setattr(removal, "_discard", lambda path, *rest: (order.append(path), discard(path, *rest)))
    if marked_by_somebody_who_was_killed:
        (ref.path / removal.COLLECTED).write_text("{}")
    assert collect(Store(ref.path.parents[2]), ref.stage, ref.key, "test") > 0
    assert order[0] == ref.path
    assert len(order) > 1


def test_a_collect_between_the_check_and_the_hash_does_not_make_damage(ref, monkeypatch):
    store, other, freed = Store(ref.path.parents[2]), Store(ref.path.parents[2]), []
    check = Store.check

    def collect_first(self, folder, manifest, *, digests):
        if self is store:
            freed.append(collect(other, ref.stage, ref.key, "another campaign's policy"))
        check(self, folder, manifest, digests=digests)

    monkeypatch.setattr(Store, "check", collect_first)
    assert store.lookup(identity(a=1, rate=0.5)) == ref
    assert freed == [0]
    assert not (store.root / "damaged").exists()
    monkeypatch.undo()
    assert collect(other, ref.stage, ref.key, "nobody reads it now") > 0
    assert Store(store.root).lookup(identity(a=1, rate=0.5)) is None
    assert not (store.root / "damaged").exists()


def test_an_artifact_that_is_removed_while_a_look_up_waits_counts_as_absent(ref, monkeypatch):
    told: list[str] = []
    store = Store(ref.path.parents[2], on_problem=told.append)
    monkeypatch.setattr(store_module, "shared", lambda path: shutil.rmtree(path.parent))
    assert store.lookup(identity(a=1, rate=0.5)) is None
    assert told == []
