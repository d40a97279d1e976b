"""Rounds that close without who is late, closings that cheat, parties that are killed, and audits."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from flows.exchange.audit import audit_answers
from flows.exchange.mailbox import Mailbox
from flows.exchange.rounds import Rounds
from flows.exchange.status import published
from flows.home import Home
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.exchange.messages import seal
from tests.exchange.parties import as_party, central, meeting, open_party, run_all, run_party
from tests.exchange.test_hostile import LARGER, TWO, Lie, honest, learned_from, publish, rows_of

__all__ = ["honest"]
AGENTS = ["ada", "ben", "cat"]


def boxes(folder: Path, seconds: float) -> dict[str, Mailbox]:
    """The mailboxes of three parties whose rounds close after so long."""
    config = meeting(folder, exchange={"round_seconds": seconds})
    found = {}
    for name in config.parties:
        own = as_party(config, name, folder)
        private = (folder / "keys" / f"{name}.key").read_text()
        assert own.exchange.bucket is not None
        found[name] = Mailbox(own, Bucket(own.exchange.bucket), folder / name, private, lambda line: None)
    return found


def tell(box: Mailbox, agent: str, iteration: int = 0) -> None:
    box.send(box.message("answers", agent, iteration), {})


def members(box: Mailbox, iteration: int = 0) -> list[str]:
    return list(Rounds(box.config, box, threading.Event(), local=False).members("answers", iteration, AGENTS))


def refusals(box: Mailbox) -> list[tuple[str, str]]:
    found = [json.loads(path.read_text()) for path in (box.folder / "evidence").glob("*/why.json")]
    return sorted((about["party"], about["reason"]) for about in found)


def test_a_round_closes_at_once_when_everyone_is_there(tmp_path: Path) -> None:
    found = boxes(tmp_path, 3600)
    for box, agent in zip(found.values(), AGENTS, strict=True):
        tell(box, agent)
    assert [members(box) for box in found.values()] == [AGENTS] * 3


def test_a_round_closes_without_who_is_late_and_for_all_alike(tmp_path: Path) -> None:
    found = boxes(tmp_path, 0.2)
    tell(found["north"], "ada")
    tell(found["south"], "ben")
    assert members(found["north"]) == ["ada", "ben"]
    tell(found["west"], "cat")
    # West comes too late: it reads the closing that stands, and so does everybody else.
    assert members(found["west"]) == ["ada", "ben"]
    assert members(found["south"]) == ["ada", "ben"]
    assert refusals(found["north"]) == [("west", "late")]
    assert refusals(found["south"]) == [("west", "late")]


def test_many_close_one_round_and_one_closing_stands(tmp_path: Path) -> None:
    found = boxes(tmp_path, 0.2)
    for box, agent in zip(found.values(), AGENTS, strict=True):
        tell(box, agent)
    results: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda b=box: results.append(members(b))) for box in found.values() for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [AGENTS] * 6


def test_a_closing_before_its_time_does_not_count(tmp_path: Path) -> None:
    found = boxes(tmp_path, 3600)
    found["west"].opened(0)
    found["west"].close_round("answers", 0, ("cat",))
    for box, agent in zip(found.values(), AGENTS, strict=True):
        tell(box, agent)
    assert members(found["north"]) == AGENTS
    assert refusals(found["north"]) == [("west", "early")]
    # Whoever writes to the bucket can make an honest closing look early, so it is no reason for a quarantine.
    assert found["north"].quarantined() == {}


def test_a_closing_that_names_who_is_not_there_makes_nobody_wait(tmp_path: Path) -> None:
    """West says that everyone has answered, and ben has not: the others must not wait for ben for ever."""
    found = boxes(tmp_path, 0.2)
    for name, agent in (("north", "ada"), ("west", "cat")):
        tell(found[name], agent)
    found["west"].opened(0)
    found["west"].close_round("answers", 0, tuple(AGENTS))
    assert members(found["north"]) == ["ada", "cat"]
    assert ("west", "altered") in refusals(found["north"])
    # It stays decided when ben comes after all.
    tell(found["south"], "ben")
    assert members(found["north"]) == ["ada", "cat"]


def test_a_round_that_was_opened_ahead_of_time_is_not_shorter(tmp_path: Path) -> None:
    """West opens round 1 before round 0 is over, so that the time for it is up when it begins."""
    found = boxes(tmp_path, 5)
    found["west"].opened(1)
    before = Rounds(found["north"].config, found["north"], threading.Event(), local=False)._began(1)
    time.sleep(1.1)
    for box, agent in zip(found.values(), AGENTS, strict=True):
        tell(box, agent)
    assert members(found["north"]) == AGENTS
    after = Rounds(found["north"].config, found["north"], threading.Event(), local=False)._began(1)
    assert after > before
    found["west"].close_round("answers", 1, ("cat",))
    tell(found["north"], "ada", 1)
    tell(found["south"], "ben", 1)
    tell(found["west"], "cat", 1)
    assert members(found["north"], 1) == AGENTS
    assert ("west", "early") in refusals(found["north"])


def over_since(box: Mailbox, seconds: float, iteration: int = 0) -> None:
    """Open a round, and move its beginning so many seconds into the past."""
    box.opened(iteration)
    then = time.time() - seconds
    os.utime(object_file(box, f"rounds/{iteration:06d}/open"), (then, then))


def object_file(box: Mailbox, place: str) -> Path:
    """The file of an object in a bucket that is a folder."""
    assert box.config.exchange.bucket is not None
    return Path(box.config.exchange.bucket.bucket.removeprefix("file://")) / box.object_path(place)


@pytest.mark.parametrize("killed", [False, True])
def test_a_message_counts_from_the_moment_it_is_in_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Ben's answers are in the bucket, the time is up, and others close the round with him before his own party has
    noted that it sent them, or after it was killed at that point. His party must find the set that the others have."""
    found = boxes(tmp_path, 0.2)
    tell(found["north"], "ada")
    over_since(found["north"], 60)
    with monkeypatch.context() as patch:
        patch.setattr(Mailbox, "_keep", lambda *place: None)
        tell(found["south"], "ben")
    south = boxes(tmp_path, 0.2)["south"] if killed else found["south"]
    assert not south.was_sent("answers", "ben", 0)
    assert members(found["north"]) == ["ada", "ben"]
    assert members(south) == ["ada", "ben"]
    assert refusals(south) == [("west", "late")]


