"""What all tests share."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prefect_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that server, its database included."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def prefect_url(prefect_place: Path) -> Iterator[str]:
    """One Prefect server for the commands of all tests in this process: starting one takes longer than a tiny campaign.

    A campaign finds it through PREFECT_API_URL, as it finds a user's. Tests of the campaign's own server leave that unset.
    """
    from flows.prefect_server import _free_port, _quiet_settings, _wait_until_it_answers

    place = prefect_place
    _quiet_settings()
    port, log = _free_port(), place / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "flows.prefect_server", str(port), str(os.getpid())],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PREFECT_HOME": str(place), "PREFECT_UI_ENABLED": "0"},
        )
    url = f"http://127.0.0.1:{port}/api"
    _wait_until_it_answers(url, server, log)
    yield url
    server.terminate()
    server.wait(timeout=20)
