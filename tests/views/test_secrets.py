"""A password in MLFLOW_TRACKING_URI is sent to the server and shown nowhere."""

import base64
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from mlflow import MlflowClient
from typer.testing import CliRunner

import flows.tracking.feed as feed
from flows.cli import app
from flows.home import Home
from flows.tracking.projection import quiet_environment, tracking_uri
from hacrl_core.errors import ConfigError
from tests.views.conftest import seen_config

USER, PASSWORD = "team", "sup3r/s@cret word"
EXPECTED = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class Guarded(ThreadingHTTPServer):
    """A server that wants the password, and lists no experiments to whoever has it."""

    def __init__(self) -> None:
        self.given: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Guarded

    def do_GET(self) -> None:
        self.server.given.append(self.headers.get("Authorization", ""))
        known = self.headers.get("Authorization") == EXPECTED
        body = b'{"experiments": []}' if known else b"no"
        found = known and "search" in self.path
        self.send_response(200 if found else 404 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    quiet_environment()
    monkeypatch.setattr(feed, "_warned", set())
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    with Guarded() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{USER}:sup3r%2Fs%40cret%20word@127.0.0.1:{port}")
        yield server
        server.shutdown()


def test_the_password_is_used_and_not_part_of_the_address(server: Guarded, own: Home) -> None:
    uri = tracking_uri(seen_config(), own)
    assert uri == f"http://127.0.0.1:{server.server_address[1]}"
    assert uri == os.environ["MLFLOW_TRACKING_URI"] == tracking_uri(seen_config(), own)
    assert list(MlflowClient(tracking_uri=uri).search_experiments()) == []
    assert server.given == [EXPECTED]


@pytest.mark.parametrize("command", ["run", "track sync"])
def test_no_command_shows_or_logs_it(server: Guarded, own: Home, command: str) -> None:
    if command == "run":
        path = own.root / "seen.yaml"
        path.write_text(yaml.safe_dump(seen_config().model_dump(mode="json", exclude_none=True)))
        words = ["run", str(path), "--home", str(own.root)]
    else:
        words = ["track", "sync", "seen", "--home", str(own.root)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert f"127.0.0.1:{server.server_address[1]}" in done.output
    assert EXPECTED in server.given
    assert "sup3r" not in done.output
    for file in own.root.rglob("*"):
        assert not file.is_file() or b"sup3r" not in file.read_bytes(), file


def test_a_database_keeps_its_password_and_is_shown_without(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.views.summary import _start_mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://ada:sup3r@db.lan/mlflow")
    uri = tracking_uri(seen_config(), own)
    assert uri == "postgresql://ada:sup3r@db.lan/mlflow"
    assert _start_mlflow(uri).endswith(" ui --backend-store-uri postgresql://db.lan/mlflow")


def test_an_address_that_is_none_is_one_line(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ada:sup3r@[broken")
    with pytest.raises(ConfigError, match=r"MLFLOW_TRACKING_URI: \[broken is not an address") as told:
        tracking_uri(seen_config(), own)
    assert "sup3r" not in str(told.value)
