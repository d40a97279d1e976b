"""The campaign as a Prefect flow: one flow per campaign, a task per stage that has to run."""

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

from flows.home import Home
from flows.run.prefect_runner import PrefectRunner
from flows.run.runner import THREADS
from flows.run.session import run_session
from flows.scheduling.slots import held_slots
from hacrl_core.config.campaign import CampaignConfig


def _run_name() -> str:
    from prefect.runtime import flow_run

    config = flow_run.parameters["config"]
    return f"{config['name']} to iteration {config['iterations']}"


@flow(
    name="campaign",
    flow_run_name=_run_name,
    task_runner=ThreadPoolTaskRunner(max_workers=THREADS),
    persist_result=False,
)
def campaign_flow(config: dict[str, Any], home: str) -> tuple[int, int]:
    """Run or resume a campaign; returns how many stages ran and how many were there already."""
    campaign = CampaignConfig.model_validate(config)
    with held_slots(campaign, lambda message: Console().print(message, markup=False)):
        return run_session(campaign, Home(Path(home)), PrefectRunner)