def test_of_two_closings_the_first_stands_for_a_party_that_wanted_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """North finds the time up and ben absent. Before it writes that, ben answers and south closes with him."""
    found = boxes(tmp_path, 0.2)
    tell(found["north"], "ada")
    over_since(found["north"], 60)
    wanted: list[tuple[str, ...]] = []
    write = found["north"].close_round

    def meanwhile(phase: str, iteration: int, present: tuple[str, ...]) -> None:
        wanted.append(present)
        tell(found["south"], "ben")
        assert members(found["south"]) == ["ada", "ben"]
        write(phase, iteration, present)

    monkeypatch.setattr(found["north"], "close_round", meanwhile)
    assert members(found["north"]) == ["ada", "ben"]
    assert wanted == [("ada",)]
    # A party that is killed before it notes the closing reads the same one again.
    shutil.rmtree(found["north"].folder / "received")
    assert members(boxes(tmp_path, 0.2)["north"]) == ["ada", "ben"]


def test_a_late_closing_of_claims_moves_no_later_round(tmp_path: Path) -> None:
    """West was killed in round 0 and closes its claims when north has closed round 1 without it. Whoever reads the
    closing of round 1 after that must not find it early."""
    found = boxes(tmp_path, 10)
    for box, agent in zip(found.values(), AGENTS, strict=True):
        tell(box, agent)
    assert members(found["north"]) == AGENTS
    past = time.time() - 60
    os.utime(object_file(found["north"], "rounds/000000/answers.json"), (past, past))
    over_since(found["north"], 30, 1)
    tell(found["north"], "ada", 1)
    tell(found["south"], "ben", 1)
    assert members(found["north"], 1) == ["ada", "ben"]
    found["west"].close_round("claims", 0, tuple(AGENTS))
    tell(found["west"], "cat", 1)
    for name in ("south", "west"):
        assert members(found[name], 1) == ["ada", "ben"]
        assert refusals(found[name]) == [("west", "late")]


