"""``hacrl worker``: this machine runs deployed campaigns of a Prefect server elsewhere."""

import argparse
import os
import socket

from rich.console import Console

from flows.home import Home
from flows.servers.serve import serve_worker
from flows.servers.state import POOL
from flows.servers.supervisor import ServerOptions, environment, python_path
from hacrl_core.config.addresses import is_http, userinfo
from hacrl_core.errors import ConfigError, HacrlError


def join_pool(console: Console, home: Home, api: str, name: str | None, limit: int) -> None:
    """Poll the work pool until this process is ended; campaigns run in this home."""
    if not is_http(api) or userinfo(api) is not None:
        raise ConfigError(f"--api {api}: give http://HOST:4200/api; a user and password belong into HACRL_CREDENTIALS")
    home.root.mkdir(parents=True, exist_ok=True)
    os.environ |= {**environment(ServerOptions(), "worker", home), "PREFECT_API_URL": api, "PYTHONPATH": python_path()}
    import httpx

    shown = name or f"hacrl {socket.gethostname()}"
    console.print(f"{shown}: takes campaigns of work pool {POOL} at {api} into {home.root}, until Ctrl-C")
    try:
        serve_worker(argparse.Namespace(name=shown, limit=limit))
    except httpx.HTTPError as problem:
        raise HacrlError(
            f"--api {api}: Prefect does not answer ({type(problem).__name__}); is hacrl up running there?"
        ) from None
