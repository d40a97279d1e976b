"""A tiny campaign over a bucket in a local folder: two homes, one result, and what the commands say."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.home import Home
from flows.record.record import read_entries
from flows.store.bucket import VERSION_STAGES, uploading
from hacrl_core.artifacts import open_store
from hacrl_core.artifacts.removal import collect
from hacrl_core.artifacts.shared import SharedStore
from hacrl_core.contracts.manifest import Manifest
from tests.flow.conftest import tiny
from tests.flow.homes import digests, home_over, of_label, own_copy, run_here, weights


@pytest.fixture(scope="module")
def finished(shared_store, tmp_path_factory) -> Home:
    """A finished campaign without a bucket: not to be changed."""
    home = home_over(shared_store, tmp_path_factory.mktemp("finished"))
    run_here(tiny(), home)
    return home


@pytest.fixture
def bucket(tmp_path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def first(finished, tmp_path, bucket) -> Home:
    """A home whose campaign, made before there was a bucket, was met again with one."""
    home = own_copy(finished, "tiny", tmp_path / "first")
    assert run_here(over(bucket), home) == []
    return home


def over(bucket: Path, **changes):
    return tiny(store={"bucket": f"file://{bucket}"}, **changes)


def hacrl(home: Home, *words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*words, "--home", str(home.root)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def files(home: Home, stage: str) -> list[Path]:
    kept = ("manifest.json", "collected.json")
    found = (home.store / "objects" / stage).rglob("*")
    return [path for path in found if path.is_file() and path.name not in kept]


def test_a_second_home_with_an_empty_disk_answers_without_running_a_stage(first, finished, bucket, tmp_path):
    second = Home(tmp_path / "second")
    assert run_here(over(bucket), second) == []
    assert digests(second, "tiny") == digests(finished, "tiny")
    assert not any(files(second, stage) for stage in VERSION_STAGES)  # the driver downloads no weights
    count = len({entry.key for entry in read_entries(second.campaign("tiny"))})
    assert f"{count} of {count} artifacts in file://{bucket}, durable to iteration 2" in hacrl(second, "status")
    # What a user asks for comes: texts for a look, weights for an export.
    assert "iteration 2" in hacrl(second, "rollouts", "tiny", "-i", "2")
    hacrl(second, "export", "tiny/ada", str(tmp_path / "ada"))
    assert (tmp_path / "ada" / "model.safetensors").stat().st_size > 0


def test_a_second_home_goes_on_where_the_first_one_stopped(first, finished, bucket, tmp_path):
    second = Home(tmp_path / "second")
    ran = run_here(over(bucket, iterations=3), second)
    assert ran
    assert all(label.endswith(("#2", "#3")) for label in ran)
    assert run_here(over(bucket, iterations=3), first) == []
    now = digests(second, "tiny")
    assert digests(first, "tiny").items() >= now.items()


def test_damage_in_the_bucket_is_found_by_verify_and_mended_by_push(first, finished, bucket, tmp_path):
    assert "0 damaged" in hacrl(first, "store", "verify", "--bucket")
    hurt = max((bucket / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    content = hurt.read_bytes()
    hurt.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    gone = min((bucket / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    gone.unlink()
    said = hacrl(first, "store", "verify", "--bucket", code=1)
    assert "content differs from its sha256" in said
    assert "missing" in said
    assert "1 damaged" in hacrl(first, "store", "verify", "--bucket", "--quick", code=1)
    hacrl(first, "store", "verify", "--bucket", "--repair", code=1)
    hacrl(first, "store", "push")
    assert "0 damaged" in hacrl(first, "store", "verify", "--bucket")
    assert hurt.read_bytes() == content


def test_a_version_whose_weights_are_damaged_everywhere_is_made_again_bit_for_bit(first, finished, bucket, tmp_path):
    second = Home(tmp_path / "second")
    key = of_label(first, "tiny", "update ben #1").name
    outputs = open_store(first.store).manifest("update", key).outputs
    (bucket / "blobs" / next(o.sha256 for o in outputs if o.path == "model.safetensors")).unlink()
    ran = run_here(over(bucket, iterations=3), second)
    assert "update ben #1" in ran  # its manifest was known, its files were nowhere
    assert not [label for label in ran if label.endswith(("#0", "#1")) and label != "update ben #1"]
    assert weights(second, "tiny", "update ben #1") == weights(finished, "tiny", "update ben #1")
    before, now = digests(finished, "tiny"), digests(second, "tiny")
    # The evaluation after the second iteration was its last; a longer campaign evaluates later.
    trained = {label: digest for label, digest in before.items() if not label.startswith("evaluate")}
    assert {label: now[label] for label in trained} == trained


def test_push_pull_and_sync_move_what_is_missing(first, finished, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("HACRL_BUCKET", f"file://{bucket}")
    other = Home(tmp_path / "other")
    total = len(list((bucket / "manifests").rglob("*.json")))
    assert "pulled" in hacrl(other, "store", "pull", "--stage", "evaluate")
    assert files(other, "evaluate")
    hacrl(other, "store", "sync")
    assert len(list((other.store / "objects").glob("*/*"))) == total
    assert not any(files(other, stage) for stage in VERSION_STAGES)
    hacrl(other, "store", "pull", "--versions")
    assert files(other, "update")
    assert "pulled 0 artifacts" in hacrl(other, "store", "pull", "--versions")
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("HACRL_BUCKET", f"file://{elsewhere}")
    assert f"pushed {total} artifacts" in hacrl(other, "store", "push")
    assert "pushed 0 artifacts" in hacrl(Home(other.root), "store", "push")
    assert f"{total} artifacts" in hacrl(other, "store", "du", "--price", "1")
    monkeypatch.delenv("HACRL_BUCKET")
    assert "has no bucket" in hacrl(other, "store", "push", code=2)


def age(bucket: Path, days: float) -> None:
    """Let everything in the bucket be so old, by its server's clock."""
    for path in bucket.rglob("*"):
        if path.is_file():
            then = time.time() - days * 86400
            os.utime(path, (then, then))


