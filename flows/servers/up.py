"""The commands ``hacrl up``, ``hacrl down`` and ``hacrl ps``."""

import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.table import Table

from flows.home import Home
from flows.record.record import campaign_folders, is_running
from flows.servers.access import find_credentials, require_credentials
from flows.servers.postgres import POSTGRES, ensure_databases, without_password
from flows.servers.processes import (
    TOKEN,
    Process,
    memory,
    process_tree,
    processes_with_token,
    terminate,
    wait_for_exit,
)
from flows.servers.state import NAMES, State, answers, log_file, read_state, state_file
from flows.servers.supervisor import ServerOptions, Supervisor, python_path, start_detached
from flows.store.survey import recorded_campaigns, running_sweeps
from flows.tracking.links import NAME as PLACE
from flows.tracking.links import page_of
from flows.views.text import duration, waiting
from hacrl_core.artifacts.locks import holder, try_exclusive
from hacrl_core.errors import ConfigError, HacrlError

STARTUP_SECONDS = 300.0
MAX_RESTARTS = 3
# A younger process is still starting; an older one that does not answer has a problem.
PATIENCE_SECONDS = 120.0
SUPERVISOR_SECONDS = 45.0
TITLES = {"prefect": "Prefect", "mlflow": "MLflow", "worker": "worker", "ray": "Ray"}


def up(console: Console, home: Home, options: ServerOptions, *, foreground: bool = False) -> None:
    """Start the servers that do not run, and return when all of them answer."""
    running = read_state(home)
    if running is not None and running.supervisor.alive():
        _check_same_place(running, options)
        console.print(f"already running for {duration(running.supervisor.uptime())}")
        _wait_until_all_answer(console, home, running.token)
    else:
        with _start_lock(home):
            _end_remains(console, running)
            _prepare(home, options, running, console)
            token = uuid.uuid4().hex
            if foreground:
                _supervise_here(console, home, options, token)
                return
            supervisor = start_detached(home, options, token)
            _wait_for_state(home, supervisor, token)
            _wait_until_all_answer(console, home, token)
    show(console, home)


def _supervise_here(console: Console, home: Home, options: ServerOptions, token: str) -> None:
    """Run the supervisor in this process until Ctrl-C or SIGTERM."""
    os.environ.update({TOKEN: token, "PYTHONPATH": python_path()})
    console.print(f"Prefect, MLflow and a worker run here until Ctrl-C; their logs are in {log_file(home, 'x').parent}")
    Supervisor(home, options, token).run()
    state_file(home).unlink(missing_ok=True)


def down(console: Console, home: Home, *, force: bool = False) -> None:
    """End exactly what ``hacrl up`` started in this home."""
    state = read_state(home)
    if state is None:
        console.print(f"nothing runs: no servers were started in {home.root}")
        return
    ours = processes_with_token(state.token)
    own_pids = {process.pid for process in ours}
    campaigns = list(_running_campaigns(home))
    in_terminals = [name for name, pid in campaigns if pid not in own_pids]
    if in_terminals and not force:
        raise ConfigError(
            f"{in_terminals[0]}: runs in a terminal and uses these servers; wait for it, stop it with Ctrl-C, or use "
            "hacrl down --force"
        )
    begun = time.monotonic()
    with waiting(console, "ending the servers …"):
        killed = _end_everything(home, state)
    for name, pid in campaigns:
        if pid in own_pids:
            console.print(f"{name} was stopped; its next run goes on where it was")
    if not ours:
        console.print("the servers had already ended without hacrl down")
        return
    hard = f", {len(killed)} of them killed" if killed else ""
    console.print(f"ended {len(ours)} processes{hard} in {time.monotonic() - begun:.1f} s")


def show(console: Console, home: Home) -> bool:
    """Print a line per server; return False where one of them does not answer."""
    state = read_state(home)
    if state is None:
        console.print(f"no servers in {home.root}; start them with: hacrl up")
        return False
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for title in ("server", "state", "address", "process", "memory", "up for"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("process", "memory", "up for") else "left")
    alive = state.supervisor.alive()
    healthy = alive
    for name in state.names:
        fine = answers(state, name, home)
        healthy &= fine
        table.add_row(*_row(state, name, fine))
    table.add_row(
        "supervisor",
        "[green]running[/green]" if alive else "[red]dead[/red]; hacrl up starts again",
        f"state in {state.database}",
        str(state.supervisor.pid) if alive else "",
        _megabytes([state.supervisor.pid]) if alive else "",
        duration(state.supervisor.uptime()) if alive else "",
    )
    console.print(table)
    newest = next(iter(campaign_folders(home)), None)
    if newest is not None and (newest / PLACE).exists():
        page = page_of(newest, state.mlflow_url)
        console.print(f"campaign {newest.name} in MLflow: {page}", soft_wrap=True, highlight=False)
    return healthy


def _row(state: State, name: str, fine: bool) -> list[str]:
    server = state.servers.get(name)
    addresses = {"prefect": state.prefect_url, "mlflow": state.mlflow_url, "ray": f"127.0.0.1:{state.ray_port}"}
    address = addresses.get(name, "work pool hacrl")
    if server is None or not server.process.alive():
        return [TITLES[name], "[red]not running[/red]", address, "", "", ""]
    pid = server.process.pid
    uptime = server.process.uptime()
    if fine:
        word = "[green]answers[/green]"
    elif uptime < PATIENCE_SECONDS:
        word = "[yellow]starting[/yellow]"
    else:
        word = "[red]does not answer[/red]"
    word += f", restarted {server.restarts}×" if server.restarts else ""
    return [TITLES[name], word, address, str(pid), _megabytes(process_tree(pid)), duration(uptime)]


