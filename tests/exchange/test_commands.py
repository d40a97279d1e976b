"""hacrl exchange keygen and status, as a user types them."""

import json
from pathlib import Path

from typer.testing import CliRunner

from flows.cli import app
from flows.exchange.mailbox import Mailbox
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.exchange.messages import Refused
from hacrl_core.exchange.signing import public_key_of, read_key
from tests.exchange.parties import as_party, meeting


def test_keygen_prints_the_public_key_and_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "north.key"
    made = CliRunner().invoke(app, ["exchange", "keygen", str(path)])
    assert made.exit_code == 0
    assert made.stdout.strip() == public_key_of(read_key(path))
    before = path.read_text()
    again = CliRunner().invoke(app, ["exchange", "keygen", str(path)])
    assert again.exit_code == 2
    assert path.read_text() == before


def test_status_shows_who_published_what_and_who_was_refused(tmp_path: Path) -> None:
    config = meeting(tmp_path)
    file = tmp_path / "campaign.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json", exclude_none=True, exclude_unset=True)))
    for name, agent in (("north", "ada"), ("south", "ben")):
        own = as_party(config, name, tmp_path)
        private = (tmp_path / "keys" / f"{name}.key").read_text()
        folder = tmp_path / "home" / "campaigns" / "tiny" / "exchange"
        assert own.exchange.bucket is not None
        box = Mailbox(own, Bucket(own.exchange.bucket), folder, private, lambda line: None)
        box.send(box.message("commit", agent, 0), {})
    box.refuse(Refused("west", "late", "round 1 closed without the answers of cat"), {}, 0)
    shown = CliRunner().invoke(app, ["exchange", "status", str(file), "--home", str(tmp_path / "home")])
    assert shown.exit_code == 0, shown.output
    assert "commit" in shown.stdout
    assert "nothing yet" in shown.stdout
    # People count rounds from 1.
    assert "refused in round 1: west: late: round 1 closed without the answers of cat" in shown.stdout
    rows = [line.split("│")[1].strip() for line in shown.stdout.splitlines() if line.startswith("│")]
    assert rows == ["1"]
    assert "kB per round" in shown.stdout


def test_the_first_round_that_can_be_audited_is_1(tmp_path: Path) -> None:
    file = tmp_path / "campaign.yaml"
    file.write_text(json.dumps(meeting(tmp_path).model_dump(mode="json", exclude_none=True, exclude_unset=True)))
    audit = ["exchange", "audit", str(file), "--agent", "ben", "--home", str(tmp_path / "home"), "--iteration"]
    for number, why in (("0", "greater than or equal to 1"), ("1", "--iteration 1: ben has published no answers")):
        refused = CliRunner().invoke(app, [*audit, number])
        assert refused.exit_code == 2
        assert why in refused.output