def test_garbage_of_a_bucket_is_what_no_home_needs_after_a_grace(first, finished, bucket, tmp_path):
    everything = set((bucket / "manifests").rglob("*.json"))
    second = Home(tmp_path / "second")
    lonely = over(bucket, name="lonely", iterations=1, update={"learning_rate": 2e-3, "minibatch_prompts": 3})
    run_here(lonely, second)
    grown = set((bucket / "manifests").rglob("*.json"))
    assert everything < grown
    blobs = set((bucket / "blobs").iterdir())
    assert "at least 1h" in hacrl(first, "store", "gc", "--bucket", "--grace", "10s", code=2)
    shutil.rmtree(second.campaign("lonely"))
    # The other home's roots still name it; then that home says that it does not need it any more.
    age(bucket, 30)
    hacrl(first, "store", "gc", "--bucket", "--yes")
    assert set((bucket / "manifests").rglob("*.json")) == grown
    hacrl(second, "store", "gc", "--bucket")
    assert set((bucket / "manifests").rglob("*.json")) == grown  # a dry run
    age(bucket, 3)
    hacrl(first, "store", "gc", "--bucket", "--yes")
    assert set((bucket / "manifests").rglob("*.json")) == grown  # too young
    age(bucket, 30)
    hacrl(first, "store", "gc", "--bucket", "--yes")
    assert set((bucket / "manifests").rglob("*.json")) == everything
    assert set((bucket / "blobs").iterdir()) < blobs
    assert "0 damaged" in hacrl(first, "store", "verify", "--bucket")
    assert run_here(over(bucket), Home(tmp_path / "third")) == []


def test_what_a_running_campaign_needs_is_in_the_bucket_before_it_ends(first, bucket, monkeypatch):
    """Garbage collection of another home must see it: a campaign may run for longer than the grace."""
    shutil.rmtree(bucket / "roots")
    (first.store / "roots.json").unlink()
    monkeypatch.setattr("flows.store.bucket.ROOTS_SECONDS", 0.05)
    store = open_store(first.store)
    deadline = time.monotonic() + 30
    with uploading(store, pytest.fail, first):
        while not list((bucket / "roots").rglob("*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    needed = json.loads(next((bucket / "roots").rglob("*.json")).read_text())["needed"]
    assert set(needed) == {entry.key for entry in read_entries(first.campaign("tiny"))}


def test_versions_that_a_policy_does_not_keep_lose_their_files_in_the_bucket_and_stay_known(first, bucket, tmp_path):
    keeping = over(bucket, keep={"last": 1})
    run_here(keeping, first)
    path = of_label(first, "tiny", "update ada #0")
    manifest = Manifest.model_validate_json((bucket / f"manifests/update/{path.name}.json").read_bytes())
    weights = next(output for output in manifest.outputs if output.path == "model.safetensors")
    assert (bucket / "blobs" / weights.sha256).exists()
    collect(open_store(first.store), "update", path.name, "keep policy")
    age(bucket, 30)
    hacrl(first, "store", "gc", "--bucket", "--yes")
    assert not (bucket / "blobs" / weights.sha256).exists()
    assert run_here(keeping, Home(tmp_path / "second")) == []


def test_a_bucket_that_answers_wrongly_at_the_start_is_one_line_and_exit_code_2(tmp_path, monkeypatch):
    config = tmp_path / "campaign.yaml"
    config.write_text(json.dumps(tiny().model_dump(mode="json", exclude_none=True)))
    out = hacrl(Home(tmp_path / "home"), "run", str(config), "--set", "store.bucket=ftp://x", code=2)
    assert "store.bucket" in out
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    words = ["--set", "store.bucket=s3://x/y", "--set", "store.endpoint=http://127.0.0.1:9"]
    out = hacrl(Home(tmp_path / "home"), "run", str(config), *words, code=2)
    assert "set AWS_ACCESS_KEY_ID" in out


def test_the_cache_limit_holds_while_a_campaign_runs(first, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("hacrl_core.artifacts.uploads._EVICT_SECONDS", 0.0)
    second = Home(tmp_path / "second")
    config = tiny(store={"bucket": f"file://{bucket}", "cache_gb": 1e-6}, iterations=3)
    ran = run_here(config, second)
    assert all(label.endswith(("#2", "#3")) for label in ran)
    store = open_store(second.store)
    assert isinstance(store, SharedStore)
    assert store.uploads.evict(1000) >= 0
    assert not files(second, "update")
    assert run_here(config, second) == []
