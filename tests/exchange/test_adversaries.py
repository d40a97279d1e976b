"""Adversaries that know the code: what they write is refused by name or bounded, and never harms who reads it."""

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from flows.cli import app
from flows.exchange.mailbox import Mailbox, path_of, table_of
from flows.exchange.status import other_stories, published
from flows.home import Home
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.manifest import canonical_json
from hacrl_core.errors import ConfigError
from hacrl_core.exchange.messages import Message, Refused, seal
from hacrl_core.exchange.signing import sign
from tests.exchange.parties import as_party, meeting
from tests.exchange.test_rounds import AGENTS, boxes, members, object_file, over_since, refusals, tell

SECONDS = 0.2
CLOSING = "rounds/000000/answers.json"


def put(box: Mailbox, raw: bytes, place: str) -> None:
    """Write an object as somebody who needs no key for that."""
    box.bucket.write(box.object_path(place), raw)


def signed(box: Mailbox, body: object) -> bytes:
    """What a party signs need not be a message."""
    raw = {"message": body, "signature": sign(box._private, canonical_json(body).encode())}
    return canonical_json(raw).encode()


def everything_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).parts[0] for path in folder.rglob("*")}


# -- somebody without a key -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps({"message": {"party": "../../../outside/x"}}).encode(),
        json.dumps({"message": {"party": "nul\x00l"}}).encode(),
        json.dumps({"message": {"party": "n" * 5000}}).encode(),
        b'{"message":' + b"[" * 60_000,
        b"\xff\xfe\x00",
        b"",
        b"[]",
        b'{"message":{"party":["north"]},"signature":7}',
    ],
    ids=["path", "nul", "long", "deep", "bytes", "empty", "list", "types"],
)
def test_a_closing_made_to_harm_its_reader(tmp_path: Path, raw: bytes) -> None:
    found = boxes(tmp_path / "meeting", SECONDS)
    north = found["north"]
    put(north, raw, CLOSING)
    tell(north, "ada")
    assert members(north) == ["ada"]
    assert everything_in(tmp_path) == {"meeting"}
    assert all(party in ("somebody", *found) for party, _ in refusals(north))
    assert north.quarantined() == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.decode().encode("utf-16"),
        lambda raw: b"\xef\xbb\xbf" + raw,
        lambda raw: raw + b"\n",
        lambda raw: raw.replace(b'{"message"', b'{"more":1,"message"'),
        lambda raw: raw.replace(b'"kind":"answers"', b'"kind":"commit","kind":"answers"'),
        lambda raw: raw.replace(raw[-5:-2], bytes([raw[-5] + 1]) + b"=="),
    ],
    ids=["utf-16", "mark", "line", "field", "twice", "signature"],
)
def test_a_signed_message_has_one_form(tmp_path: Path, change) -> None:
    """Readers that parse the same bytes differently would see different messages under one signature."""
    found = boxes(tmp_path, SECONDS)
    raw = seal(found["south"].message("answers", "ben", 0), found["south"]._private)
    assert change(raw) != raw
    put(found["south"], change(raw), path_of("south", "answers", "ben", 0))
    assert found["north"].find("answers", "ben", 0) is None
    assert refusals(found["north"]) == [("south", "altered")]
    put(found["south"], raw, path_of("south", "answers", "ben", 0))
    assert found["north"].find("answers", "ben", 0) is not None


