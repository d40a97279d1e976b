"""Parties for tests: each has a home, an agent and a thread; a folder is the bucket between them."""

import copy
import shutil
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flows.campaign import run_campaign
from flows.exchange.session import Exchange, Outbox, PartyExecutor, open_exchange
from flows.record.record import Record, read_entries
from flows.run.events import Listener, Listeners
from flows.run.executors import InProcessExecutor
from flows.run.runner import ThreadRunner
from flows.run.session import run_in_session
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.exchange.signing import public_key_of, write_key
from stages.spec import Context, StageCall, find_stage
from tests.flow.conftest import AGENT, TINY, Inline

AGENTS: dict[str, Any] = {
    **TINY["agents"],
    "cat": {
        "warmstart": {
            **AGENT,
            "model": {**AGENT["model"], "hidden_size": 32},
            "tokenizer": {"kind": "bpe", "vocab_size": 340},
        }
    },
}
PARTIES = {"north": ("ada",), "south": ("ben",), "west": ("cat",)}


def write_keys(folder: Path, parties: Mapping[str, tuple[str, ...]] = PARTIES) -> dict[str, Path]:
    """Make a key for each party."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {name: folder / f"{name}.key" for name in parties}
    for path in keys.values():
        if not path.exists():
            write_key(path)
    return keys


def meeting(folder: Path, parties: Mapping[str, tuple[str, ...]] = PARTIES, **changes: Any) -> CampaignConfig:
    """A tiny campaign of several parties that meet in a folder; without ``party`` one process runs all of it."""
    keys = write_keys(folder / "keys", parties)
    exchange = {"bucket": {"bucket": f"file://{folder}/bucket"}, "poll_seconds": 0.05, **changes.pop("exchange", {})}
    limits, settings = changes.pop("weight_limits", {}), changes.pop("settings", {})
    known = {
        name: {
            "agents": agents,
            "public_key": public_key_of(keys[name].read_text()),
            "weight_limit": limits.get(name),
            **settings.get(name, {}),
        }
        for name, agents in parties.items()
    }
    agents = {agent: AGENTS[agent] for owned in parties.values() for agent in owned}
    raw = {**copy.deepcopy(TINY), "agents": agents, "parties": known, "exchange": exchange, **changes}
    return CampaignConfig.model_validate(raw)


def as_party(config: CampaignConfig, name: str, folder: Path) -> CampaignConfig:
    """The same campaign as one of its parties."""
    raw = config.model_dump(mode="json")
    return CampaignConfig.model_validate({**raw, "party": {"name": name, "key": str(folder / "keys" / f"{name}.key")}})


def central(config: CampaignConfig, store: Path) -> dict[str, str]:
    """Run the whole campaign in one process; return the content digest of each stage."""
    torch.set_num_threads(1)
    runner = Inline(Store(store))
    plain = config.model_copy(update={"party": None})
    run_campaign(plain, StageCalls(plain), runner)
    return {label: outcome.ref.digest for label, outcome in runner.outcomes.items()}


class Notes(Listener):
    """Remembers warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)


@dataclass
class OneParty:
    """One party: its home, and what came of its run."""

    name: str
    config: CampaignConfig
    home: Path
    notes: Notes = field(default_factory=Notes)
    error: BaseException | None = None
    exchange: Exchange | None = None

    @property
    def store(self) -> Store:
        return Store(self.home / "store")

    def digests(self) -> dict[str, str]:
        """The content digest of each stage that this party's record names."""
        store = self.store
        entries = read_entries(self.home / "campaigns" / self.config.name)
        return {entry.label: store.manifest(entry.stage, entry.key).content_digest for entry in entries}

    def reasons(self) -> list[tuple[str, str]]:
        """Who was refused and why."""
        assert self.exchange is not None
        folder = self.exchange.mailbox.folder / "evidence"
        return sorted((p.name.split("-")[0], "-".join(p.name.split("-")[1:-1])) for p in folder.glob("*"))


def open_party(config: CampaignConfig, name: str, folder: Path, seed_store: Path | None = None) -> OneParty:
    """Make a party's home; first versions that a store has already are not trained again."""
    own = as_party(config, name, folder)
    party = OneParty(name, own, folder / name)
    if seed_store is not None and not (party.home / "store").exists():
        calls = StageCalls(own)
        for agent in own.parties[name].agents:
            call = calls.origin(agent)
            key = find_stage(call.stage).identity(call).key
            source = seed_store / "objects" / call.stage / key
            if source.exists():
                shutil.copytree(source, party.home / "store" / "objects" / call.stage / key)
    return party


@contextmanager
def joined(party: OneParty, listener: Listener | None = None):
    """Open what a run of the party needs; yields a function that runs the campaign once."""
    torch.set_num_threads(1)
    store = party.store
    with Record(party.home / "campaigns" / party.config.name, party.config) as record:
        exchange = open_exchange(party.config, record.folder, store, party.notes.warn)
        assert exchange is not None
        party.exchange = exchange

        def run() -> None:
            everyone = Listeners(party.notes, Outbox(exchange, store), listener or Listener())
            run_in_session(
                party.config,
                StageCalls(party.config),
                store,
                record,
                lambda: PartyExecutor(OneAtATime(InProcessExecutor(store, Context())), exchange),
                everyone,
                ThreadRunner,
                exchange.party(store, record),
            )

        yield run


_GATE = threading.Lock()


class OneAtATime:
    """One stage of all parties at a time: the machine is shared, and torch's threads are few."""

    def __init__(self, inner: InProcessExecutor) -> None:
        self._inner = inner

    def run(self, call: StageCall, listener: Listener):
        with _GATE:
            return self._inner.run(call, listener)

    def close(self, *, now: bool) -> None:
        self._inner.close(now=now)


def run_party(party: OneParty) -> None:
    """Run or resume a party's campaign; an error is kept."""
    try:
        with joined(party) as run:
            run()
    except BaseException as problem:
        party.error = problem


def run_all(parties: list[OneParty]) -> None:
    """Run all parties at the same time."""
    threads = [threading.Thread(target=run_party, args=(party,)) for party in parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
