"""One small campaign, run once for all tests that look at campaigns, in whichever worker process comes first."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.campaign import run_campaign
from flows.home import Home
from flows.record.history import History, read_history
from flows.record.log import Logbook
from flows.record.record import Record, read_campaign, read_entries
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from flows.tracking.projection import Projection, quiet_environment
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from stages.runner import run_stage
from stages.spec import Context, StageCall
from tests.flow.conftest import TINY, tiny
from tests.once import common_folder, once

CHROMIUM = Path("/usr/bin/chromium")
BENCHMARK = TINY["evaluate"]["benchmarks"][0]


def seen_config(**changes: Any) -> CampaignConfig:
    """Both kinds of problems, three iterations, an evaluation after each: something for every chart."""
    both: dict[str, Any] = {
        "kind": "arithmetic",
        "kinds": {"addition": 1.0, "subtraction": 1.0},
        "levels": {"easy": 1.0},
    }
    benchmark = {**BENCHMARK, "problems": {**both, "split": "held_out", "size": 12}}
    base: dict[str, Any] = {
        "name": "seen",
        "iterations": 3,
        "problems": both,
        "evaluate": {"every": 1, "benchmarks": [benchmark]},
        "tracking": {"enabled": True},
    }
    return tiny(**{**base, **changes})


class Recorded:
    """Runs every stage on the spot and writes the campaign's record and log as the flow does."""

    def __init__(self, store: Store, record: Record, log: Logbook) -> None:
        self.store, self.record, self.told, self.context = store, record, log, Context()

    def submit(self, planned: StageCall) -> Done:
        call = planned.bound()
        self.told.stage_started(call, [])
        outcome = run_stage(self.store, call, self.context)
        self.record.add(call, outcome)
        self.told.stage_finished(call, outcome)
        return Done(planned, outcome)

    def iteration_done(self, iteration: int) -> None:
        pass


def run_recorded(config: CampaignConfig, home: Home) -> None:
    import torch

    torch.set_num_threads(1)
    with Record(home.campaign(config.name), config) as record:
        log = Logbook(record.folder)
        log.write("run", f"{config.name}: test")
        calls = StageCalls(config)
        run_campaign(config, calls, Recorded(Store(home.store), record, log))
        log.write("end", "complete")
        log.close()


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The campaign's home. Read it, do not write into it: it is everybody's."""
    place = common_folder(tmp_path_factory) / "seen"
    with once(place) as first:
        if first:
            run_recorded(seen_config(), Home(place))
    return Home(place)


@pytest.fixture
def own(seen: Home, tmp_path: Path) -> Home:
    """A copy to change."""
    shutil.copytree(seen.root, tmp_path / "home")
    return Home(tmp_path / "home")


@pytest.fixture(scope="session")
def history(seen: Home) -> History:
    return read_history(Store(seen.store), seen.campaign("seen"))


@pytest.fixture
def entries(seen: Home) -> list[Any]:
    return read_entries(seen.campaign("seen"))


@pytest.fixture(scope="session")
def tracked(seen: Home, blank_database: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, CampaignConfig]:
    """The campaign projected into a fresh database; its home is a link, so that the database is our own."""
    quiet_environment()
    place = tmp_path_factory.mktemp("tracked")
    (place / "store").symlink_to(seen.store)
    (place / "campaigns").symlink_to(seen.campaigns)
    home = Home(place)
    config = read_campaign(home.campaign("seen"))
    for name in ("mlflow.db", "blank.db"):
        shutil.copyfile(blank_database, place / name)
    project(home, config)
    return home, config


def project(home: Home, config: CampaignConfig, entries: list[Any] | None = None) -> bool:
    projection = Projection(config, Store(home.store), home.tracking_uri, home)
    sent = projection.replay(entries if entries is not None else read_entries(home.campaign(config.name)))
    projection.finish()
    return sent
