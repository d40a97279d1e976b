"""A headless browser, and the campaign of the views. Where there is no Chromium these tests skip and say so."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.views.conftest import CHROMIUM, history, own, seen, tracked  # noqa: F401  (fixtures)

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")  # until it ends, its event loop keeps other tests of this process from having one
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"no browser: {CHROMIUM} is not installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        yield chromium
        chromium.close()
