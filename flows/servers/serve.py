"""The servers' processes: ``python -m flows.servers.serve prefect|mlflow|worker|ray``, here and in containers.

What they keep and where comes from the environment (Prefect's and MLflow's own variables), so no command line holds a
password. A host that other machines can reach is refused without credentials.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.home import Home
from flows.run.signals import wake_main_thread
from flows.servers.access import (
    BasicAuth,
    answer_only_to,
    client_environment,
    find_credentials,
    own_origins,
    require_credentials,
)
from flows.servers.processes import child_processes, wait_for_exit
from flows.servers.state import BOUNDED, POOL, client_host
from hacrl_core.errors import HacrlError
from hacrl_core.place import module

# The supervisor waits 20 seconds for the worker.
STOP_SECONDS = 12.0
# Nothing is kept in Ray's object store; this is the least that it accepts without a warning.
RAY_STORE_BYTES = 80 << 20
LEASE_STORAGE = "prefect.server.concurrency.lease_storage.filesystem"
# With its own command a campaign is one process below the worker. Prefect's default adds a process in between that
# loads code from storage; ours is installed.
COMMAND = "python -m prefect.engine"


def main() -> None:
    """Run the server that the command line names."""
    options = _parser().parse_args()
    try:
        servers = {"prefect": serve_prefect, "mlflow": serve_mlflow, "worker": serve_worker, "ray": serve_ray}
        servers[options.server](options)
    except HacrlError as problem:
        sys.exit(f"error: {problem}")


# -- Prefect -----------------------------------------------------------------------------------------------------------


def serve_prefect(options: argparse.Namespace) -> None:
    """Run Prefect's server in this process."""
    credentials = find_credentials(Home.find())
    require_credentials(options.host, credentials)
    names = _names(options)
    for name, value in prefect_settings(options.port, names, credentials).items():
        os.environ.setdefault(name, value)
    import uvicorn
    from prefect.server.api.server import create_app

    _let_runs_of_removed_deployments_end()
    _name_upcoming_runs()
    guarded = answer_only_to(names, create_app())
    uvicorn.run(guarded, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=3)


def _let_runs_of_removed_deployments_end() -> None:
    """Work around a bug of Prefect 3.8.8.

    A deployment that is removed while it runs takes its concurrency limit along. Prefect then fails to release the
    run's slot, answers every change of its state with an error, and the run stays *Running* for ever.
    """
    from prefect.server.orchestration import core_policy

    module: Any = core_policy
    release = module._release_concurrency_lease

    async def release_if_limit_exists(session: Any, lease_id: Any, *more: Any, **named: Any) -> None:
        try:
            await release(session, lease_id, *more, **named)
        except RuntimeError:
            # The limit no longer exists.
            await module.get_concurrency_lease_storage().revoke_lease(lease_id=lease_id)

    module._release_concurrency_lease = release_if_limit_exists


def _name_upcoming_runs() -> None:
    """Give the runs that Prefect's scheduler plans the names that they have when they start.

    Prefect has no setting for it: until a run starts, its page has a random name.
    """
    from prefect.server.models import deployments

    module: Any = deployments
    generate = module._generate_scheduled_flow_runs

    async def generate_with_names(*positional: Any, **named: Any) -> Any:
        runs = await generate(*positional, **named)
        for run in runs:
            with contextlib.suppress(KeyError, TypeError, AttributeError):
                run["name"] = run_name(run["parameters"], run["expected_start_time"])
        return runs

    module._generate_scheduled_flow_runs = generate_with_names


def run_name(given: Mapping[str, Any], at: datetime) -> str:
    """Return the name of a deployed campaign's run: ``nightly +5 (2026-11-16 02:00)``, in UTC.

    Prefect plans a run in its schedule's time zone and starts it in UTC.
    """
    more = f"+{given['more_iterations']}" if given.get("more_iterations") else f"to {given['config']['iterations']}"
    return f"{given['config']['name']} {more} ({at.astimezone(UTC):%Y-%m-%d %H:%M})"


