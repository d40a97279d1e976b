"""The supervisor: starts the servers, restarts those that die, and ends them all when it is told to.

It runs in its own small process and imports little. When it is killed, the kernel tells its children to end.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from flows.home import Home
from flows.servers.access import LOOPBACK
from flows.servers.postgres import POSTGRES, database_url, prefect_environment, without_password
from flows.servers.processes import TOKEN, Process, processes_with_token, terminate
from flows.servers.state import Server, State, answers, client_host, log_file, write_state
from hacrl_core.place import ROOT, module

MAX_PAUSE_SECONDS = 60.0
# A server that ran this long before it ended is restarted at once.
STABLE_SECONDS = 60.0
MAX_LOG_BYTES = 10 * 2**20
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class ServerOptions:
    """The options of ``hacrl up``. The database's address may hold a password, so it travels in the environment."""

    host: str = "127.0.0.1"
    prefect_port: int = 4200
    mlflow_port: int = 5000
    # The name under which other machines reach this one.
    name: str | None = None
    limit: int = 4
    # The port of a Ray head on loopback; None: no Ray.
    ray_port: int | None = None


def default_name(host: str) -> str | None:
    """Return the name by which other machines reach a server that listens on ``host``; None on loopback."""
    if LOOPBACK.match(host):
        return None
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def command(options: ServerOptions, server: str) -> list[str]:
    """Return the command line that starts a server."""
    words = [sys.executable, "-P", "-m", module("flows.servers.serve"), server]
    if server == "worker":
        return [*words, "--limit", str(options.limit)]
    if server == "ray":
        return [*words, "--port", str(options.ray_port)]
    port = options.prefect_port if server == "prefect" else options.mlflow_port
    return [*words, "--host", options.host, "--port", str(port), *(["--name", options.name] if options.name else [])]


def environment(options: ServerOptions, server: str, home: Home) -> dict[str, str]:
    """Return the environment variables that a server of this home gets in addition."""
    database = os.environ.get(POSTGRES)
    added = {"HACRL_HOME": str(home.root), "PREFECT_HOME": str(home.root / "prefect"), "DO_NOT_TRACK": "true"}
    if server == "prefect" and database:
        added |= prefect_environment(database)
    if server == "mlflow":
        added["MLFLOW_BACKEND_STORE_URI"] = database_url(database, "mlflow") if database else home.tracking_uri
        # Clients without the server put files here too, so both ways show the same.
        added["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = (home.root / "mlartifacts").as_uri()
    if server == "worker":
        added["PREFECT_API_URL"] = f"http://{client_host(options.host)}:{options.prefect_port}/api"
        added["PREFECT_LOGGING_LEVEL"] = "INFO"
        # Twenty lines per iteration would say "finished".
        added["PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL"] = "WARNING"
    return added


@dataclass
class Child:
    """A server as its supervisor sees it."""

    name: str
    popen: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    failures_in_a_row: int = 0
    restarts: int = 0
    next_start: float = field(default_factory=time.monotonic)


class Supervisor:
    """Keeps the three servers of a home running until it gets SIGTERM or SIGINT."""

    def __init__(self, home: Home, options: ServerOptions, token: str) -> None:
        database = os.environ.get(POSTGRES)
        self.home = home
        self.options = options
        self.state = State(
            token,
            Process.of(os.getpid()),
            options.host,
            options.prefect_port,
            options.mlflow_port,
            without_password(database) if database else "sqlite",
            ray_port=options.ray_port,
        )
        self._children = {name: Child(name) for name in self.state.names}
        self._ending = False
        self._prefect_answered = False

    def run(self) -> None:
        """Supervise until SIGTERM or SIGINT, then end the servers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        write_state(self.home, self.state)
        try:
            while not self._ending:
                for child in self._children.values():
                    self._check(child)
                time.sleep(0.2)
        finally:
            self._end_all()

    def _stop(self, number: int, frame: object) -> None:
        self._ending = True

    def _check(self, child: Child) -> None:
        now = time.monotonic()
        if child.popen is not None:
            code = child.popen.poll()
            if code is None:
                return
            self._ended(child, code, now)
        if now < child.next_start or self._ending:
            return
        if child.name == "worker" and not self._prefect_up():
            return
        self._start(child)

    def _ended(self, child: Child, code: int, now: float) -> None:
        """Plan the restart of a server that ended: at once the first time, then after ever longer pauses."""
        lived = now - child.began
        child.failures_in_a_row = 1 if lived > STABLE_SECONDS else child.failures_in_a_row + 1
        pause = 0.0
        if child.failures_in_a_row > 1:
            pause = min(MAX_PAUSE_SECONDS, 2.0 ** (child.failures_in_a_row - 2))
        _say(f"{child.name} ended with exit code {code} after {lived:.0f} s; restarting in {pause:.0f} s")
        child.popen = None
        child.next_start = now + pause
        child.restarts += 1

    def _prefect_up(self) -> bool:
        """The worker registers with Prefect's server when it starts, so Prefect comes first."""
        if not self._prefect_answered:
            self._prefect_answered = answers(self.state, "prefect", self.home)
        return self._prefect_answered and self.state.alive("prefect")

    def _start(self, child: Child) -> None:
        log = log_file(self.home, child.name)
        with open_log(log) as output:
            child.popen = subprocess.Popen(
                command(self.options, child.name),
                env={**_inherited(), **environment(self.options, child.name, self.home)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in a terminal is for the supervisor.
                start_new_session=True,
                preexec_fn=_end_with_supervisor,
            )
        child.began = time.monotonic()
        try:
            server = Server(Process.of(child.popen.pid), child.restarts)
        except ProcessLookupError:
            # It ended at once; the next check counts it.
            return
        self.state = self.state.with_server(child.name, server)
        write_state(self.home, self.state)
        _say(f"{child.name} started as process {child.popen.pid}, log {log}")

    def _end_all(self) -> None:
        """End the worker and its campaigns first, while Prefect can still record how they ended."""
        for name, patience in (("worker", 20.0), ("ray", 8.0), ("mlflow", 8.0), ("prefect", 8.0)):
            popen = self._children[name].popen if name in self._children else None
            if popen is None:
                continue
            if popen.poll() is None:
                popen.terminate()
            try:
                popen.wait(timeout=patience)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()
            _say(f"{name} ended")
        terminate(processes_with_token(self.state.token), patience=3)


def _inherited() -> dict[str, str]:
    """Our environment without a Prefect server of the user's and without the database's password.

    Each server gets its own address; campaigns need none.
    """
    elsewhere = {"PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE", "PREFECT_API_AUTH_STRING", POSTGRES}
    return {name: value for name, value in os.environ.items() if name not in elsewhere}


def _end_with_supervisor() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending; rename one that has become too large first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        os.replace(path, path.with_suffix(".log.1"))
    return path.open("ab")


def _say(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", flush=True)


def python_path() -> str:
    """Return a PYTHONPATH with which servers and campaigns run the same code as this process."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def start_detached(home: Home, options: ServerOptions, token: str) -> Process:
    """Start a supervisor that outlives this command."""
    words = [sys.executable, "-P", "-m", module("flows.servers.supervisor")]
    with open_log(log_file(home, "servers")) as output:
        popen = subprocess.Popen(
            [*words, str(home.root), json.dumps(asdict(options))],
            env={**os.environ, TOKEN: token, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=home.root,
        )
    return Process.of(popen.pid)


if __name__ == "__main__":
    Supervisor(Home(Path(sys.argv[1])), ServerOptions(**json.loads(sys.argv[2])), os.environ[TOKEN]).run()
