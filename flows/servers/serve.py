"""The servers' processes: ``python -m flows.servers.serve prefect|mlflow|worker``, the same at home and in a container.

What they keep and where comes from the environment (Prefect's and MLflow's own variables), so passwords are in no command line. A host
that other machines can reach is refused without credentials.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from flows.home import Home
from flows.servers.credentials import client_environment, find_credentials, require_credentials
from flows.servers.processes import children, wait
from flows.servers.state import POOL, reachable
from hacrl_core.errors import HacrlError

STOP_SECONDS = 12.0  # the supervisor has patience for 20
LEASES = "prefect.server.concurrency.lease_storage.filesystem"


def main() -> None:
    options = _parser().parse_args()
    try:
        {"prefect": serve_prefect, "mlflow": serve_mlflow, "worker": serve_worker}[options.server](options)
    except HacrlError as problem:
        sys.exit(f"error: {problem}")


def serve_prefect(options: argparse.Namespace) -> None:
    credentials = find_credentials(Home.find())
    require_credentials(options.host, credentials)
    names = _names(options)
    for name, value in prefect_settings(options.port, names, credentials).items():
        os.environ.setdefault(name, value)
    import uvicorn
    from prefect.server.api.server import create_app
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    _let_schedules_work()
    _let_runs_of_removed_deployments_end()
    # Prefect looks at no Host header: a web page could rebind its own name to this machine and command the API.
    guarded = TrustedHostMiddleware(create_app(), allowed_hosts=names, www_redirect=False)
    uvicorn.run(guarded, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=3)


def _let_schedules_work() -> None:
    """Prefect 3.8.8's scheduler inserts rows with a key that is no column. SQLAlchemy 2.0 passes it over, 2.1 raises, and no
    scheduled run is ever made; so it is told to pass it over."""
    from prefect.server.database.orm_models import FlowRun

    state: Any = FlowRun.__mapper__.all_orm_descriptors["state"]  # type: ignore[attr-defined]
    if getattr(state, "bulk_dml_setter", "absent") is None:
        state.bulk_dml_setter = lambda model, row, value: None


def _let_runs_of_removed_deployments_end() -> None:
    """A deployment that is removed while a run of it is under way takes its concurrency limit along. Prefect 3.8.8 then fails to give
    the run's slot back, answers every change of its state with an error, and the run stays *Running* for ever."""
    from prefect.server.orchestration import core_policy

    release = core_policy._release_concurrency_lease

    async def release_what_is_there(session: Any, lease_id: Any, *more: Any, **named: Any) -> None:
        try:
            await release(session, lease_id, *more, **named)
        except RuntimeError:  # no such limit any more
            await core_policy.get_concurrency_lease_storage().revoke_lease(lease_id=lease_id)

    core_policy._release_concurrency_lease = release_what_is_there


def prefect_settings(port: int, names: list[str], credentials: str | None) -> dict[str, str]:
    """Nothing phones home, the browser's other pages stay out, and slots of the dead are freed within about a minute."""
    return {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_UI_API_URL": f"http://{names[0]}:{port}/api",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(
            Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser() / "ui"
        ),
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(
            f"http://{name}:{port}" for name in names
        ),  # by default: anybody's
        # In memory, which is the default, leases would be forgotten by a restart and their slots held for ever.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
        "PREFECT_SERVER_CONCURRENCY_INITIAL_DEPLOYMENT_LEASE_DURATION": "60",
        "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "5",
        **({"PREFECT_SERVER_API_AUTH_STRING": credentials} if credentials else {}),
        **client_environment(credentials),  # services inside the server call its API
    }