@pytest.mark.exchange
def test_a_race_at_the_deadline_ends_with_one_set_for_all(tmp_path: Path) -> None:
    """In many rounds at once, west answers about when the time is up: sometimes in, sometimes late, for all alike."""
    found = boxes(tmp_path, 0.5)
    random = Random(0)
    results: dict[tuple[str, int], list[str]] = {}

    def come(iteration: int, delay: float) -> None:
        time.sleep(delay)
        tell(found["west"], "cat", iteration)

    def close(name: str, iteration: int) -> None:
        results[name, iteration] = members(found[name], iteration)

    threads = []
    for iteration in range(16):
        tell(found["north"], "ada", iteration)
        tell(found["south"], "ben", iteration)
        threads.append(threading.Thread(target=come, args=(iteration, random.uniform(0.0, 6.0))))
        threads += [threading.Thread(target=close, args=(name, iteration)) for name in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sets = [{tuple(results[name, i]) for name in found} for i in range(16)]
    assert all(len(one) == 1 for one in sets), sets
    # Both happened, or nothing was tested.
    assert set.union(*sets) == {("ada", "ben"), ("ada", "ben", "cat")}


def test_a_closing_that_nobody_signed_is_refused(tmp_path: Path) -> None:
    found = boxes(tmp_path, 0.2)
    box = found["north"]
    forged = found["south"].message("closing", "", 0, members=("ben",), source="answers")
    raw = json.loads(seal(forged, found["south"]._private))
    raw["message"]["members"] = ["cat"]
    box.bucket.write(box.object_path("rounds/000000/answers.json"), json.dumps(raw).encode())
    tell(box, "ada")
    assert members(box) == ["ada"]
    assert ("south", "altered") in refusals(box)


@pytest.mark.exchange
def test_a_party_that_never_comes_costs_the_others_its_answers_only(
    tmp_path: Path, seed_store: Path, honest: Path
) -> None:
    config = meeting(tmp_path, TWO, **LARGER, exchange={"round_seconds": 1.0})
    north = open_party(config, "north", tmp_path)
    shutil.copytree(honest / "north" / "store", north.home / "store")
    run_party(north)
    assert north.error is None
    assert learned_from(north) == {"ada"}
    assert ("south", "late") in north.reasons()


@pytest.mark.exchange
def test_audit_finds_what_was_not_sampled(honest: Path, tmp_path: Path) -> None:
    south = as_party(meeting(honest, TWO, **LARGER), "south", honest)
    home = Home(honest / "south")
    assert audit_answers(Console(), south, home, "ben", 0) == 0
    lie = Lie(rows_of(honest, "south", "ben"), {})
    lie.tables["answers"][5]["response_text"] = "7"
    shutil.copytree(honest / "keys", tmp_path / "keys")
    from flows.exchange.mailbox import campaign_digest

    config = meeting(tmp_path, TWO, **LARGER)
    publish(lie, honest, tmp_path, campaign_digest(config, 0))
    shutil.copytree(honest / "south" / "store", tmp_path / "auditor" / "store")
    assert audit_answers(Console(), config, Home(tmp_path / "auditor"), "ben", 0) == 1


@pytest.mark.exchange
def test_bytes_of_a_round_are_reported(honest: Path) -> None:
    found = published(meeting(honest, TWO, **LARGER))
    assert set(found) == {("north", 0), ("south", 0)}
    on_disk = sum(p.stat().st_size for p in (honest / "bucket" / "exchange" / "tiny" / "south").rglob("*.*"))
    assert found["south", 0].bytes == on_disk
    assert found["south", 0].kinds == {"commit", "answers", "claims"}


@pytest.mark.exchange
def test_a_party_that_is_killed_again_and_again_costs_the_others_nothing(
    tmp_path: Path, seed_store: Path, central_digests: dict[str, str]
) -> None:
    """``make test-exchange KILLS=100`` kills a hundred times; here it is a few, with and without deadlines."""
    kills = os.environ.get("KILLS", "8")
    command = [sys.executable, "-m", "tests.exchange.kills", "--kills", kills, "--seed-store", str(seed_store)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{kills} kills in " in done.stdout


@pytest.mark.exchange
def test_staleness_is_the_same_for_parties_and_one_process(tmp_path: Path, seed_store: Path) -> None:
    config = meeting(tmp_path, TWO, exchange={"staleness": 1})
    expected = central(config, seed_store)
    parties = [open_party(config, name, tmp_path, seed_store) for name in TWO]
    run_all(parties)
    known: dict[str, str] = {}
    for party in parties:
        assert party.error is None
        known |= party.digests()
    assert known == expected
    fresh = central(meeting(tmp_path, TWO), seed_store)
    assert fresh["generate ada #0"] == expected["generate ada #0"]
    assert fresh["generate ada #1"] != expected["generate ada #1"]


@pytest.mark.exchange
def test_no_claim_at_all(tmp_path: Path, seed_store: Path) -> None:
    """With the naive method nobody needs a sampler's log-prob, and none is in the bucket."""
    config = meeting(tmp_path, TWO, algorithm={"preset": "naive"}, iterations=1)
    expected = central(config, seed_store)
    parties = [open_party(config, name, tmp_path, seed_store) for name in TWO]
    run_all(parties)
    for party in parties:
        assert party.error is None, party.error
        found = party.digests()
        assert {label: expected[label] for label in found} == found
    assert not list((tmp_path / "bucket").rglob("*claims*"))
