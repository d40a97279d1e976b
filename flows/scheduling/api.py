"""The Prefect API of a campaign: the user's server, that of ``hacrl up``, or a temporary one.

The temporary server is quiet, listens on loopback and ends with the campaign, however that ends. Prefect's own
temporary server outlives a killed parent and prints tracebacks into the terminal. This one watches its parent and
writes to a log file in the home folder. It answers only who knows its password, which is new for every run and is only
in the environment of the campaign's own processes: a web page that finds the port can neither read nor command it.
"""

import asyncio
import gc
import logging
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.home import Home
from flows.run.signals import die_with_parent
from flows.servers.access import answer_only_to, own_origins
from flows.servers.state import BOUNDED, running_prefect_url
from flows.tracking.feed import ServerAway, probe
from hacrl_core.config.addresses import without_userinfo
from hacrl_core.place import module

STARTUP_SECONDS = 180
_NAMES = ("127.0.0.1", "localhost")
# Set when this process's temporary server died and the user was told: its pages need not tell it again.
told_gone = threading.Event()
# The user's server, of which a temporary one must know nothing.
_USERS_SERVER = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_PROFILE")
# What nobody asks of a server without pages that ends with its campaign: automations, and streams for open pages.
_SPARED = {
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_EVENTS_STREAM_OUT_ENABLED": "false",
    "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "false",
}
# How often the temporary server deletes events and flow runs that are past their time.
VACUUM_SECONDS = 3600.0
_CHANGED_VARIABLES = (*_USERS_SERVER, "PREFECT_HOME", "PREFECT_LOGGING_TO_API_ENABLED")


@dataclass
class Server:
    """The API that Prefect's client talks to."""

    url: str
    # Nobody else shares a temporary server.
    temporary: bool = False
    # It ended during the campaign, and the user has been warned.
    died: bool = False

    def answers(self) -> bool:
        """Return whether the server answers now."""
        try:
            probe(f"{self.url}/health")
        except ServerAway:
            return False
        return True


@contextmanager
def prefect_api(home: Home, warn: Callable[[str], None] = lambda message: None) -> Iterator[Server | None]:
    """Give Prefect's client an API to talk to; enter this before prefect is imported.

    It is the user's server or that of ``hacrl up`` where it answers, else a temporary one; None where that fails too.
    """
    quiet_settings()
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
            f"Prefect's server at {without_userinfo(url)} does not answer; the campaign runs with a server of its own "
            "and will not be seen there"
        )
    before = {name: os.environ.get(name) for name in _CHANGED_VARIABLES}
    try:
        with _temporary_server(home, warn) as server_or_none:
            yield server_or_none
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _temporary_server(home: Home, warn: Callable[[str], None]) -> Iterator[Server | None]:
    for name in _USERS_SERVER:
        os.environ.pop(name, None)
    os.environ["PREFECT_HOME"] = str(home.root / "prefect")
    # The server is gone when the campaign is, so nobody could read the logs.
    os.environ["PREFECT_LOGGING_TO_API_ENABLED"] = "false"
    log = home.root / "logs" / "prefect-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    server = Server(f"http://127.0.0.1:{port}/api", temporary=True)
    credentials = f"hacrl:{secrets.token_urlsafe(24)}"
    os.environ["PREFECT_API_AUTH_STRING"] = credentials
    process = start_process(port, log, PREFECT_SERVER_API_AUTH_STRING=credentials)
    ending = threading.Event()
    told_gone.clear()

    def watch() -> None:
        process.wait()
        if not ending.is_set():
            server.died = True
            told_gone.set()
            warn(f"Prefect's server is gone ({log}); the campaign goes on without it, and nothing is lost")
            forget_events()

    try:
        problem = wait_until_it_answers(server.url, process, log)
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
    """Drop Prefect's events for a server that is gone.

    Prefect would try for seconds to send each of them, and wait for all of them at exit.
    """
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
    """Return the API that the user configured: in the environment, in the active profile, or in a prefect.toml here."""
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


def quiet_settings() -> None:
    """Set Prefect's environment before it is imported: no telemetry, few log lines, short timeouts."""
    for name, value in {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        # The display and one-line errors say it better.
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        # A server that dies during a campaign is given up after seconds; the campaign then goes on without it.
        "PREFECT_API_REQUEST_TIMEOUT": "10",
        "PREFECT_CLIENT_MAX_RETRIES": "2",
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger("EventsWorker").setLevel(logging.CRITICAL)


def start_process(port: int, log: Path, **environment: str) -> "subprocess.Popen[bytes]":
    """Start a server in a process that ends with this one, however that ends."""
    quiet = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module("flows.scheduling.api"), str(port), str(os.getpid())],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            # Ctrl-C in the terminal is for the campaign; the server ends after it.
            start_new_session=True,
            env={**BOUNDED, **_SPARED, **os.environ, **quiet, **environment},
        )


def wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the server's first answer; return an empty string, or what went wrong."""
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


def free_port() -> int:
    """Return a port of loopback on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def keep_bounded(*worker: Any, **options: Any) -> AsyncIterator[None]:
    """Delete old events and flow runs now and then, in place of Prefect's worker for background tasks.

    That worker asks its queue some twenty times a second. Of its tasks a temporary server needs these two only: the
    others serve deployments, automations and what a user deletes on the pages.
    """
    task = asyncio.create_task(_delete_what_is_old())
    try:
        yield
    finally:
        task.cancel()


async def _delete_what_is_old() -> None:
    from prefect.server.database import provide_database_interface
    from prefect.server.services.db_vacuum import vacuum_old_events, vacuum_old_flow_runs
    from prefect.settings import get_current_settings

    # BOUNDED names both, unless the user's environment says otherwise.
    wanted = get_current_settings().server.services.db_vacuum.enabled_vacuum_types
    while True:
        try:
            database = provide_database_interface()
            if "flow_runs" in wanted:
                await vacuum_old_flow_runs(db=database)
            if "events" in wanted:
                await vacuum_old_events(db=database)
        except Exception:
            # The database may be busy; there is a next time.
            logging.getLogger(__name__).exception("old events and flow runs were not deleted")
        await asyncio.sleep(VACUUM_SECONDS)


def main() -> None:
    """Run the temporary server; the arguments are its port and the process to end with."""
    port = int(sys.argv[1])
    die_with_parent(int(sys.argv[2]))
    # Read when prefect is imported.
    os.environ["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] = own_origins(_NAMES, port)
    import uvicorn
    from prefect.server.api import server

    prefects: Any = server
    prefects.background_worker = keep_bounded
    app = answer_only_to(_NAMES, server.create_app())
    # The garbage collector need not look through Prefect's modules again and again.
    gc.freeze()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main()
