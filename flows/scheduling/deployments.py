"""``hacrl deploy``: campaigns that Prefect runs on a schedule, through the worker of ``hacrl up``.

Prefect is imported inside functions: its settings must be in the environment before.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from rich.console import Console
from rich.table import Table

from flows.home import Home
from flows.scheduling.api import quiet_settings
from flows.servers.serve import ensure_pool
from flows.servers.state import POOL, running_prefect_url
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.operation import ScheduleConfig
from hacrl_core.errors import ConfigError, HacrlError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate

FLOW = "campaign"


def deploy(console: Console, config: CampaignConfig, home: Home, *, now: bool, anywhere: bool = False) -> None:
    """Register the campaign, or update its deployment; there is one per campaign name.

    ``anywhere``: a worker of another machine may run it, where the folder of this command does not exist.
    """
    with _client(home) as client:
        from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
        from prefect.utilities.callables import parameter_schema

        from flows.scheduled import ENTRYPOINT, scheduled_campaign

        schedules = [_prefect_schedule(entry) for entry in config.schedule]
        ensure_pool(POOL)
        first = config.schedule[0] if config.schedule else None
        deployment = client.create_deployment(
            flow_id=client.create_flow_from_name(FLOW),
            name=config.name,
            description=f"{', '.join(config.agents)} learn together; registered with hacrl deploy.",
            entrypoint=ENTRYPOINT,
            work_pool_name=POOL,
            schedules=schedules,
            concurrency_limit=1,
            concurrency_options=ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
            parameters={
                "config": config.model_dump(mode="json", exclude={"schedule"}),
                "more_iterations": first.more_iterations if first else None,
                "settings": {},
            },
            parameter_openapi_schema=parameter_schema(scheduled_campaign).model_dump(),
            enforce_parameter_schema=True,
            job_variables={} if anywhere else {"working_dir": str(Path.cwd())},
            tags=["hacrl"],
        )
        console.print(f"campaign {config.name} is deployed to work pool {POOL}; overlapping runs queue")
        for entry in config.schedule:
            more = f", {entry.more_iterations} more iterations each time" if entry.more_iterations else ""
            console.print(f"  runs at {entry.cron} ({entry.timezone}){more}", highlight=False)
        if not config.schedule:
            console.print("  it has no schedule: start it with --now or in Prefect's pages")
        if now:
            run = client.create_flow_run_from_deployment(deployment, name=f"{config.name} by hand")
            console.print(f"  a run is queued: {run.name}", highlight=False)


def queue_cells(console: Console, name: str, cells: Sequence[CampaignConfig], home: Home) -> None:
    """Queue a sweep's cells as flow runs of the work pool, which any worker may take; one deployment has them all.

    A cell whose run is queued or running is not queued again.
    """
    with _client(home) as client:
        from prefect.utilities.callables import parameter_schema

        from flows.scheduled import ENTRYPOINT, scheduled_campaign

        ensure_pool(POOL)
        deployment = client.create_deployment(
            flow_id=client.create_flow_from_name(FLOW),
            name=f"sweep {name}",
            description=f"{len(cells)} cells of the sweep {name}; queued with hacrl sweep --pool.",
            entrypoint=ENTRYPOINT,
            work_pool_name=POOL,
            parameter_openapi_schema=parameter_schema(scheduled_campaign).model_dump(),
            enforce_parameter_schema=True,
            job_variables={},
            tags=["hacrl"],
        )
        under_way = _under_way(client, deployment)
        todo = [cell for cell in cells if cell.name not in under_way]
        for cell in todo:
            given = {"config": cell.model_dump(mode="json", exclude={"schedule"}), "settings": {}}
            client.create_flow_run_from_deployment(deployment, parameters=given, name=cell.name, tags=[cell.name])
        waiting = f"; {len(cells) - len(todo)} are queued or running already" if len(todo) < len(cells) else ""
        console.print(f"sweep {name}: {len(todo)} cells are queued in work pool {POOL}{waiting}", highlight=False)


def _under_way(client: "SyncPrefectClient", deployment: Any) -> set[str]:
    """Return the cells whose runs of a deployment have not ended."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId

    its = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
    found: set[str] = set()
    for offset in itertools.count(0, 200):
        runs = client.read_flow_runs(deployment_filter=its, limit=200, offset=offset)
        found |= {tag for run in runs if run.state is not None and not run.state.is_final() for tag in run.tags}
        if len(runs) < 200:
            return found
    return found


def remove(console: Console, name: str, home: Home) -> None:
    """Delete a campaign's deployment; the campaign and its artifacts stay."""
    with _client(home) as client:
        from prefect.exceptions import ObjectNotFound

        try:
            found = client.read_deployment_by_name(f"{FLOW}/{name}")
        except ObjectNotFound:
            known = ", ".join(sorted(each.name for each in _deployments(client))) or "none"
            raise ConfigError(f"deployment {name}: not found; known deployments: {known}") from None
        # A busy server may delete it and answer too late: the client asks again, and then there is none.
        with suppress(ObjectNotFound):
            client.delete_deployment(found.id)
        console.print(f"deployment {name} is removed; the campaign and its artifacts stay")