def test_a_closing_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is what was checked, also where somebody puts another one into its place in that moment."""
    found = boxes(tmp_path, 3600)
    for box, agent in zip(found.values(), AGENTS, strict=True):
        tell(box, agent)
    found["south"].close_round("answers", 0, tuple(AGENTS))
    north, check = found["north"], Mailbox.keep_closing

    def swap(box: Mailbox, *what) -> None:
        put(box, b'{"message":{"members":["cat"]}}', CLOSING)
        check(box, *what)

    monkeypatch.setattr(Mailbox, "keep_closing", swap)
    assert members(north) == AGENTS
    assert members(boxes(tmp_path, 3600)["north"]) == AGENTS


def test_an_object_that_grows_after_its_size_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    north = boxes(tmp_path, SECONDS)["north"]
    place = path_of("south", "answers", "ben", 0)
    put(north, b"{}", place)
    small = north.bucket.stat(north.object_path(place))
    put(north, b"x" * 10_000_000, place)
    monkeypatch.setattr(north.bucket, "stat", lambda path: small)
    assert north._read(place, "south", 1 << 16) is None


@pytest.mark.parametrize("request_", ["head", "get"])
def test_an_object_that_only_its_author_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    """Buckets let authors keep their objects to themselves. Whoever asks must not take that for wrong credentials."""
    found = boxes(tmp_path, SECONDS)
    north = found["north"]
    for box, agent in zip(found.values(), AGENTS, strict=True):
        tell(box, agent)
    locked = {north.object_path(path_of("south", "answers", "ben", 0)), north.object_path(CLOSING)}
    library = north.bucket._library
    ask = getattr(library, request_)

    def guarded(store: object, path: str) -> object:
        if path in locked:
            raise library.exceptions.PermissionDeniedError("403 Forbidden")
        return ask(store, path)

    put(north, b"locked", CLOSING)
    monkeypatch.setattr(library, request_, guarded)
    assert members(north) == ["ada", "cat"]
    assert ("somebody", "altered") in refusals(north)
    assert north.quarantined() == {}
    # Who may read nothing at all is told so.
    monkeypatch.setattr(library, "head", lambda store, path: guarded(store, min(locked)))
    monkeypatch.setattr(library, "get", lambda store, path: guarded(store, min(locked)))
    with pytest.raises(ConfigError, match="it refuses these credentials"):
        boxes(tmp_path, SECONDS)["west"].find("answers", "ada", 0)


def test_strange_objects_in_the_bucket_do_not_end_the_status(tmp_path: Path) -> None:
    north = boxes(tmp_path, SECONDS)["north"]
    tell(north, "ada")
    for place in (
        "loose",
        "north/1/2/3/4.json",
        "north/x/ada.json",
        "north/0/ada",
        "north/000000/json",
        "x/000000/y.z",
    ):
        put(north, b"?", place)
    assert set(published(north.config)) == {("north", 0)}


# -- a party ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"party": "../../../outside/x", "agent": "eve"}, "foreign-named"),
        ({"party": "north", "agent": "ada"}, "foreign-named"),
        ({"party": "nоrth"}, "foreign-named"),  # a Cyrillic o
        ({"agent": "\x1b]0;owned\x07[/bold]" + "a" * 50_000}, "foreign-named"),
        ({"agent": "bеn"}, "foreign-named"),  # a Cyrillic e
        ({"iteration": 10**4200}, "unfounded"),
        ({"iteration": -1}, "unfounded"),
        ({"\x1b[2J": 1}, "unfounded"),
        ({"tables": [{"path": "answers.parquet", "sha256": "", "bytes": -(10**12)}]}, "unfounded"),
        ({"version": 2}, "unfounded"),
    ],
)
def test_a_party_that_signs_something_odd(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    """It is named itself, whatever it says about its name, and its words do nothing on a terminal or a disk."""
    (tmp_path / "meeting").mkdir()
    found = boxes(tmp_path / "meeting", SECONDS)
    south, north = found["south"], found["north"]
    told: list[str] = []
    north._warn = told.append
    body = {**south.message("answers", "ben", 0).model_dump(mode="json"), **change}
    put(south, signed(south, body), path_of("south", "answers", "ben", 0))
    with suppress(Refused):
        assert north.find("answers", "ben", 0) is None
    assert refusals(north) == [("south", reason)]
    assert everything_in(tmp_path) == {"meeting"}
    assert all(line.isprintable() and len(line) < 1000 for line in told)
    assert told


def test_words_of_others_are_not_read_as_markup(tmp_path: Path) -> None:
    config = meeting(tmp_path)
    (tmp_path / "campaign.yaml").write_text(
        json.dumps(config.model_dump(mode="json", exclude_none=True, exclude_unset=True))
    )
    own = as_party(config, "north", tmp_path)
    assert own.exchange.bucket is not None
    folder = tmp_path / "home" / "campaigns" / "tiny" / "exchange"
    box = Mailbox(own, Bucket(own.exchange.bucket), folder, "", lambda line: None)
    box.refuse(Refused("south", "altered", "it is about [/nobody] and [red]"), {}, 0)
    shown = CliRunner().invoke(
        app, ["exchange", "status", str(tmp_path / "campaign.yaml"), "--home", str(tmp_path / "home")]
    )
    assert shown.exit_code == 0, shown.output
    assert "it is about [/nobody] and [red]" in shown.stdout


def test_words_that_change_with_every_look_fill_no_disk(tmp_path: Path) -> None:
    found = boxes(tmp_path, SECONDS)
    south, north = found["south"], found["north"]
    for number in range(40):
        body = {**south.message("answers", "ben", 0).model_dump(mode="json"), "agent": f"eve-{number}"}
        put(south, signed(south, body), path_of("south", "answers", "ben", 0))
        assert north.find("answers", "ben", 0) is None
    assert 1 <= len(refusals(north)) <= 10


def test_who_was_there_in_time_cannot_be_left_out(tmp_path: Path) -> None:
    """West answers at the last moment, so that the round is open until then, and closes it without ben."""
    found = boxes(tmp_path, 20)
    over_since(found["north"], 60)
    for name, agent in (("north", "ada"), ("south", "ben"), ("west", "cat")):
        tell(found[name], agent)
        then = time.time() - (58 if agent != "cat" else 41)
        os.utime(object_file(found[name], path_of(name, "answers", agent, 0)), (then, then))
    found["west"].close_round("answers", 0, ("ada", "cat"))
    assert members(found["north"]) == AGENTS
    assert members(found["south"]) == AGENTS
    for name in ("north", "south"):
        assert refusals(found[name]) == [("west", "altered")]
    # Who came when the time was up may be left out: nobody knows what the one who closed could see.
    late = time.time() - 39
    os.utime(object_file(found["south"], path_of("south", "answers", "ben", 0)), (late, late))
    again = boxes(tmp_path, 20)["west"]
    assert members(again) == ["ada", "cat"]


def test_a_false_closing_splits_nobody(tmp_path: Path) -> None:
    """West names ben, who has not answered. North looks before ben does, south after that; both decide alike."""
    found = boxes(tmp_path, 20)
    over_since(found["north"], 60)
    tell(found["north"], "ada")
    tell(found["west"], "cat")
    for name, agent, ago in (("north", "ada", 58), ("west", "cat", 58)):
        then = time.time() - ago
        os.utime(object_file(found[name], path_of(name, "answers", agent, 0)), (then, then))
    found["west"].close_round("answers", 0, tuple(AGENTS))
    then = time.time() - 41
    os.utime(object_file(found["west"], CLOSING), (then, then))
    assert members(found["north"]) == ["ada", "cat"]
    tell(found["south"], "ben")
    assert members(found["south"]) == ["ada", "cat"]
    for name in ("north", "south"):
        assert ("west", "altered") in refusals(found[name])


def test_a_party_whose_own_clock_is_wrong_closes_nothing_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = boxes(tmp_path, 3600)
    tell(found["north"], "ada")
    result: list[list[str]] = []
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1e6)
    waiting = threading.Thread(target=lambda: result.append(members(found["north"])))
    waiting.start()
    time.sleep(0.5)
    assert not object_file(found["north"], CLOSING).exists()
    tell(found["south"], "ben")
    tell(found["west"], "cat")
    waiting.join()
    assert result == [AGENTS]


def test_two_stories_are_told_apart(tmp_path: Path) -> None:
    """South shows north one message and west another. Both are signed; who looks at the bucket again sees it."""
    found = boxes(tmp_path, SECONDS)
    home = Home(tmp_path / "home")
    folder = home.campaign("tiny") / "exchange"
    north = Mailbox(found["north"].config, found["north"].bucket, folder, "", lambda line: None)
    south, place = found["south"], path_of("south", "commit", "ben", 0)
    put(south, seal(south.message("commit", "ben", 0, policy="one"), south._private), place)
    assert north.find("commit", "ben", 0) is not None
    assert list(other_stories(north.config, home)) == []
    put(south, b"damaged by somebody", place)
    assert list(other_stories(north.config, home)) == []
    put(south, seal(south.message("commit", "ben", 0, policy="two"), south._private), place)
    [line] = other_stories(north.config, home)
    assert line.startswith("round 1: south has signed another commit of ben")


def test_an_earlier_message_of_ones_own_is_replaced(tmp_path: Path) -> None:
    """From a campaign with the same config elsewhere: signed by us and for this place, about tables that are gone."""
    found = boxes(tmp_path, SECONDS)
    south = found["south"]
    old = south.message("claims", "ben", 0, tables=(table_of("claims.parquet", b"old"),))
    put(south, seal(old, south._private), path_of("south", "claims", "ben", 0))
    new = south.message("claims", "ben", 0, tables=(table_of("claims.parquet", b"new"),))
    south.send(new, {"claims.parquet": b"new"})
    message = found["north"].find("claims", "ben", 0)
    assert message == new
    assert found["north"].fetch(new, "claims.parquet") == b"new"


def test_a_campaign_of_the_same_name_is_another_one(tmp_path: Path) -> None:
    """Same name, parties, keys and bucket; another seed. What was signed for one is a replay in the other."""
    found = boxes(tmp_path, SECONDS)
    tell(found["south"], "ben")
    other = CampaignConfig.model_validate({**found["north"].config.model_dump(mode="json"), "seed": 77})
    north = Mailbox(other, found["north"].bucket, tmp_path / "other", "", lambda line: None)
    assert north.find("answers", "ben", 0) is None
    assert refusals(north) == [("south", "replayed")]
    assert north.quarantined() == {}


def test_names_that_look_alike_and_agents_of_two_parties(tmp_path: Path) -> None:
    raw = meeting(tmp_path).model_dump(mode="json")
    north = raw["parties"]["north"]
    for parties in (
        {**raw["parties"], "nоrth": raw["parties"]["south"]},
        {**raw["parties"], "west": {**raw["parties"]["west"], "agents": ["cat", "ada"]}},
        {**raw["parties"], "north": {**north, "agents": ["ada", "аda"]}},
    ):
        with pytest.raises(ValidationError):
            CampaignConfig.model_validate({**raw, "parties": parties})


def test_evidence_is_signed(tmp_path: Path) -> None:
    """Whoever is shown the evidence can check who signed it."""
    from hacrl_core.exchange.messages import unseal

    found = boxes(tmp_path, SECONDS)
    south, north = found["south"], found["north"]
    south.send(
        south.message("claims", "ben", 0, tables=(table_of("claims.parquet", b"one"),)), {"claims.parquet": b"2"}
    )
    message = north.find("claims", "ben", 0)
    assert isinstance(message, Message)
    with pytest.raises(Refused):
        north.fetch(message, "claims.parquet")
    [file] = (north.folder / "evidence").glob("*/message.json")
    assert unseal(file.read_bytes(), "south", north.keys, "evidence") == message
