"""Who may use servers that other machines can reach: one user and password for Prefect and MLflow.

They come from ``HACRL_CREDENTIALS`` or from the file ``credentials`` in the home folder, and are never written anywhere by us.
"""

import os
import re

from flows.home import Home
from hacrl_core.errors import ConfigError

VARIABLE = "HACRL_CREDENTIALS"
LOOPBACK = re.compile(r"^(127(\.\d{1,3}){3}|::1|localhost)$")
SHORTEST = 12


def find_credentials(home: Home) -> str | None:
    """``user:password``, checked; None where none are given."""
    if given := os.environ.get(VARIABLE):
        return _checked(given, VARIABLE)
    path = home.root / "credentials"
    try:
        text, mode = path.read_text().strip(), path.stat().st_mode
    except FileNotFoundError:
        return None
    if mode & 0o077:
        raise ConfigError(f"{path}: others may read it (mode {mode & 0o777:o}); chmod 600 {path}")
    return _checked(text, str(path))


def require_credentials(host: str, credentials: str | None) -> None:
    if credentials is None and not LOOPBACK.match(host):
        raise ConfigError(
            f"--host {host}: other machines could reach the servers; put user:password into {VARIABLE} or into the home folder's "
            "file credentials (chmod 600), or stay on 127.0.0.1 and use an SSH tunnel"
        )


def client_environment(credentials: str | None) -> dict[str, str]:
    """What Prefect's and MLflow's clients read."""
    if credentials is None:
        return {}
    user, _, password = credentials.partition(":")
    return {
        "PREFECT_API_AUTH_STRING": credentials,
        "MLFLOW_TRACKING_USERNAME": user,
        "MLFLOW_TRACKING_PASSWORD": password,
    }


def _checked(text: str, source: str) -> str:
    user, colon, password = text.partition(":")
    if not (user and colon) or len(password) < SHORTEST:
        raise ConfigError(
            f"{source}: not of the form user:password with at least {SHORTEST} characters of password; make one with: openssl rand -hex 16"
        )
    return text
