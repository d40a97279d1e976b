"""The central campaign is run once for all tests of the exchange."""

from pathlib import Path

import pytest

from tests.exchange.parties import central, meeting
from tests.once import common_folder


@pytest.fixture(scope="session")
def seed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the three agents' first versions."""
    return common_folder(tmp_path_factory) / "exchange-store"


@pytest.fixture(scope="session")
def central_digests(seed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the campaign of three parties gives in one process."""
    return central(meeting(tmp_path_factory.mktemp("central")), seed_store)
