"""Whole tiny campaigns over a real S3 server: a bad network, a wrong clock, two homes at once."""

import json
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from flows.home import Home
from flows.store.bucket import VERSION_STAGES
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.config.operation import StoreConfig
from hacrl_core.contracts.manifest import Manifest
from tests.bucket.servers import CREDENTIALS, Faults, proxy
from tests.flow.conftest import tiny
from tests.flow.homes import digests, own_copy, run_here

pytestmark = [pytest.mark.bucket, pytest.mark.slow]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Home:
    """The campaign without a bucket: not to be changed."""
    home = Home(tmp_path_factory.mktemp("alone"))
    run_here(tiny(), home)
    return home


def over(settings: StoreConfig):
    return tiny(store=settings.model_dump(mode="json"))


def weight_blobs(bucket: Bucket) -> set[str]:
    """The digests of weights and training states in a bucket."""
    found = set()
    for stat in bucket.list("manifests/"):
        if stat.path.split("/")[-2] in VERSION_STAGES:
            manifest = Manifest.model_validate_json(bucket.read(stat.path) or b"")
            found |= {output.sha256 for output in manifest.outputs if output.path.endswith(".safetensors")}
    return found


def test_a_campaign_over_a_bad_network_ends_with_the_bits_of_one_alone_and_a_second_home_runs_nothing(
    weed, fresh, alone, tmp_path, monkeypatch
):
    faults = Faults(error_share=0.05, lost_share=0.02, torn_share=0.02)
    with proxy(weed, faults) as through:
        settings = fresh(weed, through)
        first = own_copy(alone, "tiny", tmp_path / "first", ("warmstart",), record=False)
        away = threading.Thread(target=_go_away_once, args=(first, faults))
        away.start()
        assert run_here(over(settings), first)
        away.join()
        assert digests(first, "tiny") == digests(alone, "tiny")
        assert faults.counts["error"] > 0
        assert faults.counts["away"] > 0

        faults.requests.clear()
        faults.error_share = faults.lost_share = faults.torn_share = 0.0
        # A machine whose clock is an hour fast, with an empty disk.
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        second = Home(tmp_path / "second")
        assert run_here(over(settings), second) == []
        assert digests(second, "tiny") == digests(alone, "tiny")
        asked = {request.rpartition("/")[2] for request in faults.requests if request.startswith("GET")}
        weights = weight_blobs(Bucket(settings))
        assert len(weights) >= 6
        assert not asked & weights, "the driver downloads no weights"


def _go_away_once(home: Home, faults: Faults) -> None:
    """Once the campaign has its first rollouts, the bucket does not answer for a minute."""
    deadline = time.monotonic() + 300
    while not any((home.store / "objects").glob("generate/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    faults.away = True
    time.sleep(60)
    faults.away = False


def _run(home: Path, settings: StoreConfig, ran, off: float) -> None:
    """Run the campaign on a machine whose clock is off by so many seconds."""
    os.environ.update(CREDENTIALS)
    real = time.time
    time.time = lambda: real() + off
    ran.put(run_here(over(settings), Home(home)))


def test_two_homes_with_clocks_two_hours_apart_compute_each_stage_of_a_common_campaign_once(
    weed, fresh, alone, tmp_path
):
    settings = fresh(weed)
    homes = [own_copy(alone, "tiny", tmp_path / name, ("warmstart",), record=False) for name in ("one", "two")]
    context = multiprocessing.get_context("spawn")
    ran = context.Queue()
    running = [
        context.Process(target=_run, args=(home.root, settings, ran, off))
        for home, off in zip(homes, (-3600.0, 3600.0), strict=True)
    ]
    for process in running:
        process.start()
    labels = [label for _ in running for label in ran.get(timeout=500)]
    for process in running:
        process.join(60)
    for home in homes:
        assert digests(home, "tiny") == digests(alone, "tiny")
    assert len(labels) == len(set(labels)), "leases let one compute what the other waits for"
    assert labels
    lines = (homes[0].campaign("tiny") / "stages.jsonl").read_text().splitlines()
    assert len({json.loads(line)["label"] for line in lines}) == len(digests(alone, "tiny"))
