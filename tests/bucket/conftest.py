"""One server of each kind for all tests of buckets, and a fresh bucket for each test."""

import os
import secrets
from collections.abc import Callable, Iterator

import pytest

from hacrl_core.config.operation import StoreConfig
from tests.bucket.servers import CREDENTIALS, make_bucket, moto, seaweedfs


@pytest.fixture(scope="session")
def credentials() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ.update(CREDENTIALS)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def weed(tmp_path_factory, credentials) -> Iterator[str]:
    with seaweedfs(tmp_path_factory.mktemp("weed")) as address:
        yield address


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory, credentials) -> Iterator[str]:
    with moto(tmp_path_factory.mktemp("moto")) as address:
        yield address


@pytest.fixture(params=["weed", "moto_server"])
def address(request) -> str:
    """Each kind of server in turn."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def fresh() -> Callable[..., StoreConfig]:
    """Make a bucket on a server, and return its settings; ``through`` is the address of a proxy."""

    def make(address: str, through: str | None = None) -> StoreConfig:
        name = f"test-{secrets.token_hex(4)}"
        make_bucket(address, name)
        return StoreConfig(bucket=f"s3://{name}/team", endpoint=through or address)

    return make
