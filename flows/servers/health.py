"""Does a server answer?"""

import base64
import json
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from typing import Any

from flows.home import Home
from flows.servers.credentials import find_credentials
from flows.servers.state import POOL, State

CLOSED = "401"  # it answers, and wants credentials that this shell does not have
_HEARTBEAT_SECONDS = 60  # the worker sends one every ten


def answers(state: State, server: str, home: Home) -> bool:
    """The process lives and does its work, which a server without its database does not."""
    if not state.alive(server):
        return False
    if server == "prefect":
        return _get(f"{state.prefect_url}/api/ready") is not None
    if server == "mlflow":
        address = f"{state.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1"
        return _get(address, find_credentials(home)) is not None
    return _worker_polls(state, home)


def _worker_polls(state: State, home: Home) -> bool:
    body = _get(f"{state.prefect_url}/api/work_pools/{POOL}/workers/filter", find_credentials(home), data=b"{}")
    if body == CLOSED:
        return True  # who may not ask sees that it lives, no more
    try:
        workers: list[dict[str, Any]] = json.loads(body or "[]")
        beats = [datetime.fromisoformat(worker["last_heartbeat_time"]) for worker in workers]
    except (ValueError, KeyError, TypeError):
        return False
    began = time.time() - state.servers["worker"].process.uptime()
    newest = max((beat.astimezone(UTC).timestamp() for beat in beats), default=0.0)
    return newest > began - 1 and time.time() - newest < _HEARTBEAT_SECONDS


def _get(url: str, credentials: str | None = None, data: bytes | None = None) -> str | None:
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    if credentials:
        request.add_header("Authorization", f"Basic {base64.b64encode(credentials.encode()).decode()}")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=3) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as problem:
        return CLOSED if problem.code == 401 else None
    except (urllib.error.URLError, OSError, ValueError):
        return None