def prefect_settings(port: int, names: list[str], credentials: str | None) -> dict[str, str]:
    """Return Prefect's settings: no telemetry, no foreign origins, and expired slots freed within seconds."""
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    return {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_UI_API_URL": f"http://{names[0]}:{port}/api",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": own_origins(names, port),
        # A restart would forget leases in memory, which is the default, and their slots would stay taken for ever.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASE_STORAGE,
        "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "5",
        **BOUNDED,
        **({"PREFECT_SERVER_API_AUTH_STRING": credentials} if credentials else {}),
        # Services inside the server call its API.
        **client_environment(credentials),
    }


# -- MLflow ------------------------------------------------------------------------------------------------------------


def serve_mlflow(options: argparse.Namespace) -> None:
    """Run MLflow's server in this process.

    MLflow's own command starts a second process to serve; this way needs half the memory and start-up time.
    """
    credentials = find_credentials(Home.find())
    require_credentials(options.host, credentials)
    # Imports pyarrow, which Prefect and the worker do without.
    from flows.tracking.projection import ensure_database, quiet_environment

    quiet_environment()
    # A host with a port is a pattern, in which the bracket of an IPv6 address must itself be bracketed.
    hosts = [host for name in _names(options) for host in (name, name.replace("[", "[[]") + ":*")]
    hosts_are_ours = "MLFLOW_SERVER_ALLOWED_HOSTS" not in os.environ
    os.environ.setdefault("MLFLOW_SERVER_ALLOWED_HOSTS", ",".join(hosts))
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    store = os.environ["MLFLOW_BACKEND_STORE_URI"]
    files = os.environ.get("MLFLOW_DEFAULT_ARTIFACT_ROOT", "mlflow-artifacts:/")
    os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = store
    os.environ[constants.REGISTRY_STORE_URI_ENV_VAR] = store
    os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = files
    if destination := os.environ.get("MLFLOW_ARTIFACTS_DESTINATION"):
        os.environ[constants.SERVE_ARTIFACTS_ENV_VAR] = "true"
        os.environ[constants.ARTIFACTS_DESTINATION_ENV_VAR] = destination
    os.environ["_MLFLOW_SGI_NAME"] = "uvicorn"
    if store == Home.find().tracking_uri:
        ensure_database(Home.find())
    # Creates or migrates the tables.
    initialize_backend_stores(store, store, files)
    import uvicorn
    from mlflow.server.fastapi_app import app

    guarded: Any = app if credentials is None else BasicAuth(app, credentials, open_paths=("/health",))
    if hosts_are_ours:
        # As MLflow answers for other names.
        guarded = answer_only_to(_names(options), guarded, ("/health", "/version"), status=403)
    uvicorn.run(guarded, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=3)


# -- the worker --------------------------------------------------------------------------------------------------------


def serve_worker(options: argparse.Namespace) -> None:
    """Run the worker that starts scheduled campaigns."""
    for name, value in client_environment(find_credentials(Home.find())).items():
        os.environ.setdefault(name, value)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    from prefect.workers.process import ProcessWorker

    ensure_pool(POOL)
    end_lost_runs(POOL, options.name)
    worker = ProcessWorker(POOL, name=options.name, limit=options.limit, heartbeat_interval_seconds=10)
    try:
        asyncio.run(run_until_signal(worker.start()))
    except (asyncio.CancelledError, KeyboardInterrupt):  # the latter before anything was started
        print("the worker stopped")


