"""The Prefect flow behind a deployment: a worker runs it at the scheduled time, in its own process.

It adds three things to the campaign's flow. It decides how far to go, it waits for a run of the same campaign in a
terminal, and it copies the terminal's lines into Prefect's log. Deployments that are stored in Prefect name this
module, so it keeps its place at the top of the package.
"""

import io
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

from flows.home import Home
from flows.record.record import is_running
from flows.run.counts import Counts
from flows.run.goals import with_goal
from flows.run.launch import OpenCampaign, conclude, open_campaign, run_rest, run_stages
from flows.run.prefect_runner import PrefectRunner
from flows.run.runner import THREADS
from flows.scheduling.api import Server
from flows.scheduling.slots import held_slots
from flows.servers.serve import run_name
from flows.tracking.projection import quiet_environment
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import apply_override, validate
from hacrl_core.errors import HacrlError

# The same name in a work tree and in a wheel: a worker may be installed in the other way.
ENTRYPOINT = "hacrl.scheduled.scheduled_campaign"
# Prefect's own annotations do not accept this runner in a flow.
_TASK_RUNNER: Any = ThreadPoolTaskRunner(max_workers=THREADS)


def _run_name() -> str:
    return run_name(flow_run.parameters, flow_run.scheduled_start_time)


@flow(
    name="campaign",
    flow_run_name=_run_name,
    task_runner=_TASK_RUNNER,
    persist_result=False,
)
def scheduled_campaign(
    config: dict[str, Any], more_iterations: int | None = None, settings: dict[str, Any] | None = None
) -> None:
    """Run or continue a campaign.

    Args:
        config: The campaign's settings, as hacrl deploy read them.
        more_iterations: How many iterations to run beyond the last complete one; empty: up to the config's iterations.
        settings: Changes for this run only, e.g. {"generate.batch_size": 64}.
    """
    quiet_environment()
    home = Home.find()
    log = get_run_logger()
    campaign = changed(config, settings or {})
    _wait_for_others(campaign.name, home, log)
    if more_iterations is not None:
        campaign = with_goal(campaign, home, more_iterations, log.info, run=str(flow_run.id))
    with redirect_stdout(LogLines(log)), open_campaign(campaign, home, Console()) as opened:
        done = conclude(opened, _run(opened))
    log.info(f"{campaign.iterations} iterations complete: {done.ran} stages ran, {done.cached} were in the cache")


def _run(campaign: OpenCampaign) -> Counts:
    """Run the stages as tasks of this flow run, or without Prefect once its server is gone."""
    begun = time.time()
    try:
        with held_slots(campaign.config, campaign.display.say):
            return run_stages(campaign, PrefectRunner)
    except HacrlError:
        raise
    except Exception:
        if Server(os.environ["PREFECT_API_URL"]).answers():
            raise
    print("Prefect's server is gone; the campaign goes on without it, and nothing is lost")
    return run_rest(campaign, begun)


def changed(config: Mapping[str, Any], settings: Mapping[str, Any]) -> CampaignConfig:
    """Return the config with single settings replaced, as ``--set`` does."""
    raw: dict[str, Any] = json.loads(json.dumps(config))
    for key, value in settings.items():
        apply_override(raw, f"{key}={json.dumps(value)}")
    return validate(raw, CampaignConfig, f"campaign {raw.get('name')}")


def _wait_for_others(name: str, home: Home, log: Any) -> None:
    """Wait for a run of this campaign that somebody started by hand; Prefect itself queues runs of one deployment."""
    told = False
    while is_running(home.campaign(name)):
        if not told:
            log.info(f"campaign {name} runs elsewhere on this machine; waiting for it")
            told = True
        time.sleep(2)


class LogLines(io.TextIOBase):
    """A text stream that writes each printed line to a log."""

    def __init__(self, log: "logging.Logger | logging.LoggerAdapter[Any]") -> None:
        self._log = log
        self._rest = ""

    def write(self, text: str) -> int:
        """Log every complete line of the text and keep the rest for later."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, lines):
            self._log.info(line.rstrip())
        return len(text)
