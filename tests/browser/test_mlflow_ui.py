"""MLflow's own pages of a campaign, in a real browser: runs, model registry, table of rollouts."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.patience import patience

pytestmark = pytest.mark.servers
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


@pytest.fixture(scope="module")
def server(tracked, browser):
    """``mlflow server`` on the campaign's database."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("mlflow")), "server", "--backend-store-uri", tracked[0].tracking_uri]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    process = subprocess.Popen(
        command,
        env={**os.environ, **QUIET},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + patience(120)
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "mlflow server did not answer"
                time.sleep(0.3)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(patience(20))


def test_runs_registry_and_rollouts_are_shown(server, browser, tracked, tmp_path):
    from mlflow import MlflowClient

    home, _ = tracked
    client = MlflowClient(tracking_uri=home.tracking_uri)
    experiment = client.get_experiment_by_name("hacrl").experiment_id
    [parent] = [r for r in client.search_runs([experiment]) if r.info.run_name == "seen"]
    page = browser.new_context(viewport={"width": 1600, "height": 1000}).new_page()
    page.set_default_timeout(60_000)

    page.goto(f"{server}/#/experiments/{experiment}/runs")
    page.get_by_role("link", name="seen", exact=True).wait_for()
    page.get_by_text("held_out (").first.wait_for()  # a dataset with its digest

    page.goto(f"{server}/#/experiments/{experiment}/runs/{parent.info.run_id}")
    page.get_by_role("link", name="seen/ada").first.wait_for()
    page.get_by_text("learn together with hacpo").first.wait_for()

    page.goto(f"{server}/#/experiments/{experiment}/runs/{parent.info.run_id}/artifacts/rollouts.json")
    page.get_by_text("View as table").wait_for()
    page.get_by_text("right answer").first.wait_for()

    page.goto(f"{server}/#/models/seen.ada")
    page.get_by_text("best", exact=False).first.wait_for()
    page.get_by_text("hacrl.parent").first.wait_for()
    assert page.locator("text=/Version \\d/").count() >= 3
    page.screenshot(path=tmp_path / "model.png")
    page.context.close()
