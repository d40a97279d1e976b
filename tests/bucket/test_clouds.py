"""Azure and Google addresses, against the emulators that package registries have (``make test-bucket``)."""

import json

import pytest

from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.config.operation import StoreConfig
from hacrl_core.errors import ConfigError
from tests.bucket.servers import AZURE, CLOUDS, azurite, gcs, make_container
from tests.bucket.test_servers import check_interface, check_large_files, store
from tests.unit.artifacts.test_store import identity, publish

pytestmark = [
    pytest.mark.bucket,
    pytest.mark.skipif(not CLOUDS.exists(), reason="no emulators: make test-bucket installs them where npm is"),
]


@pytest.fixture(scope="module")
def azure(tmp_path_factory):
    """The address of Azure's emulator with a container ``team``, and its account in the environment."""
    with pytest.MonkeyPatch.context() as patch, azurite(tmp_path_factory.mktemp("azurite")) as address:
        for name, value in AZURE.items():
            patch.setenv(name, value)
        make_container(address, "team")
        yield address


def test_azure_does_what_the_store_relies_on(azure, tmp_path, monkeypatch):
    monkeypatch.setattr("hacrl_core.artifacts.bucket._CHUNK", 5 << 20)
    settings = StoreConfig(bucket="az://team/one", endpoint=azure)
    check_interface(Bucket(settings))
    check_large_files(settings, tmp_path)


def test_a_lost_race_on_azure_keeps_the_winner(azure, tmp_path):
    settings = StoreConfig(bucket="az://team/two", endpoint=azure)
    told: list[str] = []
    first, second = store(settings, tmp_path / "a"), store(settings, tmp_path / "b", told)
    publish(first, identity(a=1), text="winner")
    publish(second, identity(a=1), text="loser")
    assert first.uploads.flush(30)
    assert second.uploads.flush(30)
    assert any("theirs is used" in text for text in told)
    found = second.lookup(identity(a=1))
    assert found is not None
    assert (found.path / "data.txt").read_text() == "winner"


def test_a_container_that_does_not_exist_is_one_line(azure, tmp_path):
    with pytest.raises(ConfigError, match=r"bucket az://nowhere/x at .*: there is no such bucket"):
        store(StoreConfig(bucket="az://nowhere/x", endpoint=azure), tmp_path / "a").uploads.start()


def test_an_emulator_of_google_without_tags_is_refused_by_name(tmp_path, monkeypatch):
    """It overwrites in silence, and its answers carry no ETag: nothing may be published there."""
    key = tmp_path / "key.json"
    key.write_text(json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(key))
    with gcs(tmp_path / "gcs") as address:
        mine = store(StoreConfig(bucket="gs://team/x", endpoint=address), tmp_path / "a")
        publish(mine, identity(a=1))
        with pytest.raises(ConfigError, match=r"bucket gs://team/x: .*ETag Header missing"):
            mine.uploads.start()
        with pytest.raises(ConfigError, match="gs://team/x"):
            mine.uploads.flush(5)
