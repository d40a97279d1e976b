"""Real servers for the tests: one ``hacrl up`` for all of them, in a home of its own, on free ports of loopback."""

import contextlib
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from flows.home import Home
from flows.servers.processes import processes_with_token
from flows.servers.state import read_state
from tests.flow.conftest import TINY
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
DATABASE_PASSWORD = "fedcba9876543210"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fetch(url, data=None, **headers):
    """Status, headers and text of an answer, whatever the status.

    Prefect answers 503 while its database is busy, and means "later", as its own client understands it.
    """
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **headers})
    deadline = time.monotonic() + patience(60)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=patience(20)) as answer:
                return answer.status, dict(answer.headers), answer.read().decode()
        except urllib.error.HTTPError as problem:
            if problem.code != 503 or time.monotonic() > deadline:
                return problem.code, dict(problem.headers), problem.read().decode()
        time.sleep(1.0)


def wait_for(condition, seconds, what):
    seconds = patience(seconds)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.3)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


class Command:
    """The hacrl command with an environment of its own."""

    def __init__(self, place: Path, **environment: str) -> None:
        self.place, self.home = place, Home(place / "home")
        self.environment = {
            **{k: v for k, v in os.environ.items() if not re.match("PREFECT_|MLFLOW_|HACRL_", k)},
            "HACRL_HOME": str(self.home.root),
            "HOME": str(place),
            "COLUMNS": "140",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **environment,
        }

    def __call__(self, *words: str, code: int = 0, timeout: float = 280) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *words],
            cwd=self.place, env=self.environment, capture_output=True, text=True, timeout=patience(timeout),
        )  # fmt: skip
        text = done.stdout + done.stderr
        assert done.returncode == code, text
        assert "Traceback" not in text, text
        return text

    def config(self, name: str, **changes) -> str:
        path = self.place / f"{name}.yaml"
        agents = {"ada": TINY["agents"]["ada"]}  # one agent: what is tested here is around it
        settings = {**TINY, "name": name, "agents": agents, "tracking": {"enabled": True}, **changes}
        path.write_text(yaml.safe_dump(settings))
        return str(path)


class Servers(Command):
    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.ports = {"prefect": free_port(), "mlflow": free_port()}
        self.said = ""

    def up(self, *words: str, code: int = 0) -> str:
        return self("up", *(f"--{name}-port={port}" for name, port in self.ports.items()), *words, code=code)

    @property
    def prefect(self) -> str:
        return f"http://127.0.0.1:{self.ports['prefect']}"

    @property
    def mlflow(self) -> str:
        return f"http://127.0.0.1:{self.ports['mlflow']}"

    def pid(self, name: str) -> int:
        return read_state(self.home).servers[name].process.pid

    def api(self, path: str, **body):
        status, _, text = fetch(f"{self.prefect}/api/{path}", json.dumps(body).encode())
        assert status == 200, text
        return json.loads(text)

    def runs(self, deployment: str) -> list[dict]:
        return self.api(
            "flow_runs/filter", deployments={"name": {"any_": [deployment]}}, sort="EXPECTED_START_TIME_ASC"
        )


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    servers = Servers(tmp_path_factory.mktemp("servers"))
    begun = time.monotonic()
    try:
        servers.said = servers.up()
        servers.seconds = time.monotonic() - begun
        yield servers
    finally:
        state = read_state(servers.home)
        with contextlib.suppress(AssertionError):
            servers("down", "--force")
        left = processes_with_token(state.token) if state else []
        assert left == [], "hacrl down left processes behind"


class Postgres:
    """A cluster in a folder of its own. PostgreSQL refuses to run as root, so root hands it to the postgres user."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder, self.binaries, self.port = folder, binaries, free_port()
        self._as = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
        password = folder / "password"
        password.write_text(DATABASE_PASSWORD)
        if self._as:
            for path in (folder, password):
                shutil.chown(path, "postgres")
        self._do(
            "initdb",
            "--username=hacrl",
            "--auth=scram-sha-256",
            f"--pwfile={password}",
            "--no-sync",
            "-D",
            str(folder / "data"),
        )
        self.start()

    def start(self) -> None:
        folder = self.folder
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        self._do("pg_ctl", "-D", str(folder / "data"), "-l", str(folder / "log"), "-w", "-o", options, "start")

    def _do(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [*self._as, str(self.binaries / program), *words],
            capture_output=True,
            text=True,
            cwd="/",
            timeout=patience(120),
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def query(self, database: str, sql: str, file: Path | None = None) -> list[str]:
        place = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "hacrl", "-d", database]
        words = ["--file", str(file)] if file else ["--command", sql]
        done = subprocess.run(
            [self.binaries / "psql", *place, "-At", "-v", "ON_ERROR_STOP=1", *words],
            capture_output=True, text=True, env={**os.environ, "PGPASSWORD": DATABASE_PASSWORD}, timeout=patience(60),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def stop(self) -> None:
        self._do("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "stop")


@pytest.fixture(scope="session")
def postgres():
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL's server is not installed (apt-get install postgresql)")
    if os.getuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL refuses to run as root and there is no user postgres")
    folder = Path(tempfile.mkdtemp(prefix="hacrl-pg-"))  # pytest's own folders are closed to other users
    cluster = Postgres(folder, found[-1].parent)
    yield cluster
    cluster.stop()
    shutil.rmtree(folder)
