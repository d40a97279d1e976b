"""Nothing in the driver grows with the past, and what it let go of is found again when it is needed.

The stages are replaced by ones that only publish a small file; everything else is the campaign's own code.
"""

import gc
import json
import threading
import time
import weakref
from pathlib import Path

import pytest

from flows.home import Home
from flows.plan.graph import PlannedCalls
from flows.record.history import History
from flows.record.record import Record, read_entries
from flows.run.events import Listener
from flows.run.runner import InlineRunner, StageRunner, ThreadRunner
from flows.run.session import run_in_session
from flows.store import running
from flows.store.survey import read_versions
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.removal import collect
from hacrl_core.contracts.manifest import Provenance
from stages.runner import lookup
from stages.spec import Outcome, StageCall, find_stage
from tests.flow.conftest import tiny

METRICS = {"verify/reward_mean": 0.5, "credit/capability": 0.5}


class Small:
    """Publishes a file with the call's key, the same whenever it runs."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ran: list[str] = []

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        identity = find_stage(call.stage).identity(call)
        with self.store.lock(identity.key), self.store.reading(call.artifacts.values()):
            if found := lookup(self.store, call):
                return found
            self.ran.append(call.label)
            staged = self.store.stage_folder(identity.key)
            (staged / "content.json").write_text(json.dumps({"key": identity.key}))
            now = Provenance(started=time.time(), finished=time.time(), seconds=0.0)
            accuracy = {f"evaluate/{call.variant}/accuracy": int(identity.key[:2], 16) / 255}
            metrics = {**METRICS, **(accuracy if call.stage == "evaluate" else {})}
            ref = self.store.publish(staged, identity, {}, metrics, {}, now)
            return Outcome(ref, False, 0.0, metrics)

    def close(self, *, now: bool) -> None: ...


class After(Listener):
    """Does something after one iteration."""

    def __init__(self, iteration: int, do) -> None:
        self.iteration, self.do = iteration, do

    def iteration_finished(self, iteration: int) -> None:
        if iteration == self.iteration:
            self.do()


def run(place: Path, iterations: int, kind: type[StageRunner], listener: Listener | None = None) -> Small:
    config = tiny(iterations=iterations, evaluate={}, tracking={"enabled": False})
    small = Small(Store(place / "store"))
    with Record(place / "campaigns" / config.name, config) as record:
        run_in_session(
            config, PlannedCalls(config), small.store, record, lambda: small, listener or Listener(), kind
        )  # fmt: skip
    return small


@pytest.mark.parametrize("kind", [InlineRunner, ThreadRunner])
def test_calls_of_finished_iterations_are_let_go(tmp_path, kind, monkeypatch):
    # Counted by weak references: gc.get_objects() would hand out tuples that other threads are still building, and
    # CPython ends their construction with a SystemError then.
    made: list[weakref.ref[StageCall]] = []

    plain_init = StageCall.__init__

    def init(call, *args, **kwargs):
        plain_init(call, *args, **kwargs)
        made.append(weakref.ref(call))

    monkeypatch.setattr(StageCall, "__init__", init)
    counts = {}

    class Both(Listener):
        def iteration_finished(self, iteration: int) -> None:
            if iteration in (10, 40):
                gc.collect()
                counts[iteration] = sum(reference() is not None for reference in list(made))

    run(tmp_path, 42, kind, Both())
    # Thirty iterations of two agents are 330 calls.
    assert len(made) > 330
    assert counts[10] > 0
    assert counts[40] - counts[10] < 40


def test_versions_that_are_needed_again_are_made_again_as_far_back_as_needed(tmp_path):
    store = Store(tmp_path / "store")

    def take_away() -> None:
        for entry in read_entries(tmp_path / "campaigns" / "tiny"):
            if entry.agent == "ada" and entry.stage == "update" and entry.iteration in (2, 3, 4):
                assert collect(store, entry.stage, entry.key, "for the test") > 0

    small = run(tmp_path, 7, InlineRunner, After(4, take_away))
    assert [label for label in small.ran if small.ran.count(label) > 1 and label.startswith("update")] == [
        "update ada #2", "update ada #3", "update ada #4", "update ada #2", "update ada #3", "update ada #4",
    ]  # fmt: skip
    assert sum(label.startswith("update") for label in small.ran) == 2 * 7 + 3


class Collecting(Listener):
    """Collects after each iteration as a campaign does, and compares with the policy applied to the whole history."""

    def __init__(self, home: Home, store: Store, record: Record, late: int) -> None:
        """``late``: how many versions may be collected later."""
        self.store, self.record, self.late = store, record, late
        self.told: list[str] = []
        # How many manifests each iteration's collecting read.
        self.read: list[int] = []
        self.collect = running.collector(home, store, record, self.told.append)

    def iteration_finished(self, iteration: int) -> None:
        reads = 0
        plain, me = Store.manifest, threading.get_ident()

        def counted(store: Store, stage: str, key: str):
            nonlocal reads
            # Stages read manifests in their own threads.
            reads += threading.get_ident() == me
            return plain(store, stage, key)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "manifest", counted)
            self.collect(iteration)
        self.read.append(reads)
        entries = running.entries_until(self.record.entries(), iteration)
        versions = read_versions(History(self.record.config, self.store, entries), self.record.config.keep, [])
        collected = {v.key for v in versions if self.store.is_collected(v.stage, v.key)}
        left = {v.key for v in versions if not v.kept} - collected
        assert collected == {v.key for v in versions if not v.kept} - left
        # An evaluation in another thread may have ended since, or still read its version.
        assert len(left) <= self.late


@pytest.mark.parametrize("keep", [{"last": 2}, {"last": 1, "best": True}, {"last": 2, "every": 4}])
@pytest.mark.parametrize("kind", [InlineRunner, ThreadRunner])
def test_what_a_run_collects_is_what_the_history_says_and_costs_the_same_late_as_early(
    tmp_path, kind, keep, monkeypatch
):
    monkeypatch.setattr(running, "COLLECT_SHARE", 0)
    evaluate = tiny().evaluate.model_dump(mode="json") | {"every": 2}
    config = tiny(iterations=30, evaluate=evaluate, keep=keep, tracking={"enabled": False})
    assert config.evaluate.benchmarks
    home = Home(tmp_path)
    small = Small(Store(home.store))
    with Record(home.campaign(config.name), config) as record:
        listener = Collecting(home, small.store, record, late=0 if kind is InlineRunner else 4)
        run_in_session(config, PlannedCalls(config), small.store, record, lambda: small, listener, kind)
    assert listener.told == []
    assert len(listener.read) == 30
    # The last one reads the whole history once more.
    assert max(listener.read[20:-1]) <= max(listener.read[5:15]) + 2
