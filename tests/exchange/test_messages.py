"""Messages: an unsigned, altered, replayed, foreign-named one is refused by name; keys are private."""

import base64
import json
import string
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.exchange.mailbox import Mailbox, campaign_digest, path_of
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.errors import ConfigError
from hacrl_core.exchange.messages import Refused, seal
from hacrl_core.exchange.signing import is_signed_by, public_key_of, read_key, sign, write_key
from tests.exchange.parties import as_party, meeting


@pytest.fixture
def boxes(tmp_path: Path) -> dict[str, Mailbox]:
    config = meeting(tmp_path)
    told: list[str] = []
    found = {}
    for name in config.parties:
        own = as_party(config, name, tmp_path)
        private = (tmp_path / "keys" / f"{name}.key").read_text()
        found[name] = Mailbox(own, Bucket(own.exchange.bucket), tmp_path / name, private, told.append)
    return found


def put(boxes: dict[str, Mailbox], raw: bytes, party: str = "south", agent: str = "ben", iteration: int = 1) -> None:
    box = boxes[party]
    box.bucket.write(box.object_path(path_of(party, "commit", agent, iteration)), raw)


def refusal(boxes: dict[str, Mailbox]) -> tuple[str, str]:
    """What north says about ben's commitment in round 1."""
    north = boxes["north"]
    try:
        assert north.find("commit", "ben", 1) is None
    except Refused as refused:
        return refused.party, refused.reason
    [why] = (north.folder / "evidence").glob("*/why.json")
    about = json.loads(why.read_text())
    assert (why.parent / "message.json").exists()
    return about["party"], about["reason"]


def test_a_signed_message_arrives(boxes) -> None:
    south = boxes["south"]
    south.send(south.message("commit", "ben", 1, policy="p", key="k"), {})
    found = boxes["north"].find("commit", "ben", 1)
    assert found is not None
    assert (found.policy, found.key) == ("p", "k")


@pytest.mark.parametrize("change", ["key", "limit"])
def test_a_config_that_rounds_were_not_signed_for_is_refused_and_nobody_blamed(boxes, tmp_path: Path, change) -> None:
    """A campaign would else wait for a message that it has."""
    boxes["south"].send(boxes["south"].message("commit", "ben", 1), {})
    north = boxes["north"]
    assert north.find("commit", "ben", 1) is not None
    if change == "key":
        (tmp_path / "keys" / "south.key").unlink()
        other = meeting(tmp_path)
    else:
        other = meeting(tmp_path, weight_limits={"south": 2.0})
    box = Mailbox(as_party(other, "north", tmp_path), north.bucket, north.folder, "", pytest.fail)
    with pytest.raises(ConfigError, match=r"round 2: south: .* by this config; .*: restore them"):
        box.find("commit", "ben", 1)
    assert not (north.folder / "evidence").exists()


def test_unsigned(boxes) -> None:
    message = boxes["south"].message("commit", "ben", 1)
    put(boxes, json.dumps({"message": message.model_dump(mode="json")}).encode())
    assert refusal(boxes) == ("south", "unsigned")


@pytest.mark.parametrize("field", ["policy", "key", "iteration", "campaign"])
def test_altered(boxes, field: str) -> None:
    south = boxes["south"]
    body = json.loads(seal(south.message("commit", "ben", 1, policy="p"), south._private))
    body["message"][field] = 7 if field == "iteration" else "other"
    put(boxes, json.dumps(body).encode())
    assert refusal(boxes) == ("south", "altered")


def test_garbage(boxes) -> None:
    put(boxes, b"\x00[[[")
    assert refusal(boxes) == ("south", "altered")


def test_replayed_from_another_round(boxes) -> None:
    south = boxes["south"]
    put(boxes, seal(south.message("commit", "ben", 0), south._private))
    assert refusal(boxes) == ("south", "replayed")


def test_replayed_from_another_campaign(boxes) -> None:
    south = boxes["south"]
    message = south.message("commit", "ben", 1).model_copy(update={"campaign": "0" * 64})
    put(boxes, seal(message, south._private))
    assert refusal(boxes) == ("south", "replayed")


