"""How the three servers are started: their commands and what their environment adds."""

import os
import socket
import sys
from dataclasses import dataclass

from flows.home import Home
from flows.servers.credentials import LOOPBACK
from flows.servers.postgres import POSTGRES, database_url, prefect_environment
from flows.servers.state import reachable


@dataclass(frozen=True)
class Wanted:
    """What ``hacrl up`` was asked for. The database's address may hold a password, so it travels in the environment."""

    host: str = "127.0.0.1"
    prefect_port: int = 4200
    mlflow_port: int = 5000
    name: str | None = None  # under which other machines reach this one
    limit: int = 4


def name_of(host: str) -> str | None:
    """Under which name others will call a server that listens on ``host``, where nobody says."""
    if LOOPBACK.match(host):
        return None
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def command(wanted: Wanted, server: str) -> list[str]:
    words = [sys.executable, "-m", "flows.servers.serve", server]
    if server == "worker":
        return [*words, "--limit", str(wanted.limit)]
    port = wanted.prefect_port if server == "prefect" else wanted.mlflow_port
    return [*words, "--host", wanted.host, "--port", str(port), *(["--name", wanted.name] if wanted.name else [])]


def environment(wanted: Wanted, server: str, home: Home) -> dict[str, str]:
    """Everything by which the servers of a home differ from the defaults."""
    database = os.environ.get(POSTGRES)
    added = {"HACRL_HOME": str(home.root), "PREFECT_HOME": str(home.root / "prefect"), "DO_NOT_TRACK": "true"}
    if server == "prefect" and database:
        added |= prefect_environment(database)
    if server == "mlflow":
        added["MLFLOW_BACKEND_STORE_URI"] = database_url(database, "mlflow") if database else home.tracking_uri
        # Files lie where clients without the server put them too, so both ways show the same.
        added["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = (home.root / "mlartifacts").as_uri()
    if server == "worker":
        added["PREFECT_API_URL"] = f"http://{reachable(wanted.host)}:{wanted.prefect_port}/api"
        added["PREFECT_LOGGING_LEVEL"] = "INFO"
        added["PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL"] = (
            "WARNING"  # twenty lines an iteration that say "finished"
        )
    return added
