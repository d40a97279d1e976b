"""A Prefect server for one campaign, where the user has none: quiet, on loopback, and gone when the campaign is, however it ends.

Prefect's own temporary server outlives a killed parent and prints tracebacks into the terminal; this one watches its parent and
writes to a log file in the home folder.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.home import Home
from flows.servers.state import prefect_of
from flows.workers import die_with_parent
from hacrl_core.errors import HacrlError

STARTUP_SECONDS = 180


@contextmanager
def prefect_api(home: Home) -> Iterator[None]:
    """Inside, Prefect has an API to talk to: the user's, that of ``hacrl up``, or a temporary one. Call it before prefect is imported."""
    _quiet_settings()
    if not {"PREFECT_API_URL", "PREFECT_PROFILE"} & os.environ.keys() and (running := prefect_of(home)):
        os.environ.setdefault("PREFECT_HOME", str(home.root / "prefect"))
        os.environ["PREFECT_API_URL"] = running
    if {"PREFECT_API_URL", "PREFECT_PROFILE"} & os.environ.keys() or (
        Path.home() / ".prefect" / "profiles.toml"
    ).exists():
        yield
        return
    os.environ.setdefault("PREFECT_HOME", str(home.root / "prefect"))
    os.environ["HACRL_PREFECT"] = "temporary"
    os.environ["PREFECT_LOGGING_TO_API_ENABLED"] = (
        "false"  # our server is gone when the campaign is; nobody could read them
    )
    log = home.root / "logs" / "prefect-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    with log.open("ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "flows.prefect_server", str(port), str(os.getpid())],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for us; the server ends after us
            env={
                **os.environ,
                "PREFECT_UI_ENABLED": "0",
                "PREFECT__SERVER_EPHEMERAL": "1",
                "PREFECT__SERVER_FINAL": "1",
            },
        )
    try:
        url = f"http://127.0.0.1:{port}/api"
        _wait_until_it_answers(url, server, log)
        os.environ["PREFECT_API_URL"] = url
        yield
    finally:
        os.environ.pop("PREFECT_API_URL", None)
        server.terminate()
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _quiet_settings() -> None:
    for name, value in {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",  # the display and one-line errors say it better
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def _wait_until_it_answers(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    state = "did not answer" if server.poll() is None else f"ended with exit code {server.returncode}"
    raise HacrlError(f"Prefect's server {state} within {STARTUP_SECONDS} s; see {log}")


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
