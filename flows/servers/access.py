"""Access to servers that other machines can reach: one user and password for Prefect and MLflow.

The credentials come from ``HACRL_CREDENTIALS`` or from the file ``credentials`` in the home folder. We never write them
anywhere. Prefect checks them itself. MLflow's own authentication brings a user database, permissions per experiment and
another dependency. One team on one machine needs a password only, so a small middleware guards MLflow.
"""

import base64
import hmac
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from flows.home import Home
from hacrl_core.errors import ConfigError

VARIABLE = "HACRL_CREDENTIALS"
LOOPBACK = re.compile(r"^(127(\.\d{1,3}){3}|::1|localhost)$")
MIN_PASSWORD_LENGTH = 12

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]


def find_credentials(home: Home) -> str | None:
    """Return the validated ``user:password``, or None where none are configured."""
    if given := os.environ.get(VARIABLE):
        return _validated(given, VARIABLE)
    path = home.root / "credentials"
    try:
        text = path.read_text().strip()
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if mode & 0o077:
        raise ConfigError(f"{path}: others may read it (mode {mode & 0o777:o}); chmod 600 {path}")
    return _validated(text, str(path))


def require_credentials(host: str, credentials: str | None) -> None:
    """Refuse to listen on a host that other machines can reach without credentials."""
    if credentials is None and not LOOPBACK.match(host):
        raise ConfigError(
            f"--host {host}: other machines could reach the servers; put user:password into {VARIABLE} or into the "
            "home folder's file credentials (chmod 600), or stay on 127.0.0.1 and use an SSH tunnel"
        )


def client_environment(credentials: str | None) -> dict[str, str]:
    """Return the environment variables from which Prefect's and MLflow's clients read the credentials."""
    if credentials is None:
        return {}
    user, _, password = credentials.partition(":")
    return {
        "PREFECT_API_AUTH_STRING": credentials,
        "MLFLOW_TRACKING_USERNAME": user,
        "MLFLOW_TRACKING_PASSWORD": password,
    }


def answer_only_to(names: Sequence[str], app: Any, open_paths: tuple[str, ...] = (), status: int = 400) -> Any:
    """Return the application behind a check of the Host header.

    Prefect has none: a web page could rebind its own name to this machine and command the API. MLflow's accepts
    anything for a port, such as ``localhost:evil.com``.
    """
    return HostCheck(app, names, open_paths, status)


def own_origins(names: Sequence[str], port: int) -> str:
    """Return the value of Prefect's setting for the origins whose pages may call the API; its default is every one."""
    return ",".join(f"http://{name}:{port}" for name in names)


def basic_authorization(credentials: str) -> bytes:
    """Return the value of the HTTP header ``Authorization`` for ``user:password``."""
    return b"Basic " + base64.b64encode(credentials.encode())


def _validated(text: str, source: str) -> str:
    user, colon, password = text.partition(":")
    if not (user and colon) or len(password) < MIN_PASSWORD_LENGTH:
        raise ConfigError(
            f"{source}: not of the form user:password with at least {MIN_PASSWORD_LENGTH} characters of password; "
            "make one with: openssl rand -hex 16"
        )
    return text


class HostCheck:
    """ASGI middleware: requests whose Host is neither one of the names nor a name with a port are refused."""

    def __init__(self, app: App, names: Sequence[str], open_paths: tuple[str, ...] = (), status: int = 400) -> None:
        self._status = status
        self._app = app
        self._open = open_paths
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        """Pass a request to one of the names on to the application and refuse any other."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in self._open):
            return await self._app(scope, receive, send)
        host = dict(scope.get("headers", [])).get(b"host", b"").decode("latin-1").lower()
        name, colon, port = host.rpartition(":")
        if host in self._names or (colon and name in self._names and port.isascii() and port.isdigit()):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 4400})
        await send(
            {"type": "http.response.start", "status": self._status, "headers": [(b"content-type", b"text/plain")]}
        )
        return await send({"type": "http.response.body", "body": b"Invalid Host header\n"})


class BasicAuth:
    """ASGI middleware: requests without the right ``user:password`` get 401."""

    def __init__(self, app: App, credentials: str, open_paths: tuple[str, ...] = ()) -> None:
        self._app = app
        self._open = open_paths
        self._expected = basic_authorization(credentials)

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        """Pass an authorized request on to the application and refuse any other."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in self._open):
            return await self._app(scope, receive, send)
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 4401})
        headers = [(b"www-authenticate", b'Basic realm="hacrl"'), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        return await send({"type": "http.response.body", "body": b"user and password required\n"})
