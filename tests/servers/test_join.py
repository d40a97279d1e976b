"""``hacrl worker``: a machine that takes campaigns of a Prefect server elsewhere."""

import signal
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tests.patience import patience
from tests.servers.conftest import wait_for

WORKER = """import signal
signal.signal(signal.SIGINT, signal.{})
from flows.cli import app
app()
"""


def test_an_address_that_is_none_or_holds_a_password_is_refused(tmp_path):
    for address in ("HEAD:4200", "http://ada:secret@head:4200/api"):
        result = CliRunner().invoke(app, ["worker", "--api", address, "--home", str(tmp_path)])
        assert result.exit_code == 2, result.output
        assert "give http://HOST:4200/api" in " ".join(result.output.split())


def test_a_server_that_is_away_is_one_line(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/api"
    result = CliRunner().invoke(app, ["worker", "--api", address, "--home", str(tmp_path)])
    assert result.exit_code == 1, result.output
    assert "Prefect does not answer" in " ".join(result.output.split())


@pytest.mark.servers
@pytest.mark.parametrize(
    ("number", "ignored"), [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGINT, False)]
)
def test_a_worker_ends_on_a_signal_also_where_a_script_started_it(servers, tmp_path, number, ignored):
    """A shell without job control starts background commands with SIGINT ignored."""
    code = WORKER.format("SIG_IGN" if ignored else "default_int_handler")
    worker = subprocess.Popen(
        [sys.executable, "-c", code, "worker", "--api", f"{servers.prefect}/api", "--name", tmp_path.name],
        env={**servers.environment, "HACRL_HOME": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: tmp_path.name in workers_online(servers), patience(60), "the worker is online")
        worker.send_signal(number)
        said, _ = worker.communicate(timeout=patience(30))
    finally:
        worker.kill()
        worker.wait()
    assert worker.returncode == 0, said
    assert "the worker stopped" in said
    assert "Traceback" not in said


def workers_online(servers) -> list[str]:
    found = servers.api("work_pools/hacrl/workers/filter")
    return [worker["name"] for worker in found if worker["status"] == "ONLINE"]
