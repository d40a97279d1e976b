"""How the three servers are started: their commands and what their environment adds."""

import os
import re
import socket
import sys
from dataclasses import dataclass
from urllib.parse import quote, urlsplit, urlunsplit

from flows.home import Home
from flows.servers.credentials import LOOPBACK
from flows.servers.state import reachable
from hacrl_core.errors import ConfigError

POSTGRES = "HACRL_POSTGRES_URL"


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
        added["PREFECT_API_DATABASE_CONNECTION_URL"] = database_url(database, "prefect")
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


def database_url(url: str, server: str) -> str:
    """``postgresql://user@host/hacrl`` → the server's own database, ``hacrl_prefect`` or ``hacrl_mlflow``: each keeps a table of
    migrations of the same name, so they cannot share one."""
    driver = {"prefect": "postgresql+asyncpg", "mlflow": "postgresql+psycopg2"}[server]
    parts = urlsplit(url)
    return urlunsplit((driver, parts.netloc, f"/{database_name(url, server)}", parts.query, ""))


def database_name(url: str, server: str) -> str:
    return f"{urlsplit(url).path.strip('/') or 'hacrl'}_{server}"


def without_password(url: str) -> str:
    parts = urlsplit(url)
    user = f"{parts.username}@" if parts.username else ""
    port = f":{parts.port}" if parts.port else ""
    return f"postgresql://{user}{parts.hostname or ''}{port}/{parts.path.strip('/') or 'hacrl'}"


def ensure_databases(url: str) -> None:
    """Make the two databases where they are missing; one line where PostgreSQL cannot be reached."""
    if not re.match(r"^postgres(ql)?://", url):
        raise ConfigError(
            f"--postgres {without_password(url)}: not of the form postgresql://user:password@host:5432/hacrl"
        )
    try:
        import psycopg2
    except ImportError:
        raise ConfigError("--postgres: PostgreSQL's driver is missing; pip install 'hacrl[postgres]'") from None
    parts = urlsplit(url)
    try:
        connection = psycopg2.connect(
            urlunsplit(("postgresql", parts.netloc, "/postgres", parts.query, "")), connect_timeout=10
        )
    except psycopg2.OperationalError as problem:
        first = str(problem).strip().splitlines()[0]
        raise ConfigError(f"--postgres {without_password(url)}: {first}") from None
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            for server in ("prefect", "mlflow"):
                name = database_name(url, server)
                if not re.fullmatch(r"[A-Za-z0-9_]+", name):
                    raise ConfigError(f"--postgres: database name {quote(name)} is not of letters, digits and _")
                cursor.execute("select 1 from pg_database where datname = %s", (name,))
                if cursor.fetchone() is None:
                    cursor.execute(f'create database "{name}"')
    except psycopg2.Error as problem:
        raise ConfigError(
            f"--postgres {without_password(url)}: {str(problem).strip().splitlines()[0]}; let its user create databases, or create "
            f"{database_name(url, 'prefect')} and {database_name(url, 'mlflow')} yourself"
        ) from None
    finally:
        connection.close()
