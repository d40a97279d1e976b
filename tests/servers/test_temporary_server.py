"""The temporary Prefect server of ``hacrl run``, with real requests: nobody but the campaign commands it."""

import base64
import http.client
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import yaml

from flows.home import Home
from flows.scheduling.api import prefect_api
from tests.flow.conftest import tiny
from tests.patience import patience

pytestmark = [pytest.mark.slow, pytest.mark.servers]
ROOT = Path(__file__).resolve().parents[2]
FILTER = "/api/flow_runs/filter"
FOREIGN = "http://evil.example"


class Api:
    """The server, and requests to it with whatever headers a browser or an attacker sends."""

    def __init__(self, url: str, home: Path) -> None:
        self.place, self.home = urlsplit(url).netloc, home
        self.credentials = os.environ["PREFECT_API_AUTH_STRING"]
        self.known = {"Authorization": "Basic " + base64.b64encode(self.credentials.encode()).decode()}

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.place, timeout=30)
        body = b"{}" if method == "POST" else None
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        answer.read()
        return answer


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    place = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_API_AUTH_STRING"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(place))
        with prefect_api(Home(place)) as server:
            assert server is not None
            assert server.temporary
            yield Api(server.url, place)
        assert "PREFECT_API_AUTH_STRING" not in os.environ


def test_the_campaigns_own_requests_are_answered(api: Api) -> None:
    assert api("POST", FILTER, api.known).status == 200
    assert api("GET", "/api/health", {}).status == 200


@pytest.mark.parametrize("given", ["nothing", "wrong", "not basic"])
def test_without_the_password_of_this_run_everything_is_refused(api: Api, given: str) -> None:
    wrong = base64.b64encode(b"hacrl:hacrl").decode()
    headers = {"nothing": {}, "wrong": {"Authorization": f"Basic {wrong}"}, "not basic": {"Authorization": "Bearer x"}}
    for method, path in (("POST", FILTER), ("GET", "/api/admin/settings"), ("DELETE", "/api/flows/0"), ("GET", "/api")):
        assert api(method, path, headers[given]).status in (401, 404)
    assert api("POST", FILTER, headers[given]).status == 401
    assert api("GET", "/api/admin/settings", headers[given]).status == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_host_is_refused_even_with_the_password(api: Api, host: str) -> None:
    assert api("POST", FILTER, {**api.known, "Host": host}).status == 400
    assert api("GET", "/api/health", {"Host": host}).status == 400


@pytest.mark.parametrize("origin", [FOREIGN, "null"])
def test_a_foreign_page_gets_no_leave_to_read_and_none_to_send(api: Api, origin: str) -> None:
    for headers in ({"Origin": origin}, {**api.known, "Origin": origin}):
        assert api("POST", FILTER, headers).getheader("access-control-allow-origin") is None
    for method in ("POST", "DELETE"):
        asks = {
            "Origin": origin,
            "Access-Control-Request-Method": method,
            "Access-Control-Request-Headers": "content-type",
        }
        answer = api("OPTIONS", FILTER, asks)
        assert answer.status == 400
        assert answer.getheader("access-control-allow-origin") is None


def test_a_socket_of_a_foreign_page_is_refused(api: Api) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    handshake = {**upgrade, "Sec-WebSocket-Key": base64.b64encode(b"0123456789abcdef").decode()}
    answer = api("GET", "/api/events/in", {**handshake, "Host": "evil.example", "Origin": FOREIGN})
    assert answer.status in (400, 403)


def test_it_does_nothing_that_nobody_asked_for(api: Api) -> None:
    connection = http.client.HTTPConnection(api.place, timeout=30)
    connection.request("GET", "/api/admin/settings", headers=api.known)
    server = json.loads(connection.getresponse().read())["server"]
    assert server["services"]["triggers"]["enabled"] is False
    assert server["events"]["stream_out_enabled"] is False
    assert server["logs"]["stream_out_enabled"] is False
    # What the run page is made of.
    assert server["services"]["task_run_recorder"]["enabled"] is True
    assert server["services"]["event_persister"]["enabled"] is True


def test_events_past_their_time_are_deleted_and_younger_ones_stay(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's own worker, which does it every hour, does not run in the temporary server."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    path = tmp_path / "prefect" / "prefect.db"
    path.parent.mkdir()
    columns = "id, occurred, event, resource_id, resource, related, payload, received, recorded, updated, created"

    def events() -> set[str]:
        with closing(sqlite3.connect(path)) as database:
            return {name for (name,) in database.execute("select event from events where event in ('old', 'young')")}

    with closing(sqlite3.connect(api.home / "prefect" / "prefect.db")) as known, closing(sqlite3.connect(path)) as own:
        known.backup(own)
        for name, age in {"old": timedelta(days=3), "young": timedelta(hours=1)}.items():
            at = f"{datetime.now(UTC) - age:%Y-%m-%d %H:%M:%S.%f}"
            values = (str(uuid4()), at, name, "test", "{}", "[]", "{}", at, at, at, at)
            own.execute(f"insert into events ({columns}) values ({', '.join('?' * len(values))})", values)
        own.commit()
    assert events() == {"old", "young"}
    with prefect_api(Home(tmp_path)) as server:
        assert server is not None
        assert server.temporary
        deadline = time.monotonic() + patience(30)
        while "old" in events() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert events() == {"young"}


def test_the_password_is_written_nowhere(api: Api) -> None:
    secret = api.credentials.partition(":")[2]
    assert len(secret) >= 32
    for path in api.home.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert secret.encode() not in command.read_bytes()
        except OSError:
            continue


@pytest.mark.servers
def test_a_campaign_runs_on_it_as_a_flow(tmp_path: Path) -> None:
    agents = {"ada": tiny().agents["ada"].model_dump(mode="json", exclude_none=True)}
    agents["ada"]["warmstart"]["steps"] = 20
    config = tiny(agents=agents, iterations=1, evaluate={}, tracking={"enabled": False})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HACRL_", "MLFLOW_"))}
    environment = {**kept, "HACRL_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(tmp_path / "tiny.yaml")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(560),
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "! " not in text, text
    with sqlite3.connect(tmp_path / "home" / "prefect" / "prefect.db") as database:
        runs = [state for (state,) in database.execute("select state_type from flow_run")]
        tasks = dict(database.execute("select name, state_type from task_run"))
        lines = [text for (text,) in database.execute("select message from log order by timestamp")]
    assert runs == ["COMPLETED"]
    assert tasks == {"warmstart ada": "COMPLETED", "ada iteration 1": "COMPLETED"}
    assert any(re.match("ada iterations? 1.*: reward ", line) and "update" in line for line in lines), lines
