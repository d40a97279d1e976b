"""One fake cluster for all tests of this folder, and the campaign that all of them compare with."""

import time
from pathlib import Path

import psutil
import pytest

from flows.home import Home
from tests.cluster.fake import FakeCluster
from tests.flow.conftest import tiny
from tests.flow.homes import digests, run_here

ITERATIONS = 2


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def local(tmp_path_factory) -> dict[str, str]:
    """Label → digest of the campaign in this process."""
    home = Home(tmp_path_factory.mktemp("local"))
    run_here(tiny(iterations=ITERATIONS), home)
    return digests(home, "tiny")


@pytest.fixture(scope="session")
def cluster():
    """A head and two nodes; says how long they took to come up and what they take while nothing runs."""
    begun = time.monotonic()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    made = FakeCluster()
    seconds = time.monotonic() - begun
    processes = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    idle = sum(process.memory_full_info().pss for process in processes) / 2**20
    print(f"\ncluster: up in {seconds:.1f} s; {len(processes)} processes, {idle:.0f} MiB idle")
    yield made
    made.close()


@pytest.fixture
def on_ray(cluster):
    """The tiny campaign with the cluster as its executor."""

    def config(runtime=None, **changes):
        own = {"executor": "ray", "address": cluster.address, "retries": 20, **(runtime or {})}
        return tiny(iterations=ITERATIONS, runtime=own, **changes)

    return config
