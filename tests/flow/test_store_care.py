"""A real tiny campaign, damaged, collected and cleaned up in every way, and gone on with."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from flows.agents.evaluate import evaluate_agent
from flows.agents.find import Changes
from flows.home import Home
from flows.record.record import Record
from flows.store import pins
from flows.store.gc import carry_out, plan
from flows.store.inspect import verify_store
from hacrl_core.artifacts import Store
from hacrl_core.config.operation import KeepConfig
from hacrl_core.contracts.manifest import SEAL, digest_of
from hacrl_core.errors import ConfigError, NewerArtifactError
from tests.flow.conftest import tiny
from tests.flow.homes import digests, home_over, of_label, own_copy, run_here, weights
from tests.patience import patience

pytestmark = pytest.mark.slow
ITERATIONS = 4


@pytest.fixture(scope="module")
def finished(shared_store, tmp_path_factory) -> Home:
    """A finished campaign of four iterations, evaluated after each other: not to be changed."""
    home = home_over(shared_store, tmp_path_factory.mktemp("finished"))
    run_here(campaign(), home)
    return home


@pytest.fixture
def home(finished, tmp_path) -> Home:
    return own_copy(finished, "tiny", tmp_path / "home")


def campaign(**changes):
    base = tiny()
    evaluate = base.evaluate.model_dump(mode="json") | {"every": 2}
    return tiny(**{"iterations": ITERATIONS, "evaluate": evaluate, **changes})


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"), width=200)


def spoken() -> Console:
    return Console(record=True, file=open(os.devnull, "w"), width=300)


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(folder: Path) -> None:
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(folder: Path) -> None:
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)


def lose_file(folder: Path) -> None:
    max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size).unlink()


def half_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 200)


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def lose_all(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("damage", [flip, truncate, lose_file, half_manifest, lose_manifest, lose_all])
def test_damage_of_any_kind_is_found_by_verify_and_mended_bit_for_bit_by_the_next_run(home, finished, damage, capsys):
    hit = ["update ben #2", "generate ada #1", "credit ben #3"]
    for label in hit:
        damage(of_label(home, "tiny", label))
    console = spoken()
    assert verify_store(console, home, repair=False) == (0 if damage is lose_all else 1)
    said = console.export_text()
    assert ("3 in campaigns' records are missing" if damage is lose_all else "3 damaged") in said
    assert sorted(run_here(campaign(), home)) == sorted(hit)  # what depends on them is not run again
    assert capsys.readouterr().out.count("damaged artifact set aside") == (0 if damage is lose_all else 3)
    assert digests(home, "tiny") == digests(finished, "tiny")
    assert verify_store(quiet(), home, repair=False) == 0


def test_repair_sets_damage_aside_and_says_so_with_an_exit_code(home, finished):
    flip(of_label(home, "tiny", "score ada #0"))
    assert verify_store(quiet(), home, repair=True) == 1
    assert len(list((home.store / "damaged").iterdir())) == 1
    assert verify_store(quiet(), home, repair=False) == 0
    assert run_here(campaign(), home) == ["score ada #0"]


@pytest.mark.parametrize("what", ["manifest", "table"])
def test_an_artifact_of_a_newer_version_stops_the_run_and_is_left_alone(home, what):
    folder = of_label(home, "tiny", "verify ada #1")
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    if what == "manifest":
        raw["manifest_version"] = 2
    else:
        raw["outputs"] = [{**o, "kind": o["kind"].replace("verdicts/1", "verdicts/9")} for o in raw["outputs"]]
    del raw["details"][SEAL]
    raw["details"][SEAL] = digest_of(raw)
    path.write_text(json.dumps(raw))
    before = path.read_bytes()
    with pytest.raises(NewerArtifactError, match=r"written by a newer hacrl .* Upgrade hacrl, or .* --home"):
        run_here(campaign(), home)
    console = spoken()
    assert verify_store(console, home, repair=True) == 0
    assert "1 of a newer hacrl, left alone" in console.export_text()
    shutil.rmtree(home.campaign("tiny"))  # nobody's by now, and still not ours to delete
    store = Store(home.store)
    carry_out(home, store, plan(home, store, None, None, grace=0), grace=0)
    assert path.read_bytes() == before


def test_the_command_says_in_one_line_what_a_newer_version_wrote(home, tmp_path):
    path = of_label(home, "tiny", "verify ada #1") / "manifest.json"
    raw = json.loads(path.read_text())
    raw["manifest_version"] = 2
    del raw["details"][SEAL]
    raw["details"][SEAL] = digest_of(raw)
    path.write_text(json.dumps(raw))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(campaign().model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "flows.cli", "run", str(tmp_path / "tiny.yaml"), "--home", str(home.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == 2, done.stdout + done.stderr
    (said,) = done.stderr.strip().splitlines()
    assert str(path.parent) in said
    assert "written by a newer hacrl" in said
    assert "Upgrade hacrl, or" in said
    assert json.loads(path.read_text()) == raw


# -- keep policies -----------------------------------------------------------------------------------------------------


def gc(home: Home, policy: KeepConfig | None = None, grace: float = 3600, only: str | None = None) -> int:
    store = Store(home.store)
    return carry_out(home, store, plan(home, store, policy, only, grace), grace)


def versions_with_files(home: Home, agent: str) -> list[int]:
    labels = [f"warmstart {agent}", *(f"update {agent} #{i}" for i in range(ITERATIONS))]
    there = [(of_label(home, "tiny", label) / "model.safetensors").exists() for label in labels]
    return [number for number, found in enumerate(there) if found]


def test_collected_versions_do_not_make_the_campaign_run_again_and_it_goes_on_from_the_last(home, finished):
    assert gc(home, KeepConfig(last=1)) > 0
    assert versions_with_files(home, "ada") == [0, 4]
    assert run_here(campaign(), home) == []
    assert digests(home, "tiny") == digests(finished, "tiny")
    assert verify_store(quiet(), home, repair=False) == 0
    ran = run_here(campaign(iterations=ITERATIONS + 1), home)
    assert ran
    assert all(label.endswith(("#4", "#5")) for label in ran)


def test_a_collected_version_is_made_again_when_its_files_are_needed_and_only_then(home, finished):
    gc(home, KeepConfig(last=1))
    shutil.rmtree(
        of_label(home, "tiny", "score ben #3")
    )  # made from ben's version 3, which is made from 2, 1 and the first
    assert run_here(campaign(), home) == ["update ben #0", "update ben #1", "update ben #2", "score ben #3"]
    assert digests(home, "tiny") == digests(finished, "tiny")
    assert weights(home, "tiny", "update ben #2") == weights(finished, "tiny", "update ben #2")
    assert versions_with_files(home, "ada") == [0, 4]


def test_where_hardware_does_not_repeat_a_version_the_campaign_goes_on_from_a_new_one(
    home, finished, monkeypatch, capsys
):
    gc(home, KeepConfig(last=1))
    shutil.rmtree(of_label(home, "tiny", "score ben #3"))
    publish = Store.publish

    def not_repeatable(store, staged, identity, *rest):
        if identity.stage == "update" and identity.config["learner"] == "ben" and identity.config["iteration"] == 1:
            weights = staged / "model.safetensors"
            raw = bytearray(weights.read_bytes())
            raw[-400:] = bytes(byte ^ (0x40 if place % 4 == 2 else 0) for place, byte in enumerate(raw[-400:]))
            weights.write_bytes(raw)
        return publish(store, staged, identity, *rest)

    monkeypatch.setattr(Store, "publish", not_repeatable)
    ran = run_here(campaign(), home)
    assert "update ben iteration 2: its files were gone, and computing it again gave other" in capsys.readouterr().out
    # Ben's version 2 is new, and so is all that follows from it; what does not stays.
    assert {"update ben #0", "update ben #1", "generate ben #2", "update ada #2", "update ben #3"} <= set(ran)
    assert not {"generate ada #2", "verify ada #2", "generate ben #1", "score ben #1"} & set(ran)
    now, before = digests(home, "tiny"), digests(finished, "tiny")
    assert now["update ben #0"] == before["update ben #0"]
    assert now["update ben #1"] != before["update ben #1"]
    assert now["generate ben #2"] != before["generate ben #2"]
    # The next run finds the new line, and so does whoever needs the same files.
    assert run_here(campaign(), home) == []
    assert digests(home, "tiny") == now
    assert run_here(campaign(name="twin"), home) == []
    assert digests(home, "twin") == now
    # Who needs no files stays with the first line.
    lost = of_label(finished, "tiny", "score ben #3")
    shutil.copytree(lost, home.store / "objects" / "score" / lost.name)
    assert run_here(campaign(name="third"), home) == []
    assert digests(home, "third") == before


def test_best_every_and_pinned_versions_keep_their_files(home):
    accuracies = {}
    for number in (0, 2, 4):
        label = f"evaluate ada held_out #{number}"
        manifest = json.loads((of_label(home, "tiny", label) / "manifest.json").read_text())
        accuracies[number] = manifest["metrics"]["evaluate/held_out/accuracy"]
    best = max(accuracies, key=lambda number: (accuracies[number], number))
    pins.pin(home, "tiny/ada@1")
    gc(home, KeepConfig(last=1, every=3, best=True))
    assert versions_with_files(home, "ada") == sorted({0, 1, 3, 4, best})
    pins.unpin(home, "tiny/ada@1")
    gc(home, KeepConfig(last=1))
    assert versions_with_files(home, "ada") == [0, 4]
    for words in ("tiny/ada", "tiny/zoe@1", "nobody/ada@1", "tiny/ada@9", "tiny/ada@2"):
        with pytest.raises(ConfigError):
            pins.pin(home, words)


def test_evaluating_a_collected_version_is_one_clear_line(home):
    gc(home, KeepConfig(last=1))
    with pytest.raises(
        ConfigError, match=r"tiny/ada@2: its files were collected by a keep policy; versions with files: 0, 4"
    ):
        evaluate_agent("tiny/ada@2", (), Changes(), home, quiet())


def test_a_campaign_with_a_policy_collects_as_it_runs_and_ends_with_the_same_versions(tmp_path, finished):
    home = own_copy(finished, "tiny", tmp_path / "home", ("warmstart",), record=False)
    run_here(campaign(keep={"last": 1}), home)
    assert versions_with_files(home, "ben") == [0, 4]
    assert digests(home, "tiny") == digests(finished, "tiny")
    assert run_here(campaign(), home) == []


# -- garbage -----------------------------------------------------------------------------------------------------------


def objects(home: Home) -> set[str]:
    return {folder.name for folder in (home.store / "objects").glob("*/*")}


def test_only_what_no_record_names_is_garbage(home, finished):
    everything = objects(home)
    assert gc(home, grace=0) == 0
    run_here(campaign(name="twin", iterations=1, update={"learning_rate": 2e-3, "minibatch_prompts": 3}), home)
    evaluate_agent("tiny/ada@3", ["held_out"], Changes(limit=4), home, quiet())
    grown = objects(home)
    assert gc(home, grace=0) == 0
    shutil.rmtree(home.campaign("twin"))
    assert gc(home, grace=3600) == 0  # too fresh: its record may be on its way
    assert objects(home) == grown
    assert gc(home, grace=0) > 0
    left = objects(home)
    assert everything < left < grown  # the twin's own went, what it shared and the evaluation stayed
    assert len(left - everything) == 1
    assert run_here(campaign(), home) == []


def test_a_dry_plan_deletes_nothing_and_a_running_campaign_loses_nothing(home):
    store = Store(home.store)
    before = objects(home)
    assert plan(home, store, KeepConfig(last=1), None, 0)
    assert versions_with_files(home, "ada") == [0, 1, 2, 3, 4]
    with Record(home.campaign("tiny"), campaign()):  # its lock says that it runs
        assert plan(home, store, KeepConfig(last=1), None, 0) == []
    assert objects(home) == before


def test_cleaning_again_and_again_while_a_campaign_really_runs_takes_nothing_from_it(finished, tmp_path):
    """The store holds its first versions and a deleted campaign's artifacts. Only the latter go, and only after it
    ended.
    """
    home = own_copy(finished, "tiny", tmp_path / "home", ("warmstart",), record=False)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            run_here(campaign(iterations=2), home)
        except BaseException as problem:
            failed.append(problem)

    running = threading.Thread(target=run)
    running.start()
    lock = home.campaign("tiny") / "running.lock"
    while running.is_alive() and not (lock.exists() and lock.read_text()):
        time.sleep(0.01)
    while running.is_alive():
        gc(home, KeepConfig(last=1), grace=0)
        time.sleep(0.02)
    assert failed == []
    labels = [label for label in digests(home, "tiny") if not label.startswith("evaluate")]
    assert {label: digests(home, "tiny")[label] for label in labels} == {
        label: digests(finished, "tiny")[label] for label in labels
    }
    assert run_here(campaign(iterations=2), home) == []


def test_what_a_stage_is_reading_is_not_collected(home):
    store = Store(home.store)
    folder = of_label(home, "tiny", "update ada #1")
    ref = store.lookup(store.manifest("update", folder.name).identity)
    with Store(home.store).reading([ref]):
        gc(home, KeepConfig(last=1))
        assert versions_with_files(home, "ada") == [0, 2, 4]
    gc(home, KeepConfig(last=1))
    assert versions_with_files(home, "ada") == [0, 4]


def test_an_interrupted_collection_is_finished_by_the_next_one(home):
    folder = of_label(home, "tiny", "update ada #1")
    (folder / "collected.json").write_text("{}")  # the mark was written, the files were not yet removed
    assert run_here(campaign(), home) == []
    gc(home, KeepConfig(last=1))
    assert versions_with_files(home, "ada") == [0, 4]
