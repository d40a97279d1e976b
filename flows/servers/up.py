"""``hacrl up``, ``down`` and ``ps``."""

import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from flows.home import Home
from flows.servers.credentials import find_credentials, require_credentials
from flows.servers.health import answers
from flows.servers.postgres import POSTGRES, ensure_databases, without_password
from flows.servers.processes import TOKEN, Process, carrying, end, memory, tree
from flows.servers.settings import Wanted
from flows.servers.state import NAMES, State, log_file, read_state, state_file
from flows.servers.supervisor import Supervisor, same_code, start_detached
from hacrl_core.artifacts.locks import try_exclusive
from hacrl_core.errors import ConfigError, HacrlError

STARTUP_SECONDS = 300.0
TRIES = 3
PATIENT_SECONDS = 120.0  # a process that is younger is starting, an older one that does not answer has a problem
TITLES = {"prefect": "Prefect", "mlflow": "MLflow", "worker": "worker"}


def up(console: Console, home: Home, wanted: Wanted, *, foreground: bool = False) -> None:
    """Start what does not run, and come back when everything answers."""
    running = read_state(home)
    if running is not None and running.supervisor.alive():
        _same_place(running, wanted)
        console.print(f"already running for {_clock(running.supervisor.uptime())}")
        _wait_until_all_answer(console, home, running.token)
    else:
        with _alone(home):
            _clear_away(console, running)
            _ready_to_start(home, wanted, running, console)
            token = uuid.uuid4().hex
            if foreground:
                return _stay(console, home, wanted, token)
            supervisor = start_detached(home, wanted, token)
            _wait_for_state(home, supervisor, token)
            _wait_until_all_answer(console, home, token)
    show(console, home)
    return None


def _stay(console: Console, home: Home, wanted: Wanted, token: str) -> None:
    """The supervisor in this very process."""
    os.environ.update({TOKEN: token, "PYTHONPATH": same_code()})
    console.print(f"Prefect, MLflow and a worker run here until Ctrl-C; their logs are in {log_file(home, 'x').parent}")
    Supervisor(home, wanted, token).run()
    state_file(home).unlink(missing_ok=True)


def down(console: Console, home: Home, *, force: bool = False) -> None:
    """End exactly what ``up`` started in this home."""
    state = read_state(home)
    if state is None:
        console.print(f"nothing runs: no servers were started in {home.root}")
        return
    ours = carrying(state.token)
    campaigns = list(_running_campaigns(home))
    guests = [name for name, pid in campaigns if pid not in {process.pid for process in ours}]
    if guests and not force:
        raise ConfigError(
            f"{guests[0]}: runs in a terminal and uses these servers; wait for it, stop it with Ctrl-C, or hacrl down --force"
        )
    begun = time.monotonic()
    with console.status("ending the servers …"):
        state.supervisor.signal(signal.SIGTERM)
        _wait_for_end(state.supervisor, 45)
        killed = end(carrying(state.token), patience=5)
    state_file(home).unlink(missing_ok=True)
    for name, pid in campaigns:
        if pid in {process.pid for process in ours}:
            console.print(f"{name} was stopped; its next run goes on where it was")
    if not ours:
        console.print("the servers had ended already, without hacrl down")
        return
    hard = f", {len(killed)} of them killed" if killed else ""
    console.print(f"ended {len(ours)} processes{hard} in {time.monotonic() - begun:.1f} s")


def show(console: Console, home: Home) -> bool:
    """A line per server; False where one does not answer."""
    state = read_state(home)
    if state is None:
        console.print(f"no servers in {home.root}; start them with: hacrl up")
        return False
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for title in ("server", "state", "address", "process", "memory", "up for"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("process", "memory", "up for") else "left")
    healthy = state.supervisor.alive()
    for name in NAMES:
        fine = answers(state, name, home)
        healthy &= fine
        table.add_row(*_row(state, name, fine))
    alive = state.supervisor.alive()
    table.add_row(
        "supervisor",
        "[green]running[/green]" if alive else "[red]dead[/red]; hacrl up starts again",
        f"state in {state.database}",
        str(state.supervisor.pid) if alive else "",
        _megabytes([state.supervisor.pid]) if alive else "",
        _clock(state.supervisor.uptime()) if alive else "",
    )
    console.print(table)
    return healthy


def _row(state: State, name: str, fine: bool) -> list[str]:
    server = state.servers.get(name)
    address = {"prefect": state.prefect_url, "mlflow": state.mlflow_url}.get(name, "work pool hacrl")
    if server is None or not server.process.alive():
        return [TITLES[name], "[red]not running[/red]", address, "", "", ""]
    pid = server.process.pid
    up_for = server.process.uptime()
    waiting = "[yellow]starting[/yellow]" if up_for < PATIENT_SECONDS else "[red]does not answer[/red]"
    word = "[green]answers[/green]" if fine else waiting
    word += f", restarted {server.restarts}×" if server.restarts else ""
    return [TITLES[name], word, address, str(pid), _megabytes(tree(pid)), _clock(up_for)]


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    lock = try_exclusive(home.root / "servers.lock")
    if lock is None:
        raise ConfigError(f"{home.root}: another hacrl up is at it; hacrl ps shows how far it is")
    try:
        yield
    finally:
        os.close(lock)


