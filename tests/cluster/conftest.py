"""One fake cluster for all tests of this folder, and the campaign that all of them compare with."""

from pathlib import Path

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
    """A head and two nodes."""
    made = FakeCluster()
    yield made
    made.close()


@pytest.fixture
def on_ray(cluster):
    """The tiny campaign with the cluster as its executor."""

    def config(runtime=None, **changes):
        own = {"executor": "ray", "address": cluster.address, "retries": 20, **(runtime or {})}
        return tiny(iterations=ITERATIONS, runtime=own, **changes)

    return config
