"""The quick hostile programs, run once for all tests of this folder."""

from collections.abc import Iterator

import pytest

from hacrl_core.verification import close_pool
from hacrl_core.verification.jail import kernel
from tests.sandbox.run_all import Outcome, run_all


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    if not kernel.LINUX:
        pytest.skip("the sandbox exists on Linux only")
    yield run_all(tmp_path_factory.mktemp("hostile"), lambda each: not each.slow)
    close_pool()
