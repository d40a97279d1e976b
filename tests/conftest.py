"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.patience import patience

# Some virtual machines announce AMX and then refuse its instructions, which ends the process in a product of bfloat16.
# torch reads this when it is imported; float32 is not concerned.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")


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
