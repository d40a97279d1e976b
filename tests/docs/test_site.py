"""The site is built whole and read without a network; the pages that commands write are up to date."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

pytestmark = pytest.mark.docs
# Milliseconds for each step of the browser, on a machine that does other work as well.
PATIENCE = 180_000


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    made = subprocess.run([sys.executable, "infra/commands_page.py"], cwd=ROOT, capture_output=True, text=True)
    assert made.stdout == (ROOT / "docs/commands.md").read_text(), "run make reference"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_is_built_whole(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert (site / "tutorials/look-inside.html").is_file()
    listed = re.findall(r"\]\((\S+\.html)\)", (site / "llms.txt").read_text())
    assert len(listed) > 10
    assert [target for target in listed if not (site / target).is_file()] == []


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|link rel="stylesheet"|img)[^>]*(?:src|href)=["']?(?:https?:)?//""")
    assert [str(page) for page in site.rglob("*.html") if loaded.search(page.read_text())] == []


def test_a_page_opened_as_a_file_finds_a_setting(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=PATIENCE)
        page, asked = browser.new_page(viewport={"width": 1300, "height": 800}), []
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "tutorials/night.html").as_uri())
        # Typed, as by a user: the search reads its field when a key is released, and would miss a value set in one go.
        page.locator(".md-search__input").first.press_sequentially("minibatch_prompts")
        page.locator(".md-search-result__item a").first.wait_for(state="attached")
        found = page.locator(".md-search-result__item").first.inner_html()
        browser.close()
    assert "configuration.html" in found or "minibatch" in found
    assert [url for url in asked if url.startswith("http")] == []
