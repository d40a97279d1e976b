"""The course of a campaign of several parties: joining, leaving, resuming, and a memory that does not grow."""

import gc
import threading
import weakref
from pathlib import Path

import pytest

from flows.exchange.party import Elsewhere
from flows.run.events import Listener
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.artifacts.removal import collect
from hacrl_core.exchange.messages import Message
from stages.spec import StageCall
from tests.exchange.parties import AGENTS, OneParty, central, joined, meeting, open_party, run_all
from tests.exchange.test_hostile import TWO

pytestmark = pytest.mark.exchange


def test_parties_join_leave_and_resume_as_in_one_campaign(tmp_path: Path, seed_store: Path) -> None:
    """Two parties run a round; then west joins with cat and ben leaves one round later, all by a longer config."""
    first = meeting(tmp_path, TWO, iterations=1, evaluate={})
    run_all(begun := [open_party(first, name, tmp_path, seed_store) for name in TWO])
    assert [party.error for party in begun] == [None, None]
    agents = {**AGENTS, "ben": {**AGENTS["ben"], "leaves": 2}, "cat": {**AGENTS["cat"], "joins": 1}}
    config = meeting(tmp_path, agents=agents, iterations=3, evaluate={})
    expected = central(config, seed_store)
    parties = [open_party(config, name, tmp_path, seed_store) for name in config.parties]
    run_all(parties)
    known: dict[str, str] = {}
    for party in parties:
        assert party.error is None, party.error
        assert party.reasons() == []
        known |= party.digests()
    assert known == expected
    # What was done before was not done again.
    again = open_party(config, "north", tmp_path)
    done = Ran()
    with joined(again, done) as run:
        run()
    assert done.labels == []


class Ran(Listener):
    """Notes what had to run."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def stage_started(self, call: StageCall, why: list[str]) -> None:
        self.labels.append(call.label)


class Census(Listener):
    """Counts what was made of some kinds and is still held, after some rounds."""

    def __init__(self, rounds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds = rounds
        self.counts: dict[int, int] = {}
        self._made: list[weakref.ref[object]] = []
        for kind in (StageCall, Elsewhere, ArtifactRef):
            self._note(kind, monkeypatch)
        read = Message.model_validate

        def message(body: object) -> Message:
            found = read(body)
            self._made.append(weakref.ref(found))
            return found

        monkeypatch.setattr(Message, "model_validate", message)

    def _note(self, kind: type[object], monkeypatch: pytest.MonkeyPatch) -> None:
        make = kind.__init__

        def noted(this: object, *args: object, **fields: object) -> None:
            make(this, *args, **fields)
            self._made.append(weakref.ref(this))

        monkeypatch.setattr(kind, "__init__", noted)

    def iteration_finished(self, iteration: int) -> None:
        if iteration in self.rounds:
            gc.collect()
            self.counts[iteration] = sum(made() is not None for made in list(self._made))


def test_nothing_in_a_partys_process_grows_with_the_past(
    tmp_path: Path, seed_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both parties are threads here, so the census counts what both hold."""
    config = meeting(tmp_path, TWO, iterations=9, evaluate={}, exchange={"round_seconds": 600})
    parties = [open_party(config, name, tmp_path, seed_store) for name in TWO]
    census = Census((3, 7), monkeypatch)
    other = threading.Thread(target=run_listening, args=(parties[1], Listener()))
    other.start()
    run_listening(parties[0], census)
    other.join()
    assert [party.error for party in parties] == [None, None]
    assert census.counts[3] > 0
    # A round has about 28 calls with twice as many artifacts; four more rounds are between the counts, and where the
    # other party stands differs by one.
    assert census.counts[7] - census.counts[3] < 60, census.counts


def run_listening(party: OneParty, listener: Listener) -> None:
    try:
        with joined(party, listener) as run:
            run()
    except BaseException as problem:
        party.error = problem


def test_a_version_that_is_gone_is_made_again_from_what_the_home_has(tmp_path: Path, seed_store: Path) -> None:
    """North has let go of how its versions came about; the walk that finds it again asks nobody."""
    config = meeting(tmp_path, TWO, iterations=4, evaluate={})
    parties = [open_party(config, name, tmp_path, seed_store) for name in TWO]
    gone: list[str] = []

    class TakeAway(Listener):
        def iteration_finished(self, iteration: int) -> None:
            if iteration == 1:
                for folder in sorted((parties[0].store.root / "objects" / "update").iterdir()):
                    gone.append(folder.name)
                    assert collect(parties[0].store, "update", folder.name, "for the test") > 0

    other = threading.Thread(target=run_listening, args=(parties[1], Listener()))
    other.start()
    run_listening(parties[0], TakeAway())
    other.join()
    assert [party.error for party in parties] == [None, None]
    assert gone
    assert [party.reasons() for party in parties] == [[], []], [party.notes.warnings for party in parties]
    expected = central(config, seed_store)
    for party in parties:
        found = party.digests()
        assert {label: expected[label] for label in found} == found