def test_a_replay_by_somebody_else_does_not_frame_the_party(boxes) -> None:
    """Whoever writes to the bucket can copy a signed message; its author puts the right one in its place again."""
    south, north = boxes["south"], boxes["north"]
    put(boxes, seal(south.message("commit", "ben", 0), south._private))
    assert refusal(boxes) == ("south", "replayed")
    assert north.quarantined() == {}
    south.send(south.message("commit", "ben", 1, policy="p"), {})
    found = north.find("commit", "ben", 1)
    assert found is not None
    assert found.policy == "p"


def test_foreign_named_names_the_signer(boxes) -> None:
    west = boxes["west"]
    put(boxes, seal(boxes["south"].message("commit", "ben", 1), west._private))
    assert refusal(boxes) == ("west", "foreign-named")


def test_about_an_agent_of_another_party(boxes) -> None:
    south = boxes["south"]
    put(boxes, seal(south.message("commit", "cat", 1), south._private))
    assert refusal(boxes) == ("south", "foreign-named")


def test_what_stands_in_our_place_is_replaced(boxes) -> None:
    put(boxes, b"{}")
    south = boxes["south"]
    south.send(south.message("commit", "ben", 1, policy="p"), {})
    found = boxes["north"].find("commit", "ben", 1)
    assert found is not None
    assert found.policy == "p"


def test_an_altered_table_is_refused(boxes) -> None:
    from flows.exchange.mailbox import table_of

    south, north = boxes["south"], boxes["north"]
    south.send(
        south.message("claims", "ben", 1, tables=(table_of("claims.parquet", b"one"),)), {"claims.parquet": b"two"}
    )
    message = north.find("claims", "ben", 1)
    assert message is not None
    with pytest.raises(Refused, match="south: altered"):
        north.fetch(message, "claims.parquet")


def test_an_object_that_is_too_large_is_not_even_downloaded(boxes, monkeypatch) -> None:
    put(boxes, b"x" * 1_000_000)
    monkeypatch.setattr(boxes["north"].bucket, "read", lambda path: pytest.fail("it was downloaded"))
    assert refusal(boxes) == ("south", "altered")


def test_a_table_that_is_larger_than_signed_is_not_downloaded(boxes) -> None:
    from flows.exchange.mailbox import table_of

    south, north = boxes["south"], boxes["north"]
    south.send(
        south.message("claims", "ben", 1, tables=(table_of("claims.parquet", b"one"),)), {"claims.parquet": b"one" * 9}
    )
    message = north.find("claims", "ben", 1)
    assert message is not None
    north.bucket.read = lambda path: pytest.fail("it was downloaded")
    with pytest.raises(Refused, match="south: altered"):
        north.fetch(message, "claims.parquet")


