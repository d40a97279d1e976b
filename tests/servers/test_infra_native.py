"""The compose file's processes without containers: same commands, same environment, a real PostgreSQL server.

A campaign runs through them from its schedule to MLflow's tables.
"""

import base64
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from flows.servers.processes import TOKEN, processes_with_token
from tests.patience import patience
from tests.servers.compose_file import INFRA, read_compose
from tests.servers.conftest import DATABASE_PASSWORD, Command, Postgres, fetch, free_port, wait_for

pytestmark = pytest.mark.servers

PASSWORD = "0123456789abcdef"
VALUES = {"HACRL_USER": "ada", "HACRL_PASSWORD": PASSWORD, "HACRL_POSTGRES_PASSWORD": DATABASE_PASSWORD}
BASIC = {"Authorization": "Basic " + base64.b64encode(f"ada:{PASSWORD}".encode()).decode()}


class Stack:
    """The services of infra/compose.yaml as processes of this machine."""

    def __init__(self, place: Path, postgres: Postgres) -> None:
        self.place, self.compose = place, read_compose(VALUES)
        self.ports = {"prefect": free_port(), "mlflow": free_port()}
        self.names = {
            "@postgres:5432": f"@127.0.0.1:{postgres.port}",
            "http://prefect:4200": self.url("prefect"),
            "http://mlflow:5000": self.url("mlflow"),
            "http://127.0.0.1:4200": self.url("prefect"),
        }
        self.processes: dict[str, subprocess.Popen] = {}
        self.token = uuid.uuid4().hex

    def url(self, server: str) -> str:
        return f"http://127.0.0.1:{self.ports[server]}"

    def environment(self, service: str) -> dict[str, str]:
        """What the container would have: its own variables only, names of other containers replaced by addresses."""
        volume = self.place / ("home" if service == "worker" else service)
        volume.mkdir(exist_ok=True)
        given = {}
        for name, value in self.compose.services[service].environment.items():
            for there, here in self.names.items():
                value = value.replace(there, here)
            given[name] = str(volume) + value[len("/data") :] if value.startswith("/data") else value
        root = str(INFRA.parent)
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(volume),
            "PYTHONPATH": root,
            "OMP_NUM_THREADS": "1",
            TOKEN: self.token,
            **given,
        }

    def start(self, service: str) -> None:
        words = list(self.compose.services[service].command)
        assert words[0] == "python"
        words[0] = sys.executable
        if service in self.ports:
            words[words.index("--host") + 1] = "127.0.0.1"  # the container's network is not this machine's
            words[words.index("--port") + 1] = str(self.ports[service])
        log = (self.place / f"{service}.log").open("wb")
        self.processes[service] = subprocess.Popen(
            words, env=self.environment(service), stdout=log, stderr=log, cwd=self.place
        )

    def healthy(self, service: str, path: str) -> bool:
        assert self.processes[service].poll() is None, (self.place / f"{service}.log").read_text()
        try:
            return fetch(self.url(service) + path)[0] == 200
        except OSError:
            return False

    def stop(self) -> None:
        for service in ("worker", "mlflow", "prefect"):
            if service in self.processes:
                self.processes[service].terminate()
                try:
                    self.processes[service].wait(timeout=patience(30))
                except subprocess.TimeoutExpired:
                    self.processes[service].kill()
                    self.processes[service].wait()
        assert processes_with_token(self.token) == [], "processes were left behind"


@pytest.fixture(scope="module")
def stack(tmp_path_factory, postgres):
    postgres.query("postgres", "", file=INFRA / "postgres" / "databases.sql")
    stack = Stack(tmp_path_factory.mktemp("stack"), postgres)
    try:
        stack.start("prefect")
        stack.start("mlflow")
        wait_for(lambda: stack.healthy("prefect", "/api/health"), 180, "Prefect")
        wait_for(lambda: stack.healthy("mlflow", "/health"), 180, "MLflow")
        stack.start("worker")
        yield stack
    finally:
        stack.stop()


def test_both_servers_ask_who_is_there(stack):
    for server, path in (
        ("prefect", "/api/admin/version"),
        ("mlflow", "/api/2.0/mlflow/experiments/search?max_results=1"),
    ):
        assert fetch(stack.url(server) + path)[0] == 401
        assert fetch(stack.url(server) + path, **BASIC)[0] == 200
        assert fetch(stack.url(server) + path, Host="evil.example", **BASIC)[0] in (400, 403)
        assert fetch(stack.url(server) + path, Host=server, **BASIC)[0] == 200  # the worker's way


def test_a_campaign_goes_from_its_schedule_through_the_worker_to_mlflow_on_postgres(stack, postgres):
    command = Command(stack.place)
    command.environment = {**stack.environment("worker"), "COLUMNS": "140"}  # docker compose exec worker hacrl …
    every_minute = {"cron": "* * * * *", "more_iterations": 1}
    command("deploy", command.config("night", schedule=every_minute))

    def done():
        assert stack.processes["worker"].poll() is None, (stack.place / "worker.log").read_text()[-3000:]
        query = "select count(*) from flow_run where state_type = 'COMPLETED' and auto_scheduled"
        failed = "select count(*) from flow_run where state_type in ('FAILED', 'CRASHED')"
        assert postgres.query("hacrl_prefect", failed) == ["0"], (stack.place / "worker.log").read_text()[-3000:]
        return int(postgres.query("hacrl_prefect", query)[0]) >= 1

    begun = time.monotonic()
    wait_for(done, 420, "a scheduled run")
    print(f"\na scheduled campaign was complete {time.monotonic() - begun:.0f} s after hacrl deploy")
    command("deploy", "--remove", "night")
    names = postgres.query("hacrl_mlflow", "select name from runs order by name")
    assert names == ["night", "night/ada"]
    rewards = "select count(*) from metrics where key = 'verify/reward_mean'"
    assert int(postgres.query("hacrl_mlflow", rewards)[0]) >= 1
    assert list((stack.place / "mlflow" / "mlartifacts").rglob("config.json"))  # files went through the server
    assert (stack.place / "home" / "campaigns" / "night" / "learning-curves.png").exists()
    assert not (stack.place / "home" / "mlflow.db").exists()