def show(console: Console, home: Home) -> None:
    """Print the deployments with their schedules, the next run and the last result."""
    with _client(home) as client:
        found = _deployments(client)
        if not found:
            console.print("no deployments; register a campaign with: hacrl deploy CONFIG")
            return
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for title in ("campaign", "runs at", "more", "next run", "last run"):
            table.add_column(title)
        for each in sorted(found, key=lambda deployment: deployment.name):
            active = [(s.schedule.cron, s.schedule.timezone or "UTC") for s in each.schedules if s.active]
            next_run, last_run = _runs(client, each.id, active)
            times = [f"{cron} ({zone})" for cron, zone in active] or ["by hand"]
            more = each.parameters.get("more_iterations")
            table.add_row(each.name, "\n".join(times), f"+{more}" if more else "", next_run, last_run)
        console.print(table)


def _prefect_schedule(entry: ScheduleConfig) -> "DeploymentScheduleCreate":
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    try:
        schedule = CronSchedule(cron=entry.cron, timezone=entry.timezone)
    except ValueError as problem:
        raise ConfigError(f"schedule.cron {entry.cron!r}: {str(problem).splitlines()[-1].strip()}") from None
    given = {"more_iterations": entry.more_iterations, "settings": entry.settings}
    return DeploymentScheduleCreate(schedule=schedule, parameters=given)


def _deployments(client: "SyncPrefectClient") -> list[Any]:
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
    from prefect.client.schemas.sorting import DeploymentSort

    ours = DeploymentFilter(tags=DeploymentFilterTags(all_=["hacrl"]))
    return list(client.read_deployments(deployment_filter=ours, limit=200, sort=DeploymentSort.NAME_ASC))


def next_times(crons: Sequence[tuple[str, str]], now: datetime) -> list[datetime]:
    """Return when each schedule (cron, time zone) is due next; Prefect itself plans a new one only after a while."""
    from prefect._vendor import croniter

    # Prefect plans with it, so both agree.
    parser: Any = croniter
    return [parser.croniter(cron, now.astimezone(ZoneInfo(zone))).get_next(datetime) for cron, zone in crons]


def _runs(client: "SyncPrefectClient", deployment: Any, crons: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return when the next run is due, and how the last one ended."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
    from prefect.client.schemas.sorting import FlowRunSort

    its = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
    runs = client.read_flow_runs(deployment_filter=its, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=200)
    scheduled = [run.expected_start_time for run in runs if run.state is not None and run.state.is_scheduled()]
    now = datetime.now(UTC)
    # A run whose time has come waits for the worker, or for the run before it.
    waiting = sorted(at for at in scheduled if at is not None and at <= now)
    planned = [*(at for at in scheduled if at is not None and at > now), *next_times(crons, now)]
    started = [(run.state.name, run.start_time) for run in runs if run.state is not None and run.start_time is not None]
    parts = [f"{min(planned).astimezone():%a %H:%M}"] if planned else []
    if waiting:
        parts.append(f"{len(waiting)} waiting since {waiting[0].astimezone():%H:%M}")
    next_run = "\n".join(parts)
    last_run = f"{started[0][0]}, {started[0][1].astimezone():%a %H:%M}" if started else ""
    return next_run, last_run


@contextmanager
def _client(home: Home) -> Iterator["SyncPrefectClient"]:
    """Open a client of the user's Prefect server, else of that of ``hacrl up``; a deployment needs one that stays."""
    quiet_settings()
    os.environ.setdefault("PREFECT_HOME", str(home.root / "prefect"))
    if "PREFECT_API_URL" not in os.environ:
        running = running_prefect_url(home)
        if running is None:
            raise ConfigError(f"no servers run in {home.root}; start them with: hacrl up")
        os.environ["PREFECT_API_URL"] = running
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        with get_client(sync_client=True) as client:
            yield client
    except PrefectHTTPStatusError as problem:
        answer = problem.response
        remedy = (
            "put user:password into HACRL_CREDENTIALS"
            if answer.status_code == 401
            else "hacrl ps shows the servers, logs/prefect.log says why"
        )
        raise HacrlError(
            f"Prefect at {os.environ['PREFECT_API_URL']} answers {answer.status_code} {answer.reason_phrase}: "
            f"{answer.text[:200]}; {remedy}"
        ) from None
    except httpx.HTTPError as problem:
        raise HacrlError(
            f"Prefect at {os.environ['PREFECT_API_URL']}: {type(problem).__name__}; hacrl ps shows the servers"
        ) from None
