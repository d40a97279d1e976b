"""A damaged record: no command ends in a traceback, nothing altered is believed, and the next run repairs it."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.home import Home
from flows.record import lines
from flows.record import record as record_module
from flows.record.lines import Entry, read_lines, sealed_line
from flows.record.record import Record, read_campaign, read_entries
from flows.store.gc import plan
from flows.store.pins import pin
from flows.store.running import collector
from flows.store.survey import survey
from hacrl_core.artifacts import Store
from hacrl_core.config.operation import KeepConfig
from tests.views.conftest import run_recorded, seen_config

COMMANDS = (
    "status", "status --all", "store verify", "store gc --grace 0", "store ls", "store ls --versions", "store du",
    "report --no-pictures", "logs", "rollouts",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_reported", set())


def small_record(folder: Path) -> tuple[bytes, list[Entry]]:
    made = [
        Entry(f"verify ada #{i}", "verify", f"{i:064x}", "ada", i, "", cached=bool(i % 2), seconds=0.25 * i, at=1e9 + i)
        for i in range(3)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(sealed_line(asdict(entry)) for entry in made).encode()
    (folder / "stages.jsonl").write_bytes(text)
    return text, made


def without_digests(path: Path) -> None:
    """The record as earlier versions wrote it."""
    rows, _ = read_lines(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_flipped_bit_of_a_record_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, made = small_record(tmp_path)
    told: list[int] = []
    monkeypatch.setattr(record_module, "report_unreadable", lambda path, number, remedy: told.append(number))
    assert read_entries(tmp_path) == made
    for place in range(len(text)):
        for bit in range(8):
            raw = bytearray(text)
            raw[place] ^= 1 << bit
            (tmp_path / "stages.jsonl").write_bytes(raw)
            told.clear()
            found = read_entries(tmp_path)
            assert all(entry in made for entry in found), (place, bit, "an altered entry was believed")
            assert told or found == made, (place, bit, "a line was lost in silence")


def test_random_damage_of_many_bytes_is_noticed(tmp_path: Path) -> None:
    text, made = small_record(tmp_path)
    dice = random.Random(3)
    for _ in range(1500):
        raw = bytearray(text)
        for _ in range(dice.randint(1, 6)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        (tmp_path / "stages.jsonl").write_bytes(raw)
        assert all(entry in made for entry in read_entries(tmp_path))


def test_lines_without_a_digest_are_read_as_before(seen: Home, own: Home) -> None:
    path = own.campaign("seen") / "stages.jsonl"
    without_digests(path)
    assert "sha256" not in path.read_text()
    assert read_entries(own.campaign("seen")) == read_entries(seen.campaign("seen"))
    before = path.read_bytes()
    run_recorded(seen_config(), own)
    assert path.read_bytes() == before


def test_a_line_that_a_crash_cut_off_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, made = small_record(tmp_path)
    for cut in (1, 60, 200):
        (tmp_path / "stages.jsonl").write_bytes(text[:-cut])
        assert read_entries(tmp_path) == (made if cut == 1 else made[:-1])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("field", ["../../../outside", "/etc", "", "g" * 64, None, 3])
def test_a_line_cannot_name_a_folder_outside_the_store(tmp_path: Path, field: object) -> None:
    _, made = small_record(tmp_path)
    for name in ("stage", "key"):
        (tmp_path / "stages.jsonl").write_text(sealed_line({**asdict(made[0]), name: field}))
        found = read_entries(tmp_path)
        assert found == [] or (name == "stage" and found[0].stage == "g" * 64)


# -- every command -----------------------------------------------------------------------------------------------------


def damage_names(raw: bytearray, dice: random.Random) -> None:
    """A field's name: ``Entry`` does not know the changed one."""
    place = raw.index(b'"agent"', dice.randrange(len(raw) // 2)) + 1
    raw[place] ^= 1


def damage_bytes(raw: bytearray, dice: random.Random) -> None:
    """A byte that no text has."""
    raw[dice.randrange(len(raw))] |= 0x80


def damage_types(raw: bytearray, dice: random.Random) -> None:
    """Lines that are JSON and no objects."""
    raw[:0] = b'[]\n"text"\n3\nnull\n{"key": 1}\n{"label": [], "key": {}}\n'


def damage_bits(raw: bytearray, dice: random.Random) -> None:
    for _ in range(5):
        raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)


@pytest.mark.parametrize("damage", [damage_names, damage_bytes, damage_types, damage_bits])
@pytest.mark.parametrize("old", [False, True], ids=["with digests", "without"])
def test_no_command_ends_in_a_traceback(
    own: Home, damage: Callable[[bytearray, random.Random], None], old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own.campaign("seen") / "stages.jsonl"
    if old:
        without_digests(path)
    raw = bytearray(path.read_bytes())
    damage(raw, random.Random(11))
    path.write_bytes(raw)
    monkeypatch.setenv("COLUMNS", "300")
    for command in COMMANDS:
        lines._reported.clear()
        done = CliRunner().invoke(app, [*command.split(), "--home", str(own.root)])
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)
        assert done.exit_code in (0, 2), (command, done.output)
        if command == "status" and (not old or damage is not damage_bits):
            assert done.output.count("cannot be read") == 1, done.output


def test_the_next_run_repairs_the_record_and_computes_nothing(
    seen: Home, own: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own.campaign("seen") / "stages.jsonl"
    good = read_entries(seen.campaign("seen"))
    raw = bytearray(path.read_bytes())
    raw[5] ^= 0x40
    raw[len(raw) // 2] ^= 0x80
    path.write_bytes(raw)
    run_recorded(seen_config(), own)
    capsys.readouterr()
    lines._reported.clear()
    repaired = read_entries(own.campaign("seen"))
    assert capsys.readouterr().err == ""
    assert {(e.label, e.key) for e in repaired} == {(e.label, e.key) for e in good}
    assert sum(entry.cached for entry in repaired) == 2


# -- clean-up ----------------------------------------------------------------------------------------------------------


def test_nothing_is_garbage_while_a_record_cannot_be_read_to_its_end(own: Home) -> None:
    path, store = own.campaign("seen") / "stages.jsonl", Store(own.store)
    good = path.read_bytes()
    place = good.index(b'"key": "') + 12
    path.write_bytes(good[:place] + (b"0" if good[place : place + 1] != b"0" else b"1") + good[place + 1 :])
    assert plan(own, store, None, None, grace=-60) == []
    assert not survey(own, store).whole
    path.write_bytes(good)
    assert survey(own, store).whole


def test_nothing_is_garbage_while_a_record_is_gone(own: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """Deleted by hand, or taken by a power cut; the campaign's next run writes it anew."""
    (own.campaign("seen") / "stages.jsonl").unlink()
    assert plan(own, Store(own.store), None, None, grace=-60) == []
    assert "stages.jsonl: missing, so that nothing counts as garbage" in capsys.readouterr().err
    shutil.rmtree(own.campaign("seen"))
    assert plan(own, Store(own.store), None, None, grace=-60)  # without the campaign its artifacts are nobody's


def test_no_version_is_collected_while_a_config_is_gone(own: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody knows which versions it keeps; the command says so, and the campaign's next run writes it anew."""
    policy, config = KeepConfig(last=1), own.campaign("seen") / "config.json"
    collected = {one.kind for one in plan(own, Store(own.store), policy, None, grace=3600)}
    assert collected == {"version"}
    text = config.read_bytes()
    config.unlink()
    assert plan(own, Store(own.store), policy, None, grace=-60) == []
    assert "config.json: missing, so that all that the campaign recorded stays" in capsys.readouterr().err
    config.write_bytes(text)
    assert {one.kind for one in plan(own, Store(own.store), policy, None, grace=3600)} == collected


def without_process(name: str) -> str:
    """Return a draft's name without the process and thread that wrote it."""
    return re.sub(r"\.\d+-\d+\.draft$", ".draft", name)


def test_a_record_and_its_config_are_on_the_disk_when_a_run_ends(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their names: a power cut takes a new name whose folder was not synced after it was made."""
    done, fsync, replace = list[str](), os.fsync, os.replace

    def noting(handle: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append(without_process(str(place.relative_to(own.root))))
        fsync(handle)

    def renaming(old: Path, new: Path) -> None:
        done.append(f"renamed {new.relative_to(own.root)}")
        assert (own.campaign("new") / "stages.jsonl").exists()  # so the folder's sync below holds for its name as well
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", renaming)
    config = read_campaign(own.campaign("seen")).model_copy(update={"name": "new"})
    with Record(own.campaign("new"), config):
        assert done == [
            "campaigns/new/.config.json.draft",
            "renamed campaigns/new/config.json",
            "campaigns/new",
            "campaigns",
            ".",
        ]
    assert done[-1] == "campaigns/new/stages.jsonl"


def test_a_pin_is_on_the_disk_when_the_command_ends(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[str](), os.fsync

    def noting(handle: int) -> None:
        synced.append(without_process(Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noting)
    pin(own, "seen/ada@0")
    assert synced == [".pins.json.draft", "seen"]


def test_the_collector_of_a_healthy_campaign_survives_the_damaged_record_of_another(own: Home) -> None:
    broken = own.campaign("broken")
    shutil.copytree(own.campaign("seen"), broken)
    shutil.copyfile(broken / "stages.jsonl", broken / "whole")
    told: list[str] = []
    config = read_campaign(own.campaign("seen")).model_copy(update={"keep": KeepConfig(last=1)})
    dice = random.Random(5)
    with Record(own.campaign("seen"), config) as record:
        record._now = {entry.label: entry for entry in read_entries(own.campaign("seen"))}
        collect = collector(own, Store(own.store), record, told.append)
        for damage in (damage_names, damage_bytes, damage_types, damage_bits):
            raw = bytearray((broken / "whole").read_bytes())
            damage(raw, dice)
            (broken / "stages.jsonl").write_bytes(raw)
            collect(3)
    assert told == []
