"""What ``hacrl up`` left in the home folder: which servers run, where they answer, who started them."""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from flows.home import Home
from flows.servers.processes import Process

NAMES = ("prefect", "mlflow", "worker")
POOL = "hacrl"


@dataclass(frozen=True)
class Server:
    process: Process
    restarts: int = 0


@dataclass(frozen=True)
class State:
    """The servers of one ``up``. No secret is in it."""

    token: str
    supervisor: Process
    host: str
    prefect_port: int
    mlflow_port: int
    database: str  # where both keep their state: "sqlite", or PostgreSQL's address without the password
    servers: dict[str, Server] = field(default_factory=dict)

    def alive(self, name: str) -> bool:
        return name in self.servers and self.servers[name].process.alive()

    def with_server(self, name: str, server: Server) -> "State":
        return replace(self, servers={**self.servers, name: server})

    @property
    def prefect_url(self) -> str:
        return f"http://{reachable(self.host)}:{self.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        return f"http://{reachable(self.host)}:{self.mlflow_port}"


def reachable(host: str) -> str:
    """Where a client on this machine finds a server that listens on ``host``."""
    plain = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{plain}]" if ":" in plain else plain


def state_file(home: Home) -> Path:
    return home.root / "servers.json"


def log_file(home: Home, name: str) -> Path:
    return home.root / "logs" / f"{name}.log"


def write_state(home: Home, state: State) -> None:
    home.root.mkdir(parents=True, exist_ok=True)
    draft = state_file(home).with_suffix(".draft")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(state), file, indent=1)
    os.replace(draft, state_file(home))


def read_state(home: Home) -> State | None:
    """The last ``up``'s servers, whether or not they still run; None where there never was one, or the file is no state."""
    try:
        raw = json.loads(state_file(home).read_text())
        servers = {n: Server(Process(**s["process"]), s["restarts"]) for n, s in raw.pop("servers").items()}
        return State(**{**raw, "supervisor": Process(**raw["supervisor"]), "servers": servers})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prefect_of(home: Home) -> str | None:
    """The API of this home's Prefect server where it runs. What the client needs to enter is put into the environment."""
    state = read_state(home)
    if state is None or not state.alive("prefect"):
        return None
    _enter(home)
    return f"{state.prefect_url}/api"


def mlflow_of(home: Home) -> str | None:
    """This home's MLflow server where it runs; clients use it instead of the database below it."""
    state = read_state(home)
    if state is None or not state.alive("mlflow"):
        return None
    _enter(home)
    return state.mlflow_url


def _enter(home: Home) -> None:
    from flows.servers.credentials import client_environment, find_credentials

    for name, value in client_environment(find_credentials(home)).items():
        os.environ.setdefault(name, value)
