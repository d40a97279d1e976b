"""A door for MLflow's server: HTTP basic authentication with one user.

MLflow's own authentication brings a user database, permissions per experiment and another dependency; for one team on one machine a
password is what is needed, and its clients and every browser can give one.
"""

import base64
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]


class BasicAuth:
    """ASGI middleware: 401 for whoever does not send ``user:password``."""

    def __init__(self, app: App, credentials: str, open_paths: tuple[str, ...] = ()) -> None:
        self._app, self._open = app, open_paths
        self._expected = b"Basic " + base64.b64encode(credentials.encode())

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in self._open):
            return await self._app(scope, receive, send)
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 4401})
        headers = [(b"www-authenticate", b'Basic realm="hacrl"'), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        return await send({"type": "http.response.body", "body": b"user and password, please\n"})
