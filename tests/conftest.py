"""What all tests share."""

import atexit
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from flows.run.signals import end_quickly
from hacrl_core.instructions import settle_instructions
from tests.once import common_folder, once
from tests.patience import patience

# As every process that computes does it: before torch computes anything.
settle_instructions()

# Commands with a home folder of their own find the kernels that are compiled already: they take nine seconds of a core.
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))

# As every process of ours ends: otherwise Triton's library prints what is left, after the last line of the tests.
atexit.register(end_quickly)

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")

# Seconds on a quiet machine; the slowest test takes a tenth of it.
LIMIT = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test a limit that follows the machine; it only ends what hangs."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(patience(LIMIT)))


@pytest.fixture(scope="session")
def blank_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database without a run; to be copied, because making its tables takes seconds."""
    from flows.home import Home
    from flows.tracking.projection import ensure_database, quiet_environment

    place = common_folder(tmp_path_factory) / "blank"
    with once(place) as first:
        if first:
            quiet_environment()
            ensure_database(Home(place))
    return Home(place).database


@pytest.fixture(scope="session")
def prefect_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that server, its database included."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def prefect_url(prefect_place: Path) -> Iterator[str]:
    """One Prefect server for the commands of all tests in this process: starting one takes longer than a tiny campaign.

    A campaign finds it through PREFECT_API_URL, as it finds a user's. Tests of the temporary server leave that unset.
    """
    from flows.scheduling.api import free_port, quiet_settings, start_process, wait_until_it_answers

    quiet_settings()
    port, log = free_port(), prefect_place / "server.log"
    server = start_process(port, log, PREFECT_HOME=str(prefect_place))
    url = f"http://127.0.0.1:{port}/api"
    problem = wait_until_it_answers(url, server, log)
    assert not problem, problem
    yield url
    server.terminate()
    server.wait(timeout=patience(20))
