"""The campaign as a Prefect flow: one flow run per campaign, whose stages run in threads and are shown as bars."""

from collections.abc import Callable
from typing import Any, TypeVar

from prefect import flow

from flows.home import Home
from flows.record.record import Record
from flows.run.divergence import Watch
from flows.run.events import Listener, Listeners
from flows.run.executors import Executor
from flows.run.runner import ThreadRunner
from flows.scheduling.pages import PrefectView
from flows.scheduling.slots import held_slots
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig

T = TypeVar("T")


def run_as_flow(
    config: CampaignConfig, home: Home, work: Callable[[], T], say: Callable[[str], None], *, shared: bool
) -> T:
    """Do the work inside a flow run that Prefect shows under the campaign's name, with the campaign's slots held.

    ``shared``: whether other campaigns use the same Prefect server.
    """

    @flow(
        name="campaign",
        flow_run_name=f"{config.name} to iteration {config.iterations}",
        persist_result=False,
    )
    def campaign_flow(config: dict[str, Any], home: str) -> T:
        """Run or resume a campaign."""
        with held_slots(CampaignConfig.model_validate(config), say, shared=shared):
            return work()

    return campaign_flow(config.model_dump(mode="json"), str(home.root))


class PrefectRunner(ThreadRunner):
    """Runs stages in threads and keeps Prefect's pages of the flow it is used in up to date.

    Stages are no tasks of Prefect's: a task run costs its server and this process more than a short stage costs, and a
    server that loses a run could not lose a stage. ``flows/scheduling/timeline.py`` says what the run page shows.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        listener: Listener,
        record: Record,
        watch: Watch | None = None,
        retries: int = 0,
    ) -> None:
        self._view = PrefectView(store, record, listener.warn)
        super().__init__(store, executor, Listeners(listener, self._view), record, watch, retries)

    def end(self, *, complete: bool) -> None:
        """End the pages too."""
        super().end(complete=complete)
        self._view.close(complete=complete)
