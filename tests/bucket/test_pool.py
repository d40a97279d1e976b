"""A sweep over three workers of a Prefect work pool: three homes, one bucket, and common work done once."""

import collections
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from flows.home import Home
from flows.record.log import read_log
from flows.record.record import Entry, read_entries
from flows.servers.processes import processes_with_token
from flows.servers.state import read_state
from hacrl_core.config.base import StrictConfig
from stages.spec import StageCall
from tests.flow.conftest import TINY
from tests.flow.homes import digests
from tests.patience import patience
from tests.servers.conftest import Servers

pytestmark = [pytest.mark.bucket, pytest.mark.slow]
WORKERS = ("one", "two", "three")
VARIANTS = {"base": {}, "faster": {"update.learning_rate": 2e-3}, "fastest": {"update.learning_rate": 4e-3}}


@pytest.fixture
def servers(tmp_path: Path):
    """Prefect's server and what else hacrl up starts; its own worker takes part."""
    made = Servers(tmp_path / "head")
    made.place.mkdir()
    try:
        made.up()
        yield made
    finally:
        state = read_state(made.home)
        with contextlib.suppress(AssertionError):
            made("down", "--force")
        assert state is None or processes_with_token(state.token) == [], "hacrl down left processes behind"


def sweep_file(place: Path, bucket: Path) -> str:
    """Three variants with two seeds of the tiny campaign over a bucket."""
    (place / "campaign.yaml").write_text(
        yaml.safe_dump({**TINY, "iterations": 1, "store": {"bucket": f"file://{bucket}"}})
    )
    path = place / "sweep.yaml"
    path.write_text(
        yaml.safe_dump({"name": "pooled", "campaign": "campaign.yaml", "variants": VARIANTS, "seeds": [1, 2]})
    )
    return str(path)


def title(entry: Entry) -> str:
    """Return what the log calls an entry of the record."""
    return StageCall(entry.stage, StrictConfig(), {}, None, entry.agent, entry.iteration, entry.variant).title


def test_a_sweep_over_three_workers_does_its_common_work_once(servers, tmp_path: Path):
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    homes = {name: Home(tmp_path / name) for name in WORKERS}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "worker", "--api", f"{servers.prefect}/api", "--name", name],
            env={**servers.environment, "HACRL_HOME": str(home.root)},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, home in homes.items()
    ]
    try:
        path = sweep_file(servers.place, bucket)
        assert "6 cells are queued in work pool hacrl" in servers("sweep", path, "--pool")
        assert "0 cells are queued" in servers("sweep", path, "--pool"), "a cell that is under way is not queued twice"
        deadline = time.monotonic() + patience(600)
        while True:
            runs = servers.runs("sweep pooled")
            states = collections.Counter(run["state"]["type"] for run in runs)
            if states["COMPLETED"] == 6:
                break
            assert not states["FAILED"] + states["CRASHED"], json.dumps([run["state"] for run in runs], indent=1)
            assert time.monotonic() < deadline, states
            time.sleep(2)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(patience(60))
    # The worker that hacrl up runs takes its share too: four homes in all.
    places = [*homes.values(), servers.home]
    computed: collections.Counter[str] = collections.Counter()
    keys: set[str] = set()
    for home in places:
        for campaign in home.campaigns.glob("pooled.*"):
            of_title = {title(entry): entry.key for entry in read_entries(campaign)}
            keys |= set(of_title.values())
            done = [line.text.partition(":")[0] for line in read_log(campaign) if line.kind == "done"]
            computed.update(of_title[name] for name in done)
    assert sum(bool(list(home.campaigns.glob("pooled.*"))) for home in places) >= 3, "three homes took part"
    twice = {key: count for key, count in computed.items() if count > 1}
    assert not twice, f"computed more than once: {twice}"
    published = {file.stem for file in (bucket / "manifests").rglob("*.json")}
    assert keys == set(computed) == published
    # Whoever asks now gets the report without running a stage.
    said = servers("sweep", servers.place.joinpath("sweep.yaml").as_posix())
    assert "0 stages ran" in said or "0 ran" in said, said
    assert digests(servers.home, "pooled.base.s1")