@contextmanager
def _start_lock(home: Home) -> Iterator[None]:
    lock = try_exclusive(home.root / "servers.lock")
    if lock is None:
        raise ConfigError(
            f"{home.root}: another hacrl up is already starting the servers; hacrl ps shows how far it has got"
        )
    try:
        yield
    finally:
        os.close(lock)


def _check_same_place(running: State, options: ServerOptions) -> None:
    """Refuse other addresses or another database than those of the servers that run."""
    asked = (options.host, options.prefect_port, options.mlflow_port)
    default = ServerOptions()
    if asked not in (
        (running.host, running.prefect_port, running.mlflow_port),
        (default.host, default.prefect_port, default.mlflow_port),
    ):
        raise ConfigError(
            f"servers already run at {running.prefect_url} and {running.mlflow_url}; hacrl down first to move them"
        )
    if options.ray_port is not None and running.ray_port is None:
        raise ConfigError("servers already run without Ray; hacrl down first, then hacrl up --ray")
    database = os.environ.get(POSTGRES)
    if database and without_password(database) != running.database:
        raise ConfigError(f"servers already run on {running.database}; hacrl down first to change the database")


def _end_remains(console: Console, last: State | None) -> None:
    """End what a killed supervisor may have left."""
    if last is None:
        return
    console.print("the last servers are gone without hacrl down; starting them again")
    terminate(processes_with_token(last.token), patience=10)


def _prepare(home: Home, options: ServerOptions, last: State | None, console: Console) -> None:
    """Check credentials, ports and the database before anything starts."""
    require_credentials(options.host, find_credentials(home))
    ports: list[tuple[str, int]] = [("prefect", options.prefect_port), ("mlflow", options.mlflow_port)]
    if options.ray_port is not None:
        if find_spec("ray") is None:
            raise ConfigError("hacrl up --ray: Ray is not installed; pip install 'hacrl[ray]'")
        ports.append(("ray", options.ray_port))
    for server, port in ports:
        with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((options.host, port))
            except OSError as problem:
                raise ConfigError(
                    f"port {port} on {options.host}: {problem.strerror}; free it, or choose another with "
                    f"--{server}-port"
                ) from None
    if database := os.environ.get(POSTGRES):
        ensure_databases(database)
    elif last is not None and last.database != "sqlite":
        console.print(
            f"last time the servers kept their state in {last.database}, now in sqlite; give --postgres to continue "
            "there"
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
    begun = time.monotonic()
    started = read_state(home)
    missing = list(started.names if started is not None else NAMES)
    with waiting(console, "") as say:
        while missing:
            waited = time.monotonic() - begun
            say(f"waiting for {', '.join(TITLES[name] for name in missing)} … {waited:.0f} s")
            state = read_state(home)
            if state is None or state.token != token or not state.supervisor.alive():
                raise HacrlError(f"the supervisor ended; see {log_file(home, 'servers')}")
            for name in list(missing):
                server = state.servers.get(name)
                if answers(state, name, home):
                    missing.remove(name)
                    console.print(f"{TITLES[name]} answers after {time.monotonic() - begun:.1f} s")
                elif server is not None and server.restarts >= MAX_RESTARTS:
                    problem = f"{TITLES[name]} ended {server.restarts} times while starting"
                    _give_up(home, state, f"{problem}: {_last_log_line(home, name)}")
            if missing and waited > STARTUP_SECONDS:
                problem = f"{TITLES[missing[0]]} did not answer within {STARTUP_SECONDS:.0f} s"
                _give_up(home, state, f"{problem}: {_last_log_line(home, missing[0])}")
            time.sleep(0.1)


def _give_up(home: Home, state: State, reason: str) -> None:
    _end_everything(home, state)
    raise HacrlError(reason)


def _end_everything(home: Home, state: State) -> list[Process]:
    """End the supervisor and what it leaves; return the processes that had to be killed."""
    state.supervisor.signal(signal.SIGTERM)
    wait_for_exit([state.supervisor], SUPERVISOR_SECONDS)
    killed = terminate(processes_with_token(state.token), patience=5)
    state_file(home).unlink(missing_ok=True)
    return killed


def _last_log_line(home: Home, name: str) -> str:
    path = log_file(home, name)
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return f"{lines[-1][:300] if lines else 'nothing logged'} (see {path})"


def _running_campaigns(home: Home) -> Iterator[tuple[str, int]]:
    """Name and process id of every campaign and sweep that runs in this home."""
    places = [(f"sweep {folder.name}", folder) for folder in running_sweeps(home)]
    campaigns = filter(is_running, recorded_campaigns(home))
    places += [(f"campaign {folder.relative_to(home.campaigns).as_posix()}", folder) for folder in campaigns]
    for name, folder in places:
        number = holder(folder / "running.lock").rpartition(" ")[2]
        yield name, int(number) if number.isdigit() else 0


def _megabytes(pids: list[int]) -> str:
    return f"{memory(pids) / 2**20:.0f} MB"
