"""Whole campaigns in a home folder, with record, display and everything, but in this process: neither Prefect nor
workers.
"""

import hashlib
import shutil
from pathlib import Path
from typing import ClassVar

import torch
from rich.console import Console

from flows.home import Home
from flows.record.record import read_entries
from flows.run.events import Listener
from flows.run.executors import InProcessExecutor
from flows.run.launch import open_campaign, run_stages
from flows.run.runner import InlineRunner
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from stages.spec import Context, Outcome, StageCall


class Here(InProcessExecutor):
    """Runs every stage in this process. ``ran`` lists what was computed since it was last cleared."""

    ran: ClassVar[list[str]] = []

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        outcome = super().run(call, listener)
        if not outcome.cached:
            Here.ran.append(call.label)
        return outcome


def run_here(config: CampaignConfig, home: Home, runner: type[InlineRunner] = InlineRunner) -> list[str]:
    """Run or resume; returns the labels of the stages that were computed."""
    torch.set_num_threads(1)
    Here.ran.clear()
    with open_campaign(config, home, Console()) as campaign:
        run_stages(campaign, runner, lambda *_: Here(campaign.store, Context()))
    return list(Here.ran)


def home_over(store: Path, place: Path) -> Home:
    """A home whose store is shared with other tests: only for campaigns that nothing is taken from or done to."""
    place.mkdir(parents=True, exist_ok=True)
    store.mkdir(parents=True, exist_ok=True)
    (place / "store").symlink_to(store)
    return Home(place)


def own_copy(home: Home, name: str, place: Path, stages: tuple[str, ...] = (), record: bool = True) -> Home:
    """A home with copies of the campaign's artifacts (of some stages), to be damaged and cleaned."""
    fresh = Home(place)
    fresh.store.mkdir(parents=True)
    for entry in read_entries(home.campaign(name)):
        if not stages or entry.stage in stages:
            place = fresh.store / "objects" / entry.stage / entry.key
            if not place.exists():
                shutil.copytree(home.store / "objects" / entry.stage / entry.key, place)
    if record:
        shutil.copytree(home.campaign(name), fresh.campaign(name))
    return fresh


def digests(home: Home, name: str) -> dict[str, str]:
    """Label → content digest of everything in the campaign's record."""
    store = Store(home.store)
    return {
        entry.label: store.manifest(entry.stage, entry.key).content_digest
        for entry in read_entries(home.campaign(name))
    }


def of_label(home: Home, name: str, label: str) -> Path:
    entry = next(e for e in read_entries(home.campaign(name)) if e.label == label)
    return Store(home.store).folder(entry.stage, entry.key)


def weights(home: Home, name: str, label: str) -> str:
    return hashlib.sha256((of_label(home, name, label) / "model.safetensors").read_bytes()).hexdigest()