@pytest.mark.parametrize("rows", [1, 400_000])
def test_a_table_that_unpacks_to_gigabytes_is_refused_before_it_is_unpacked(boxes, rows: int, monkeypatch) -> None:
    """A few kilobytes of Parquet can hold a text of half a gigabyte, or a great many short ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from flows.exchange.receiving import read_answers_of
    from hacrl_core.contracts.tables import ANSWERS

    text = "0" * (64_000_000 // rows)
    columns = {
        field.name: pa.array([text if field.type == pa.string() else 0] * rows, type=field.type)
        for field in ANSWERS.fields
    }
    buffer = pa.BufferOutputStream()
    table = pa.table(columns, schema=ANSWERS.fields.with_metadata({b"hacrl.schema": ANSWERS.tag.encode()}))
    pq.write_table(table, buffer, compression="zstd")
    data = buffer.getvalue().to_pybytes()
    assert len(data) < 1_000_000
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *a, **k: pytest.fail("it was unpacked"))
    south = boxes["south"]
    with pytest.raises(Refused, match="south: spam"):
        read_answers_of(data, south.message("answers", "ben", 0), ["p"], south.config)


def test_an_agent_that_joins_later_changes_no_earlier_round(tmp_path: Path) -> None:
    from tests.exchange.parties import AGENTS

    two = meeting(tmp_path, {"north": ("ada",), "south": ("ben",)})
    later = meeting(
        tmp_path, agents={**AGENTS, "ben": {**AGENTS["ben"], "leaves": 5}, "cat": {**AGENTS["cat"], "joins": 2}}
    )
    for iteration in (0, 1):
        assert campaign_digest(two, iteration) == campaign_digest(later, iteration)
    assert len({campaign_digest(later, iteration) for iteration in (1, 2, 5)}) == 3
    assert campaign_digest(two, 0) != campaign_digest(two.model_copy(update={"seed": 9}), 0)


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    public = write_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert public_key_of(read_key(path)) == public
    signature = sign(read_key(path), b"x")
    assert is_signed_by(public, b"x", signature)
    assert not is_signed_by(public, b"y", signature)
    with pytest.raises(ConfigError, match="exists already"):
        write_key(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(path)


def test_configs_that_do_not_fit(tmp_path: Path) -> None:
    from pydantic import ValidationError

    from hacrl_core.config.campaign import CampaignConfig

    raw = meeting(tmp_path).model_dump(mode="json")
    bucket = raw["exchange"]["bucket"]
    inside, around = ({"bucket": name} for name in (f"{bucket['bucket']}/store", f"file://{tmp_path}"))
    for change, words in (
        ({"party": {"name": "east"}}, "the parties are north, south, west"),
        ({"party": {"name": "north", "agents": ["ben"]}}, "make them equal"),
        ({"parties": {"north": {**raw["parties"]["north"], "public_key": "x"}}}, "is no public key"),
        ({"parties": {"north": raw["parties"]["north"]}}, "exactly one party"),
        ({"party": {"name": "north"}, "store": bucket}, "holds weights"),
        ({"party": {"name": "north"}, "store": inside}, "holds weights"),
        ({"party": {"name": "north"}, "store": around}, "holds weights"),
    ):
        with pytest.raises(ValidationError, match=words):
            CampaignConfig.model_validate({**raw, **change})
    beside = {"bucket": f"{bucket['bucket']}-store"}
    CampaignConfig.model_validate({**raw, "party": {"name": "north"}, "store": beside})


def test_two_parties_with_one_key_are_refused(tmp_path: Path) -> None:
    """Else each could sign for the other. The last letter of a key has bits that no key uses: it has one text only."""
    raw = meeting(tmp_path).model_dump(mode="json")
    key = raw["parties"]["north"]["public_key"]
    letters = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    disguised = key[:-2] + letters[letters.index(key[-2]) ^ 1] + "="
    assert base64.b64decode(disguised[8:]) == base64.b64decode(key[8:])
    file = tmp_path / "campaign.yaml"
    for same, words in (
        (key, f"parties.south.public_key {key}: it is also that of north"),
        (disguised, "is no public key"),
    ):
        raw["parties"]["south"]["public_key"] = same
        file.write_text(json.dumps(raw))
        refused = CliRunner().invoke(app, ["exchange", "status", str(file), "--home", str(tmp_path / "home")])
        assert refused.exit_code == 2
        assert words in " ".join(refused.output.split())


def test_a_checkpoint_of_another_party_need_not_be_here(tmp_path: Path) -> None:
    from flows.stage_calls import StageCalls
    from hacrl_core.config.campaign import CampaignConfig

    raw = as_party(meeting(tmp_path), "north", tmp_path).model_dump(mode="json")
    raw["agents"]["ben"] = {"checkpoint": {"path": "/no/such/folder/of/south"}}
    calls = StageCalls(CampaignConfig.model_validate(raw))
    assert calls.origin("ben").stage == "adopt"
    with pytest.raises(ConfigError, match="no such folder"):
        StageCalls(CampaignConfig.model_validate({**raw, "party": None})).origin("ben")
