"""A Prefect server for one campaign, where the user has none: quiet, on loopback, and gone when the campaign is, however it ends.

Prefect's own temporary server outlives a killed parent and prints tracebacks into the terminal; this one watches its parent and
writes to a log file in the home folder.
"""

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.home import Home
from flows.run.signals import die_with_parent
from flows.servers.state import running_prefect_url
from flows.tracking.feed import ServerAway, probe

STARTUP_SECONDS = 180


@dataclass
class Server:
    """The API that Prefect talks to."""

    url: str
    died: bool = False  # and the user was told

    def answers(self) -> bool:
        try:
            probe(f"{self.url}/health")
        except ServerAway:
            return False
        return True


@contextmanager
def prefect_api(home: Home, warn: Callable[[str], None] = lambda message: None) -> Iterator[Server | None]:
    """Inside, Prefect has an API to talk to: the user's or that of ``hacrl up`` where it answers, else a temporary one; None where not even
    that can be had. Call it before prefect is imported."""
    _quiet_settings()
    url = configured_url()
    if url is None and (running := running_prefect_url(home)):
        os.environ.setdefault("PREFECT_HOME", str(home.root / "prefect"))
        os.environ["PREFECT_API_URL"] = url = running
    if url is not None:
        server = Server(url)
        if server.answers():
            yield server
            return
        warn(
            f"Prefect's server at {url} does not answer; the campaign runs with a server of its own and will not be seen there"
        )
    before = {name: os.environ.get(name) for name in _OURS}
    try:
        with _own_server(home, warn) as own:
            yield own
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_OURS = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_HOME", "PREFECT_PROFILE", "PREFECT_LOGGING_TO_API_ENABLED", "HACRL_PREFECT")  # fmt: skip


@contextmanager
def _own_server(home: Home, warn: Callable[[str], None]) -> Iterator[Server | None]:
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_PROFILE"):
        os.environ.pop(name, None)  # of the user's server; ours wants none of it
    os.environ["PREFECT_HOME"] = str(home.root / "prefect")
    os.environ["HACRL_PREFECT"] = "temporary"
    # Our server is gone when the campaign is; nobody could read them.
    os.environ["PREFECT_LOGGING_TO_API_ENABLED"] = "false"
    log = home.root / "logs" / "prefect-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    server = Server(f"http://127.0.0.1:{port}/api")
    process = start_process(port, log)
    ending = threading.Event()

    def watch() -> None:
        process.wait()
        if not ending.is_set():
            server.died = True
            warn(f"Prefect's server is gone ({log}); the campaign goes on without it, and nothing is lost")
            forget_events()

    try:
        problem = _wait_until_it_answers(server.url, process, log)
        if problem:
            warn(f"{problem}; the campaign runs without Prefect, and nothing else changes")
            yield None
        else:
            threading.Thread(target=watch, name="prefect server", daemon=True).start()
            os.environ["PREFECT_API_URL"] = server.url
            yield server
    finally:
        ending.set()
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def forget_events() -> None:
    """No more news for a server that is gone: Prefect would try for seconds with each of them, and wait for all of them at exit."""
    if "prefect" not in sys.modules:
        return
    from prefect._internal.concurrency.services import _active_services
    from prefect.events.clients import NullEventsClient
    from prefect.events.worker import EventsWorker

    EventsWorker.set_client_override(NullEventsClient)
    for service in list(_active_services):
        with suppress(queue.Empty):
            while True:
                service._queue.get_nowait()


def configured_url() -> str | None:
    """The API the user has set: in the environment, in the active profile, or in a prefect.toml here. A profile without one means none."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    place = os.environ.get("PREFECT_PROFILES_PATH")
    folder = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    profiles = _toml(Path(place) if place else folder / "profiles.toml")
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active")
    found = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    found = found or _toml(Path("prefect.toml")).get("api", {}).get("url")
    return str(found).rstrip("/") if found else None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return {}


def _quiet_settings() -> None:
    for name, value in {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",  # the display and one-line errors say it better
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        # A server that dies in mid-campaign is given up after seconds; the campaign then goes on without it.
        "PREFECT_API_REQUEST_TIMEOUT": "10",
        "PREFECT_CLIENT_MAX_RETRIES": "2",
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger("EventsWorker").setLevel(logging.CRITICAL)


def start_process(port: int, log: Path, **environment: str) -> "subprocess.Popen[bytes]":
    """The server in a process that ends with this one, however that ends."""
    quiet = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.scheduling.api", str(port), str(os.getpid())],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for us; the server ends after us
            env={**os.environ, **quiet, **environment},
        )


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """Empty when it does; else what went wrong."""
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return ""
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    if process.poll() is None:
        return f"Prefect's server did not answer within {STARTUP_SECONDS} s, see {log}"
    return f"Prefect's server ended with exit code {process.returncode}, see {log}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    import uvicorn

    port, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    uvicorn.run("prefect.server.api.server:create_app", factory=True, host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main()
