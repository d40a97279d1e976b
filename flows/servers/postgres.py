"""PostgreSQL as the place of the servers' state (``hacrl up --postgres``): its address and the two databases."""

import re
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from hacrl_core.errors import ConfigError

POSTGRES = "HACRL_POSTGRES_URL"
# libpq takes these options from the address. asyncpg, which Prefect uses, takes them from the environment only.
_OPTIONS = {
    # The folder of a socket: postgresql:///hacrl?host=/run/postgresql
    "host": "PGHOST",
    "sslmode": "PGSSLMODE",
    "sslrootcert": "PGSSLROOTCERT",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
    "sslcrl": "PGSSLCRL",
}
_REMEDIES = {
    "password authentication failed": "check user and password",
    "no password supplied": "give it as postgresql://user:password@…",
    "Connection refused": "is PostgreSQL running there?",
    "translate host name": "check the host's name",
    "SSL": "check sslmode and the server's certificate",
}


def check_address(url: str) -> None:
    """Refuse an address that the drivers would read differently.

    The message never shows what may be part of a password.
    """
    try:
        parts = urlsplit(url)
        plain = parts.port is None or parts.port > 0
    except ValueError:
        plain = False
    if not (
        plain
        and parts.scheme in ("postgres", "postgresql")
        and parts.netloc.count("@") <= 1
        and re.fullmatch(r"/?\w*/?", parts.path, re.ASCII)
        and not parts.fragment
    ):
        raise ConfigError(
            "--postgres: not of the form postgresql://user:password@host:5432/hacrl with a name of letters, digits and "
            "_; in a password write @ as %40, / as %2F, # as %23, % as %25"
        )
    if unknown := [key for key, _ in parse_qsl(parts.query) if key not in _OPTIONS]:
        raise ConfigError(f"--postgres: option {unknown[0]} is not known; known are {', '.join(_OPTIONS)}")


def database_url(url: str, server: str) -> str:
    """Return the address of a server's own database: ``hacrl`` becomes ``hacrl_prefect`` or ``hacrl_mlflow``.

    Both servers keep a table of migrations of the same name, so they cannot share a database.
    """
    driver = {"prefect": "postgresql+asyncpg", "mlflow": "postgresql+psycopg2"}[server]
    parts = urlsplit(url)
    query = parts.query if server == "mlflow" else ""
    return urlunsplit((driver, parts.netloc, f"/{database_name(url, server)}", query, ""))


def prefect_environment(url: str) -> dict[str, str]:
    """Return the environment variables by which Prefect finds and opens its database."""
    options = {_OPTIONS[key]: value for key, value in parse_qsl(urlsplit(url).query)}
    return {"PREFECT_API_DATABASE_CONNECTION_URL": database_url(url, "prefect"), **options}


def database_name(url: str, server: str) -> str:
    """Return the name of a server's own database."""
    return f"{urlsplit(url).path.strip('/') or 'hacrl'}_{server}"


def without_password(url: str) -> str:
    """Return the address as it may be shown and stored."""
    parts = urlsplit(url)
    user = f"{parts.username}@" if parts.username else ""
    port = f":{parts.port}" if parts.port else ""
    return f"postgresql://{user}{parts.hostname or ''}{port}/{parts.path.strip('/') or 'hacrl'}"


def ensure_databases(url: str) -> None:
    """Create the two databases where they are missing; raise a one-line error where PostgreSQL cannot be reached."""
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
        raise ConfigError(f"--postgres {without_password(url)}: {_reason(problem)}") from None
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            for server in ("prefect", "mlflow"):
                name = database_name(url, server)
                cursor.execute("select 1 from pg_database where datname = %s", (name,))
                if cursor.fetchone() is None:
                    cursor.execute(f'create database "{name}"')
    except psycopg2.Error as problem:
        raise ConfigError(
            f"--postgres {without_password(url)}: {str(problem).strip().splitlines()[0]}; let its user create "
            f"databases, or create {database_name(url, 'prefect')} and {database_name(url, 'mlflow')} yourself"
        ) from None
    finally:
        connection.close()


def _reason(problem: Exception) -> str:
    """The driver's first line without the address, which the message already names, and a remedy."""
    first = re.sub(r"^connection to server .*? failed: (FATAL:\s+)?", "", str(problem).strip().splitlines()[0])
    remedy = next((remedy for sign, remedy in _REMEDIES.items() if sign in str(problem)), None)
    return f"{first}; {remedy}" if remedy else first
