"""Nodes whose stores share nothing but a bucket: same artifacts, and the driver never downloads a weight."""

import os
import signal
import threading
from pathlib import Path

import psutil

from flows.home import Home
from tests.cluster.test_ray_executor import run
from tests.flow.homes import digests


def test_stores_apart_give_the_same_digests_and_a_lost_node_is_made_good(tmp_path: Path, cluster, on_ray, local):
    home = Home(tmp_path / "driver")
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    lost: list[str] = []
    lock = threading.Lock()

    def at(label: str, pid: int) -> None:
        with lock:
            if label == "score ben #1" and not lost:
                lost.append(label)
                os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)

    config = on_ray(
        runtime={"node_store": str(tmp_path / "nodes" / "{node}" / "store")}, store={"bucket": f"file://{bucket}"}
    )
    cluster.add()
    executor = run(config, home, at)
    cluster.forget_dead()
    assert lost
    assert digests(home, "tiny") == local
    assert not list((home.store / "objects").rglob("*.safetensors")), "the driver downloaded weights"
    assert len(list((tmp_path / "nodes").iterdir())) >= 2
    assert len({node for node, _ in executor.ran.values()}) >= 2
    published = [path.stem for path in bucket.rglob("manifests/*/*") if path.is_file()]
    assert len(published) == len(set(published)) == len(local)
