"""The servers that ``hacrl up`` started in a home folder: their processes, their addresses, and whether they answer."""

import json
import os
import socket
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.home import Home
from flows.servers.access import basic_authorization, client_environment, find_credentials
from flows.servers.processes import Process

NAMES = ("prefect", "mlflow", "worker")
POOL = "hacrl"
# Keeps a server's database bounded: events make most of it, and nothing reads them after the run. Flow runs go with
# their task runs and logs; the campaigns themselves are in the store.
BOUNDED = {
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P1D",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(30 * 24 * 3600),
}
# The server answers, and wants credentials that this shell does not have.
_UNAUTHORIZED = "401"
# The worker sends a heartbeat every ten seconds.
_HEARTBEAT_SECONDS = 60


def names_of(ray_port: int | None) -> tuple[str, ...]:
    """Return the servers to run: Prefect, MLflow, a worker and, if it has a port, the head of a Ray cluster."""
    return NAMES if ray_port is None else (*NAMES, "ray")


@dataclass(frozen=True)
class Server:
    """One server's process, and how often the supervisor restarted it."""

    process: Process
    restarts: int = 0


@dataclass(frozen=True)
class State:
    """The servers of one ``hacrl up``. It holds no secret."""

    token: str
    supervisor: Process
    host: str
    prefect_port: int
    mlflow_port: int
    # Where both servers keep their state: "sqlite", or PostgreSQL's address without the password.
    database: str
    servers: dict[str, Server] = field(default_factory=dict)
    # Of the head of a Ray cluster, where one was asked for.
    ray_port: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The servers of this ``hacrl up``."""
        return names_of(self.ray_port)

    def alive(self, name: str) -> bool:
        """Return whether the server's process is alive."""
        return name in self.servers and self.servers[name].process.alive()

    def with_server(self, name: str, server: Server) -> "State":
        """Return a copy in which this server is entered."""
        return replace(self, servers={**self.servers, name: server})

    @property
    def prefect_url(self) -> str:
        """Prefect's address for clients on this machine."""
        return f"http://{client_host(self.host)}:{self.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        """MLflow's address for clients on this machine."""
        return f"http://{client_host(self.host)}:{self.mlflow_port}"


def client_host(host: str) -> str:
    """Return the host by which a client on this machine reaches a server that listens on ``host``."""
    plain = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{plain}]" if ":" in plain else plain


def state_file(home: Home) -> Path:
    """Return the file in the home folder that holds the state."""
    return home.root / "servers.json"


def log_file(home: Home, name: str) -> Path:
    """Return the log file of a server, or of the supervisor (``servers``)."""
    return home.root / "logs" / f"{name}.log"


def write_state(home: Home, state: State) -> None:
    """Replace the state file at once, readable by its owner only."""
    home.root.mkdir(parents=True, exist_ok=True)
    draft = state_file(home).with_suffix(".draft")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(state), file, indent=1)
    os.replace(draft, state_file(home))


def read_state(home: Home) -> State | None:
    """Return the state that the last ``hacrl up`` wrote, whether or not its servers still run.

    None where there is no state file or it cannot be read.
    """
    try:
        raw = json.loads(state_file(home).read_text())
        servers = {n: Server(Process(**s["process"]), s["restarts"]) for n, s in raw.pop("servers").items()}
        return State(**{**raw, "supervisor": Process(**raw["supervisor"]), "servers": servers})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def running_prefect_url(home: Home) -> str | None:
    """Return the API address of this home's Prefect server, or None where it does not run.

    The credentials that Prefect's client needs are put into the environment.
    """
    state = read_state(home)
    if state is None or not state.alive("prefect"):
        return None
    _export_credentials(home)
    return f"{state.prefect_url}/api"


def running_mlflow_url(home: Home) -> str | None:
    """Return the address of this home's MLflow server, or None where it does not run.

    Clients use the server instead of its database. Their credentials are put into the environment.
    """
    state = read_state(home)
    if state is None or not state.alive("mlflow"):
        return None
    _export_credentials(home)
    return state.mlflow_url


def _export_credentials(home: Home) -> None:
    for name, value in client_environment(find_credentials(home)).items():
        os.environ.setdefault(name, value)


def answers(state: State, server: str, home: Home) -> bool:
    """Return whether the server's process lives and does its work; without its database a server does not."""
    if not state.alive(server):
        return False
    if server == "prefect":
        return _get(f"{state.prefect_url}/api/ready") is not None
    if server == "mlflow":
        address = f"{state.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1"
        return _get(address, find_credentials(home)) is not None
    if server == "ray":
        return _listens(state.ray_port)
    return _worker_polls(state, home)


def _listens(port: int | None) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port or 0), timeout=3):
            return True
    except OSError:
        return False


def _worker_polls(state: State, home: Home) -> bool:
    """Prefect knows when it last heard from the worker."""
    body = _get(f"{state.prefect_url}/api/work_pools/{POOL}/workers/filter", find_credentials(home), data=b"{}")
    if body == _UNAUTHORIZED:
        # Without credentials nothing more can be learned than that the process is alive.
        return True
    try:
        workers: list[dict[str, Any]] = json.loads(body or "[]")
        beats = [datetime.fromisoformat(worker["last_heartbeat_time"]) for worker in workers]
    except (ValueError, KeyError, TypeError):
        return False
    began = time.time() - state.servers["worker"].process.uptime()
    newest = max((beat.astimezone(UTC).timestamp() for beat in beats), default=0.0)
    return newest > began - 1 and time.time() - newest < _HEARTBEAT_SECONDS


def _get(url: str, credentials: str | None = None, data: bytes | None = None) -> str | None:
    """Return the body of the answer, or None where the server does not answer or reports an error."""
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    if credentials:
        request.add_header("Authorization", basic_authorization(credentials).decode())
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=3) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as problem:
        return _UNAUTHORIZED if problem.code == 401 else None
    except (urllib.error.URLError, OSError, ValueError):
        return None
