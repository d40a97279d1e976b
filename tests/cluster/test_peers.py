"""Ranks and replicas as actors on several nodes whose stores share nothing but a bucket: the bits of a local run."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from flows.home import Home
from flows.record.log import read_log
from flows.run.peers import Peers
from tests.cluster.conftest import ITERATIONS
from tests.cluster.test_ray_executor import run
from tests.flow.conftest import TINY, tiny
from tests.flow.homes import digests, run_here
from tests.patience import patience

RANKS = {**TINY["update"], "ranks": 2}
# Six prompts with four samples each, four responses in a shard.
SHARDS = {**TINY["generate"], "batch_size": 2}
REPLICAS = {**SHARDS, "engine": {"kind": "builtin", "replicas": 3}}


@pytest.fixture(scope="module")
def narrow(cluster):
    """Two nodes beside the others that alone have a mark, one of it each: what asks for it twice spans both."""
    nodes = [cluster.add(cpus=4, wide=1.0) for _ in range(3)]
    yield nodes
    for node in nodes:
        if node in cluster.nodes:
            cluster.lose(node)


def apart(on_ray, tmp_path: Path, **changes):
    """The campaign over a bucket, ada's actors on nodes that have the mark."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    config = on_ray(
        runtime={"node_store": str(tmp_path / "nodes" / "{node}" / "store")},
        store={"bucket": f"file://{bucket}"},
        **changes,
    )
    agents = {name: agent.model_dump() for name, agent in config.agents.items()}
    agents["ada"]["resources"] = {"wide": 1.0}
    return type(config).model_validate({**config.model_dump(), "agents": agents})


def actors_of(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "nodes").iterdir()}


def test_ranks_on_several_nodes_give_the_digests_of_ranks_on_one_and_a_dead_rank_costs_one_stage(
    tmp_path: Path, narrow, on_ray
):
    here = Home(tmp_path / "here")
    run_here(tiny(iterations=ITERATIONS, update=RANKS), here)
    home = Home(tmp_path / "driver")
    killed: list[int] = []
    lock = threading.Lock()

    def at(label: str, pid: int) -> None:
        if label != "update ada #1":
            return
        with lock:
            if not killed:
                killed.append(pid)
                threading.Timer(0.2, kill_a_rank).start()

    executor = run(apart(on_ray, tmp_path, update=RANKS), home, at)
    assert killed
    assert digests(home, "tiny") == digests(here, "tiny")
    warned = [line.text for line in read_log(home.campaign("tiny")) if line.kind == "warning"]
    assert any("rank 1 of 2" in text and "trying again" in text for text in warned), warned
    assert len({node for label, (node, _) in executor.ran.items() if " ada " in f"{label} "}) >= 1
    assert not list((home.store / "objects").rglob("*.safetensors")), "the driver downloaded weights"
    deadline = time.monotonic() + patience(20)
    while left := peers_alive():
        assert time.monotonic() < deadline, f"ranks outlive their campaign: {left}"
        time.sleep(0.2)


def kill_a_rank() -> None:
    for pid in peers_alive():
        os.kill(pid, signal.SIGKILL)


def peers_alive() -> list[int]:
    """The peers on this test's cluster, whose nodes are children of this process."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("PeerActor" in part for part in one.cmdline()):
                found.append(one.pid)
    return found


def test_replicas_on_any_nodes_share_a_generation_and_change_no_bit(tmp_path: Path, narrow, on_ray, monkeypatch):
    here = Home(tmp_path / "here")
    run_here(tiny(iterations=ITERATIONS, generate=SHARDS), here)
    home = Home(tmp_path / "driver")
    executor = run(apart(on_ray, tmp_path, generate=REPLICAS), home)
    assert digests(home, "tiny") == digests(here, "tiny")
    assert executor.ran["generate ada #0"]
    assert Peers.__name__ == "Peers"
    # ada's three replicas need the mark once each, and each node has it once: three nodes have read ada's versions.
    holders = [
        store
        for store in (tmp_path / "nodes").glob("*/store")
        if list((store / "objects" / "update").glob("*/model.safetensors"))
    ]
    assert len(holders) >= 3
