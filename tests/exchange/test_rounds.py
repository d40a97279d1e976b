"""Rounds that close without who is late, closings that cheat, parties that are killed, and audits."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from flows.exchange.audit import audit_answers
from flows.exchange.mailbox import Mailbox
from flows.exchange.rounds import Rounds
from flows.exchange.status import published
from flows.home import Home
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.exchange.messages import seal
from tests.exchange.parties import OneParty, as_party, central, meeting, open_party, run_all, run_party
from tests.exchange.test_hostile import LARGER, TWO, Lie, honest, learned_from, publish, rows_of
from tests.patience import patience

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


def test_a_closing_before_its_time_is_a_lie_of_its_author(tmp_path: Path) -> None:
    found = boxes(tmp_path, 3600)
    found["west"].opened(0)
    found["west"].close_round("answers", 0, ("cat",))
    for box, agent in zip(found.values(), AGENTS, strict=True):
        tell(box, agent)
    assert members(found["north"]) == AGENTS
    assert refusals(found["north"]) == [("west", "lie")]
    assert found["north"].quarantined() == {"west": 0}


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
    publish(lie, honest, tmp_path, campaign_digest(config))
    shutil.copytree(honest / "south" / "store", tmp_path / "auditor" / "store")
    assert audit_answers(Console(), config, Home(tmp_path / "auditor"), "ben", 0) == 1


@pytest.mark.exchange
def test_bytes_of_a_round_are_reported(honest: Path) -> None:
    found = published(meeting(honest, TWO, **LARGER))
    assert set(found) == {("north", 0), ("south", 0)}
    on_disk = sum(p.stat().st_size for p in (honest / "bucket" / "exchange" / "tiny" / "south").rglob("*.*"))
    assert found["south", 0].bytes == on_disk
    assert found["south", 0].kinds == {"commit", "answers", "claims"}


KILLED = """
import sys
from pathlib import Path
from tests.exchange.parties import meeting, open_party, run_party
folder = Path(sys.argv[1])
south = open_party(meeting(folder, {"north": ("ada",), "south": ("ben",)}), "south", folder)
run_party(south)
sys.exit(0 if south.error is None else 1)
"""


@pytest.mark.exchange
def test_a_party_that_is_killed_again_and_again_costs_the_others_nothing(
    tmp_path: Path, seed_store: Path, central_digests: dict[str, str]
) -> None:
    """South is killed with SIGKILL at growing intervals until it gets through; the result is as if it never was."""
    kills = int(os.environ.get("KILLS", "6"))
    config = meeting(tmp_path, TWO)
    expected = central(config, seed_store)
    north = open_party(config, "north", tmp_path, seed_store)
    open_party(config, "south", tmp_path, seed_store)
    waiting = threading.Thread(target=run_party, args=(north,))
    waiting.start()
    killed = 0
    ended = time.monotonic() + patience(300)
    pause = 3.0
    while True:
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[2])
        try:
            assert process.wait(timeout=pause if killed < kills else ended - time.monotonic()) == 0
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
            pause += 1.0
    waiting.join()
    south = OneParty("south", as_party(config, "south", tmp_path), tmp_path / "south")
    assert north.error is None
    for party in (north, south):
        found = party.digests()
        assert {label: expected[label] for label in found} == found
    print(f"killed {killed} times")


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