def _same_place(running: State, wanted: Wanted) -> None:
    asked = (wanted.host, wanted.prefect_port, wanted.mlflow_port)
    plain = Wanted()
    if asked not in (
        (running.host, running.prefect_port, running.mlflow_port),
        (plain.host, plain.prefect_port, plain.mlflow_port),
    ):
        raise ConfigError(
            f"servers run already at {running.prefect_url} and {running.mlflow_url}; hacrl down first to move them"
        )
    database = os.environ.get(POSTGRES)
    if database and without_password(database) != running.database:
        raise ConfigError(f"servers run already on {running.database}; hacrl down first to change the database")


def _clear_away(console: Console, last: State | None) -> None:
    """What a killed supervisor may have left."""
    if last is None:
        return
    left = carrying(last.token)
    console.print("the servers of last time are gone without hacrl down; starting them again")
    end(left, patience=10)


def _ready_to_start(home: Home, wanted: Wanted, last: State | None, console: Console) -> None:
    require_credentials(wanted.host, find_credentials(home))
    for server, port in (("prefect", wanted.prefect_port), ("mlflow", wanted.mlflow_port)):
        with socket.socket(socket.AF_INET6 if ":" in wanted.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((wanted.host, port))
            except OSError as problem:
                raise ConfigError(
                    f"port {port} on {wanted.host}: {problem.strerror}; free it, or choose another with --{server}-port"
                ) from None
    if database := os.environ.get(POSTGRES):
        ensure_databases(database)
    elif last is not None and last.database != "sqlite":
        console.print(
            f"last time the servers kept their state in {last.database}, now in sqlite; give --postgres to go on there"
        )


def _wait_for_state(home: Home, supervisor: Process, token: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = read_state(home)
        if state is not None and state.token == token:
            return
        if not supervisor.alive():
            break
        time.sleep(0.05)
    raise HacrlError(f"the supervisor did not start; see {log_file(home, 'servers')}")


def _wait_until_all_answer(console: Console, home: Home, token: str) -> None:
    begun, waiting = time.monotonic(), list(NAMES)
    with console.status("") as status:
        while waiting:
            status.update(
                f"waiting for {', '.join(TITLES[name] for name in waiting)} … {time.monotonic() - begun:.0f} s"
            )
            state = read_state(home)
            if state is None or state.token != token or not state.supervisor.alive():
                raise HacrlError(f"the supervisor ended; see {log_file(home, 'servers')}")
            for name in list(waiting):
                server = state.servers.get(name)
                if answers(state, name, home):
                    waiting.remove(name)
                    console.print(f"{TITLES[name]} answers after {time.monotonic() - begun:.1f} s")
                elif server is not None and server.restarts >= TRIES:
                    _give_up(
                        home,
                        state,
                        f"{TITLES[name]} ended {server.restarts} times while starting: {_last_words(home, name)}",
                    )
            if time.monotonic() - begun > STARTUP_SECONDS:
                _give_up(
                    home,
                    state,
                    f"{TITLES[waiting[0]]} did not answer within {STARTUP_SECONDS:.0f} s: {_last_words(home, waiting[0])}",
                )
            time.sleep(0.1)


def _give_up(home: Home, state: State, reason: str) -> None:
    state.supervisor.signal(signal.SIGTERM)
    _wait_for_end(state.supervisor, 45)
    end(carrying(state.token), patience=5)
    state_file(home).unlink(missing_ok=True)
    raise HacrlError(reason)


def _last_words(home: Home, name: str) -> str:
    path = log_file(home, name)
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return f"{lines[-1][:300] if lines else 'nothing logged'} (see {path})"


def _running_campaigns(home: Home) -> Iterator[tuple[str, int]]:
    from flows.record.record import is_running
    from flows.store.survey import campaign_places, running_sweeps
    from hacrl_core.artifacts.locks import holder

    cells = filter(is_running, campaign_places(home))
    sweeps = [(f"sweep {folder.name}", folder) for folder in running_sweeps(home)]
    for name, folder in [*sweeps, *((f"campaign {f.relative_to(home.campaigns).as_posix()}", f) for f in cells)]:
        number = holder(folder / "running.lock").rpartition(" ")[2]
        yield name, int(number) if number.isdigit() else 0


def _wait_for_end(process: Process, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.alive() and time.monotonic() < deadline:
        time.sleep(0.05)


def _megabytes(pids: list[int]) -> str:
    return f"{memory(pids) / 2**20:.0f} MB"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    return (
        f"{days} d {hours} h"
        if days
        else f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {whole % 60} s"
        if minutes
        else f"{whole} s"
    )
