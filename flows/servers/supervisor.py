"""Keeps the servers running: starts them, restarts what dies, ends them all when it is told to.

A process of its own, of a dozen megabytes: it imports nothing but the standard library. When it is killed itself, the kernel tells its
children to end.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flows.home import Home
from flows.servers.health import answers
from flows.servers.postgres import POSTGRES, without_password
from flows.servers.processes import TOKEN, Process, carrying, end
from flows.servers.settings import Wanted, command, environment
from flows.servers.state import NAMES, Server, State, log_file, write_state

LONGEST_PAUSE = 60.0
CALM_SECONDS = 60.0  # a server that lived so long is restarted at once
LARGEST_LOG = 10 * 2**20
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass
class Child:
    name: str
    popen: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    failures: int = 0  # in a row
    restarts: int = 0
    next_start: float = field(default_factory=time.monotonic)


class Supervisor:
    def __init__(self, home: Home, wanted: Wanted, token: str) -> None:
        database = os.environ.get(POSTGRES)
        self.home, self.wanted = home, wanted
        self.state = State(
            token,
            Process.of(os.getpid()),
            wanted.host,
            wanted.prefect_port,
            wanted.mlflow_port,
            without_password(database) if database else "sqlite",
        )
        self._children = {name: Child(name) for name in NAMES}
        self._ending = False
        self._prefect_answered = False

    def run(self) -> None:
        """Until SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        write_state(self.home, self.state)
        try:
            while not self._ending:
                for child in self._children.values():
                    self._look_after(child)
                time.sleep(0.2)
        finally:
            self._end_all()

    def _stop(self, number: int, frame: object) -> None:
        self._ending = True

    def _look_after(self, child: Child) -> None:
        now = time.monotonic()
        if child.popen is not None:
            code = child.popen.poll()
            if code is None:
                return
            child.failures = 1 if now - child.began > CALM_SECONDS else child.failures + 1
            pause = 0.0 if child.failures == 1 else min(LONGEST_PAUSE, 2.0 ** (child.failures - 2))
            _say(f"{child.name} ended with exit code {code} after {now - child.began:.0f} s; again in {pause:.0f} s")
            child.popen, child.next_start, child.restarts = None, now + pause, child.restarts + 1
        if now < child.next_start or self._ending:
            return
        if child.name == "worker" and not self._prefect_up():
            return
        self._start(child)

    def _prefect_up(self) -> bool:
        """The worker registers with Prefect's server when it starts, so that one comes first."""
        if not self._prefect_answered:
            self._prefect_answered = answers(self.state, "prefect", self.home)
        return self._prefect_answered and self.state.alive("prefect")

    def _start(self, child: Child) -> None:
        log = log_file(self.home, child.name)
        with open_log(log) as output:
            child.popen = subprocess.Popen(
                command(self.wanted, child.name),
                env={**_inherited(), **environment(self.wanted, child.name, self.home)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal is for the supervisor
                preexec_fn=_end_with_supervisor,
            )
        child.began = time.monotonic()
        try:
            server = Server(Process.of(child.popen.pid), child.restarts)
        except ProcessLookupError:
            return  # gone at once; the next look counts it
        self.state = self.state.with_server(child.name, server)
        write_state(self.home, self.state)
        _say(f"{child.name} started as process {child.popen.pid}, log {log}")

    def _end_all(self) -> None:
        """The worker and its campaigns first, while Prefect can still take down how they ended."""
        for name, patience in (("worker", 20.0), ("mlflow", 8.0), ("prefect", 8.0)):
            popen = self._children[name].popen
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
        end(carrying(self.state.token), patience=3)


def _inherited() -> dict[str, str]:
    """Our environment without what points to a Prefect server of the user's, and without the database's password: each server gets
    its own, campaigns need none."""
    elsewhere = {"PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE", "PREFECT_API_AUTH_STRING", POSTGRES}
    return {name: value for name, value in os.environ.items() if name not in elsewhere}


def _end_with_supervisor() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def open_log(path: Path):  # type: ignore[no-untyped-def]
    """For appending; a large one is put aside first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LARGEST_LOG:
        os.replace(path, path.with_suffix(".log.1"))
    return path.open("ab")


def _say(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", flush=True)


def same_code() -> str:
    """Servers and campaigns run the code that this process runs, wherever they are started."""
    return os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))


def start_detached(home: Home, wanted: Wanted, token: str) -> Process:
    """A supervisor that outlives this command."""
    with open_log(log_file(home, "servers")) as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", "flows.servers.supervisor", str(home.root), json.dumps(asdict(wanted))],
            env={**os.environ, TOKEN: token, "PYTHONPATH": same_code()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=home.root,
        )
    return Process.of(popen.pid)


if __name__ == "__main__":
    Supervisor(Home(Path(sys.argv[1])), Wanted(**json.loads(sys.argv[2])), os.environ[TOKEN]).run()
