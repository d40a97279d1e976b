"""The parts of hacrl up that need no server: processes, state, credentials, addresses, authentication."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from rich.console import Console

from flows.home import Home
from flows.scheduling import deployments
from flows.scheduling.slots import slot_names
from flows.servers.access import BasicAuth, HostCheck, client_environment, find_credentials, require_credentials
from flows.servers.postgres import check_address, database_url, without_password
from flows.servers.processes import TOKEN, Process, memory, process_tree, processes_with_token, terminate
from flows.servers.state import (
    Server,
    State,
    read_state,
    running_mlflow_url,
    running_prefect_url,
    state_file,
    write_state,
)
from flows.servers.supervisor import ServerOptions, command, environment
from hacrl_core.errors import ConfigError
from tests.flow.conftest import tiny

SLEEP = "import time; time.sleep(60)"
# A process that starts another in its own session and prints its id: a group signal would miss that one.
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"


@pytest.fixture
def start():
    begun = []

    def start(code, **extra):
        popen = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, **extra}
        )
        begun.append(popen)
        return popen

    yield start
    for popen in begun:
        popen.kill()
        popen.wait()


def test_a_process_is_identified_by_id_start_time_and_boot(start):
    popen = start(SLEEP)
    process = Process.of(popen.pid)
    assert process.alive()
    assert 0 <= process.uptime() < 30
    assert not Process(process.pid, process.began - 1, process.boot).alive()  # the same id, another process
    assert not Process(process.pid, process.began, "another boot").alive()
    popen.kill()
    time.sleep(0.05)
    assert not process.alive()  # a zombie, not yet waited for, is not alive
    popen.wait()
    with pytest.raises(ProcessLookupError):
        Process.of(process.pid)


def test_a_signal_never_reaches_a_process_that_reused_an_id(start):
    popen = start(SLEEP)
    old = Process.of(popen.pid)
    stranger = Process(old.pid, old.began - 100, old.boot)
    assert terminate([stranger], patience=0.1) == []
    assert popen.poll() is None


def test_the_token_finds_grandchildren_in_sessions_of_their_own_and_nobody_else(start):
    popen, bystander = start(PARENT, **{TOKEN: "a-token"}), start(SLEEP, **{TOKEN: "another"})
    grandchild = int(popen.stdout.readline())
    assert {process.pid for process in processes_with_token("a-token")} == {popen.pid, grandchild}
    assert set(process_tree(popen.pid)) == {popen.pid, grandchild}
    assert memory(process_tree(popen.pid)) > 2 * 2**20
    terminate(processes_with_token("a-token"), patience=5)
    assert processes_with_token("a-token") == []
    assert bystander.poll() is None


def test_a_process_that_ignores_sigterm_is_killed(start):
    popen = start(STUBBORN)
    popen.stdout.readline()
    assert [process.pid for process in terminate([Process.of(popen.pid)], patience=0.2)] == [popen.pid]
    assert popen.wait() == -9


def test_state_survives_the_file_and_is_private(tmp_path):
    home, me = Home(tmp_path), Process.of(os.getpid())
    state = State("token", me, "127.0.0.1", 4200, 5000, "sqlite", {"prefect": Server(me, 2)})
    write_state(home, state)
    assert read_state(home) == state
    assert state_file(home).stat().st_mode & 0o077 == 0
    assert running_prefect_url(home) == "http://127.0.0.1:4200/api"
    assert running_mlflow_url(home) is None  # it does not run
    state_file(home).write_text("{}")
    assert read_state(home) is None


def test_servers_of_a_dead_process_are_not_used(tmp_path, start):
    popen, home = start(SLEEP), Home(tmp_path)
    gone = Process.of(popen.pid)
    write_state(home, State("t", gone, "127.0.0.1", 1, 2, "sqlite", {"prefect": Server(gone), "mlflow": Server(gone)}))
    popen.kill()
    popen.wait()
    assert running_prefect_url(home) is None
    assert running_mlflow_url(home) is None


def test_other_machines_are_let_in_with_credentials_only(tmp_path, monkeypatch):
    monkeypatch.delenv("HACRL_CREDENTIALS", raising=False)
    home = Home(tmp_path)
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        require_credentials(host, find_credentials(home))
    for host in ("0.0.0.0", "::", "192.168.1.5", "127.0.0.1.example.org"):
        with pytest.raises(ConfigError, match="credentials"):
            require_credentials(host, find_credentials(home))
    path = tmp_path / "credentials"
    path.write_text("ada:correct horse battery\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        find_credentials(home)
    path.chmod(0o600)
    require_credentials("0.0.0.0", find_credentials(home))
    assert client_environment(find_credentials(home)) == {
        "PREFECT_API_AUTH_STRING": "ada:correct horse battery",
        "MLFLOW_TRACKING_USERNAME": "ada",
        "MLFLOW_TRACKING_PASSWORD": "correct horse battery",
    }
    monkeypatch.setenv("HACRL_CREDENTIALS", "ada:short")
    with pytest.raises(ConfigError, match="at least 12 characters"):
        find_credentials(home)


def test_databases_are_apart_and_passwords_are_in_no_command_line(tmp_path, monkeypatch):
    url = "postgresql://ada:s3cret@db.lan:5433/team?sslmode=require"
    assert database_url(url, "prefect") == "postgresql+asyncpg://ada:s3cret@db.lan:5433/team_prefect"
    assert database_url(url, "mlflow") == "postgresql+psycopg2://ada:s3cret@db.lan:5433/team_mlflow?sslmode=require"
    assert without_password(url) == "postgresql://ada@db.lan:5433/team"
    monkeypatch.setenv("HACRL_POSTGRES_URL", url)
    for server in ("prefect", "mlflow", "worker"):
        assert not any("s3cret" in word for word in command(ServerOptions(), server))
    assert environment(ServerOptions(), "mlflow", Home(tmp_path))["MLFLOW_BACKEND_STORE_URI"].endswith(
        "team_mlflow?sslmode=require"
    )
    assert (
        environment(ServerOptions(), "prefect", Home(tmp_path))["PGSSLMODE"] == "require"
    )  # asyncpg refuses it in the address
    assert not any("s3cret" in value for value in environment(ServerOptions(), "worker", Home(tmp_path)).values())


@pytest.mark.parametrize(
    "url",
    [
        "mysql://ada:s3cret@db.lan/team",
        "postgresql://ada:s3cret@db.lan:port/team",
        "postgresql://ada:s3c@ret@db.lan/team",  # the drivers do not agree where such a password ends
        "postgresql://ada:s3c/ret@db.lan/team",
        "postgresql://ada:s3cret@db.lan/team-1",
        "postgresql://ada:s3cret@db.lan/team?connect_timeout=1",
    ],
)
def test_an_address_that_drivers_read_differently_is_refused_without_showing_it(url):
    with pytest.raises(ConfigError) as problem:
        check_address(url)
    assert not any(part in str(problem.value) for part in ("s3c", "ret@"))


def test_addresses_that_all_drivers_understand():
    for url in (
        "postgresql:///team?host=/run/postgresql",
        "postgres://db.lan",
        "postgresql://ada:s3%40cret@[::1]:5433/team",
    ):
        check_address(url)


def test_without_postgres_mlflow_serves_the_file_that_campaigns_write(tmp_path, monkeypatch):
    monkeypatch.delenv("HACRL_POSTGRES_URL", raising=False)
    home = Home(tmp_path)
    assert environment(ServerOptions(), "mlflow", home)["MLFLOW_BACKEND_STORE_URI"] == home.tracking_uri


@pytest.mark.parametrize(
    ("kind", "path", "header", "answer"),
    [
        ("http", "/", b"", 401),
        ("http", "/", b"Basic d3Jvbmc6d3Jvbmc=", 401),
        ("http", "/", b"Basic YWRhOmNvcnJlY3QgaG9yc2U=", "inside"),
        ("http", "/health", b"", "inside"),
        ("http", "/health/../api", b"", 401),
        ("websocket", "/", b"", "closed"),
        ("lifespan", "/", b"", "inside"),
    ],
)
def test_only_the_right_credentials_get_through(kind, path, header, answer):
    sent = []

    async def inside(scope, receive, send):
        await send({"type": "inside"})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": [(b"authorization", header)] if header else []}
    asyncio.run(BasicAuth(inside, "ada:correct horse", open_paths=("/health",))(scope, None, send))
    first = sent[0]
    assert {"inside": "inside", "websocket.close": "closed"}.get(first["type"], first.get("status")) == answer


@pytest.mark.parametrize(
    ("kind", "path", "host", "answer"),
    [
        ("http", "/", b"localhost", "inside"),
        ("http", "/", b"LocalHost:8080", "inside"),
        ("http", "/", b"[::1]:5000", "inside"),
        ("http", "/", b"localhost:evil.com", 400),
        ("http", "/", b"localhost:80.evil.com", 400),
        ("http", "/", b"evil.com", 400),
        ("http", "/", b"evil.com:5000", 400),
        ("http", "/", b"", 400),
        ("http", "/health", b"10.0.0.7:5000", "inside"),
        ("websocket", "/", b"evil.com", "closed"),
        ("lifespan", "", b"", "inside"),
    ],
)
def test_a_server_answers_to_its_names_only(kind, path, host, answer):
    sent = []

    async def inside(scope, receive, send):
        await send({"type": "inside"})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": [(b"host", host)]}
    asyncio.run(HostCheck(inside, ["localhost", "[::1]"], open_paths=("/health",))(scope, None, send))
    first = sent[0]
    assert {"inside": "inside", "websocket.close": "closed"}.get(first["type"], first.get("status")) == answer


def test_a_campaign_wants_a_slot_for_every_gpu_it_uses():
    ada, ben = tiny().agents.values()
    machine = socket.gethostname()
    assert slot_names(tiny(runtime={"slots": ["b", "a", "b"]})) == ["a", "b"]
    on_cpu = {"ada": ada.model_copy(update={"device": "cpu"})}
    assert slot_names(tiny(agents=on_cpu)) == []
    on_gpus = {"ada": ada.model_copy(update={"device": "cuda:1"}), "ben": ben.model_copy(update={"gpus": (1, 3)})}
    assert slot_names(tiny(agents=on_gpus)) == [f"gpu {machine} cuda:1", f"gpu {machine} cuda:3"]


def test_a_deployment_that_is_gone_when_the_client_asks_again_counts_as_removed(tmp_path, monkeypatch, capsys):
    """A server that answers too late has deleted it already."""
    from prefect.exceptions import ObjectNotFound

    class Client:
        def read_deployment_by_name(self, name):
            return SimpleNamespace(id="an id")

        def delete_deployment(self, number):
            raise ObjectNotFound(Exception("404"))

    monkeypatch.setattr(deployments, "_client", lambda home: nullcontext(Client()))
    deployments.remove(Console(), "night", Home(tmp_path))
    assert "deployment night is removed" in capsys.readouterr().out