def ensure_pool(name: str) -> None:
    """Create the work pool through which scheduled campaigns run, unless Prefect has it."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template: dict[str, Any] = ProcessWorker.get_default_base_job_template()
    template["variables"]["properties"]["command"]["default"] = COMMAND
    with get_client(sync_client=True) as client, contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))


def end_lost_runs(pool: str, worker: str) -> int:
    """Mark the runs that this worker's predecessor left behind as crashed, and return how many there were.

    Prefect would show them as running for ever. Where another worker serves the same pool, the runs may be its own, and
    nothing is touched.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType, WorkerStatus
    from prefect.client.schemas.sorting import FlowRunSort
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.states import Crashed

    states = filters.FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING])
    with get_client(sync_client=True) as client:
        others = client.read_workers_for_work_pool(pool, limit=200, offset=0)
        if any(other.name != worker and other.status == WorkerStatus.ONLINE for other in others):
            return 0
        lost = client.read_flow_runs(
            flow_run_filter=filters.FlowRunFilter(state=filters.FlowRunFilterState(type=states)),
            work_pool_filter=filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[pool])),
            # The API refuses a request without an order.
            sort=FlowRunSort.START_TIME_ASC,
            limit=200,
        )
        for run in lost:
            message = "the worker ended while this ran; the next run continues where it stopped"
            try:
                client.set_flow_run_state(run.id, Crashed(message=message), force=True)
            except PrefectHTTPStatusError as problem:
                # A run that cannot be ended must not keep the worker from its work.
                print(f"run {run.name} cannot be marked as crashed: {str(problem).splitlines()[0]}", flush=True)
    return len(lost)


async def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``; on SIGTERM or SIGINT ask the campaigns to end, then cancel it. A second signal kills us.

    Campaigns can resume, so they are asked to end and get the time to report it to their log, MLflow and Prefect.
    Prefect's own handlers do not serve: they turn SIGTERM into SIGINT. A process that a shell script started in the
    background ignores SIGINT, so such a worker could not be ended. Nothing is raised in the handler: the exception
    would come out wherever the loop is, where Prefect reports it as a failure of its own, or compiled code ignores it.
    """
    loop, task, stopping = asyncio.get_running_loop(), asyncio.current_task(), False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopping
        if stopping:
            os.kill(os.getpid(), signal.SIGKILL)
        stopping = True
        loop.call_soon_threadsafe(end)

    def end() -> None:
        campaigns = child_processes()
        for campaign in campaigns:
            campaign.signal(signal.SIGTERM)
        # The loop waits, too: nothing is started meanwhile, and what ends is not reported as crashed.
        wait_for_exit(campaigns, STOP_SECONDS)
        if task is not None:
            task.cancel()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        if number == signal.SIGTERM or handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        with wake_main_thread():
            await work
    finally:
        if not stopping:  # it ended by itself: the loop is closed next
            for number, handler in before.items():
                signal.signal(number, handler)


# -- Ray ---------------------------------------------------------------------------------------------------------------


def serve_ray(options: argparse.Namespace) -> None:
    """Become the head of a Ray cluster, which listens on loopback only: whoever reaches it may run code."""
    ray = Path(sys.executable).parent / "ray"
    if not ray.exists():
        raise HacrlError("Ray is not installed; pip install 'hacrl[ray]'")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    words = [str(ray), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={options.port}"]
    os.execv(words[0], [*words, "--include-dashboard=false", f"--object-store-memory={RAY_STORE_BYTES}"])


# -- the command line --------------------------------------------------------------------------------------------------


def _names(options: argparse.Namespace) -> list[str]:
    """The names by which a browser or client may address this server; the first is the one that it announces."""
    # Our own health checks go here.
    own = [client_host(options.host)]
    names = [f"[{name}]" if ":" in name and name[0] != "[" else name for name in options.name or []]
    local = ["127.0.0.1", "localhost"]
    return list(dict.fromkeys([*names, *own, *local]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module('flows.servers.serve')}", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    servers = parser.add_subparsers(dest="server", required=True)
    for name, port in (("prefect", 4200), ("mlflow", 5000)):
        server = servers.add_parser(name)
        server.add_argument("--host", default="127.0.0.1")
        server.add_argument("--port", type=int, default=port)
        server.add_argument(
            "--name", action="append", help="A name by which clients reach it, besides localhost; repeatable."
        )
    worker = servers.add_parser("worker")
    worker.add_argument("--name", default=f"hacrl {socket.gethostname()}")
    worker.add_argument("--limit", type=int, default=4, help="How many campaigns may run at a time.")
    ray = servers.add_parser("ray")
    ray.add_argument("--port", type=int, default=6379)
    return parser


if __name__ == "__main__":
    main()