def serve_mlflow(options: argparse.Namespace) -> None:
    """MLflow's command starts a second process to serve; this is the same server in one: half the memory and start-up time."""
    credentials = find_credentials(Home.find())
    require_credentials(options.host, credentials)
    from flows.tracking.projection import (
        quiet_environment,  # it brings pyarrow along, which Prefect and the worker do without
    )

    quiet_environment()
    # With a port it is a pattern, in which the bracket of an IPv6 address stands for itself only in brackets.
    hosts = [host for name in _names(options) for host in (name, name.replace("[", "[[]") + ":*")]
    os.environ.setdefault("MLFLOW_SERVER_ALLOWED_HOSTS", ",".join(hosts))
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    store = os.environ["MLFLOW_BACKEND_STORE_URI"]
    files = os.environ.get("MLFLOW_DEFAULT_ARTIFACT_ROOT", "mlflow-artifacts:/")
    os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = os.environ[constants.REGISTRY_STORE_URI_ENV_VAR] = store
    os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = files
    if destination := os.environ.get("MLFLOW_ARTIFACTS_DESTINATION"):
        os.environ[constants.SERVE_ARTIFACTS_ENV_VAR] = "true"
        os.environ[constants.ARTIFACTS_DESTINATION_ENV_VAR] = destination
    os.environ["_MLFLOW_SGI_NAME"] = "uvicorn"
    if store == Home.find().tracking_uri:
        from flows.tracking.database import ensure_database

        ensure_database(Home.find())
    initialize_backend_stores(store, store, files)  # makes or migrates the tables
    import uvicorn
    from mlflow.server.fastapi_app import app

    from flows.servers.guard import BasicAuth

    guarded: Any = app if credentials is None else BasicAuth(app, credentials, open_paths=("/health",))
    uvicorn.run(guarded, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=3)


def serve_worker(options: argparse.Namespace) -> None:
    for name, value in client_environment(find_credentials(Home.find())).items():
        os.environ.setdefault(name, value)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    from prefect.utilities.processutils import setup_signal_handlers_worker
    from prefect.workers.process import ProcessWorker

    from flows.servers.pool import end_lost_runs, ensure_pool

    ensure_pool(POOL)
    end_lost_runs(POOL, options.name)
    worker = ProcessWorker(POOL, name=options.name, limit=options.limit, heartbeat_interval_seconds=10)
    setup_signal_handlers_worker(os.getpid(), "the worker", print)
    _stop_campaigns_first(signal.getsignal(signal.SIGTERM))
    try:
        asyncio.run(worker.start())
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("the worker stopped")


def _stop_campaigns_first(stop_worker: Any) -> None:
    """On SIGTERM Prefect's worker waits for what it runs, which may be a whole night, and on SIGINT it kills it at once. Campaigns resume,
    so they are asked to end, and get the time to say so in their log, in MLflow and to Prefect."""

    def stop(number: int, frame: Any) -> None:
        campaigns = children(os.getpid())
        for campaign in campaigns:
            campaign.signal(signal.SIGTERM)
        wait(campaigns, STOP_SECONDS)
        stop_worker(number, frame)

    signal.signal(signal.SIGTERM, stop)


def _names(options: argparse.Namespace) -> list[str]:
    """Names under which a browser or client may speak of this server; the first is the one that we say."""
    own = [reachable(options.host)]  # where our own health checks go
    names = [f"[{name}]" if ":" in name and name[0] != "[" else name for name in options.name or []]
    local = ["127.0.0.1", "localhost"]
    return list(dict.fromkeys([*names, *own, *local]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.servers.serve", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    servers = parser.add_subparsers(dest="server", required=True)
    for name, port in (("prefect", 4200), ("mlflow", 5000)):
        server = servers.add_parser(name)
        server.add_argument("--host", default="127.0.0.1")
        server.add_argument("--port", type=int, default=port)
        server.add_argument(
            "--name", action="append", help="A name under which it is reached, besides localhost; repeatable."
        )
    worker = servers.add_parser("worker")
    worker.add_argument("--name", default=f"hacrl {socket.gethostname()}")
    worker.add_argument("--limit", type=int, default=4, help="Campaigns at a time.")
    return parser


if __name__ == "__main__":
    main()
