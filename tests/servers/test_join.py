"""``hacrl worker``: a machine that takes campaigns of a Prefect server elsewhere."""

import socket

from typer.testing import CliRunner

from flows.cli import app


def test_an_address_that_is_none_or_holds_a_password_is_refused(tmp_path):
    for address in ("HEAD:4200", "http://ada:secret@head:4200/api"):
        result = CliRunner().invoke(app, ["worker", "--api", address, "--home", str(tmp_path)])
        assert result.exit_code == 2, result.output
        assert "give http://HOST:4200/api" in " ".join(result.output.split())


def test_a_server_that_is_away_is_one_line(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/api"
    for name in ("HACRL_HOME", "PREFECT_HOME", "PREFECT_API_URL", "PYTHONPATH", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "")  # restored at the end: the command changes its own environment
    result = CliRunner().invoke(app, ["worker", "--api", address, "--home", str(tmp_path)])
    assert result.exit_code == 1, result.output
    assert "Prefect does not answer" in " ".join(result.output.split())
