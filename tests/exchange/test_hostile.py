"""Hostile parties: what they publish is signed and well formed, and still found out or bounded before anybody learns.

South is hostile. Its objects are taken from an honest run, changed, signed again with its own key and put into a fresh
bucket. North then runs its campaign against them.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.exchange.mailbox import campaign_digest, table_of
from hacrl_core.contracts.tables import ANSWERS, CLAIMS, CREDIT, VERDICTS, TableSchema, read_table, write_table
from hacrl_core.exchange.messages import Message, seal
from tests.exchange.parties import OneParty, central, meeting, open_party, run_all, run_party

pytestmark = pytest.mark.exchange
TWO = {"north": ("ada",), "south": ("ben",)}
SCHEMAS: dict[str, TableSchema] = {"answers": ANSWERS, "verdicts": VERDICTS, "claims": CLAIMS}
LARGER: dict[str, Any] = {"iterations": 1, "prompts_per_iteration": 24, "samples_per_prompt": 8}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, seed_store: Path) -> Path:
    """A folder in which two honest parties have run one round."""
    folder = tmp_path_factory.mktemp("honest")
    config = meeting(folder, TWO, **LARGER)
    central(config, seed_store)
    parties = [open_party(config, name, folder, seed_store) for name in TWO]
    run_all(parties)
    assert [party.error for party in parties] == [None, None]
    assert [party.reasons() for party in parties] == [[], []]
    return folder


@dataclass
class Lie:
    """What south publishes: rows by table, and how its messages are changed."""

    tables: dict[str, list[dict[str, Any]]]
    north: dict[str, list[dict[str, Any]]]
    change: dict[str, dict[str, Any]] = field(default_factory=dict)


def rows_of(folder: Path, party: str, agent: str) -> dict[str, list[dict[str, Any]]]:
    place = folder / "bucket" / "exchange" / "tiny" / party / "000000"
    return {kind: pq.read_table(place / f"{agent}.{kind}.parquet").to_pylist() for kind in SCHEMAS}


def publish(lie: Lie, honest: Path, folder: Path, campaign: str) -> None:
    """Write south's tables and messages, signed with its own key."""
    private = (honest / "keys" / "south.key").read_text()
    source = honest / "bucket" / "exchange" / "tiny" / "south" / "000000"
    place = folder / "bucket" / "exchange" / "tiny" / "south" / "000000"
    place.mkdir(parents=True)
    for kind in ("commit", "answers", "claims"):
        body = json.loads((source / f"ben.{kind}.json").read_bytes())["message"]
        names = [table["path"] for table in body["tables"]]
        tables = []
        for name in names:
            table = name.removesuffix(".parquet")
            schema = SCHEMAS[table]
            columns = {field.name: [row[field.name] for row in lie.tables[table]] for field in schema.fields}
            write_table(place / f"ben.{name}", schema, columns)
            tables.append(table_of(name, (place / f"ben.{name}").read_bytes()).model_dump())
        message = Message.model_validate({**body, "campaign": campaign, "tables": tables, **lie.change.get(kind, {})})
        (place / f"ben.{kind}.json").write_bytes(seal(message, private))


def meet(
    attack: Callable[[Lie], None],
    honest: Path,
    folder: Path,
    tamper: Callable[[Path], None] = lambda place: None,
    **changes: Any,
) -> OneParty:
    """Let north meet a hostile south; its own stages of before are in its store.

    ``tamper`` is given the folder of south's objects, as somebody with access to the bucket has it.
    """
    lie = Lie(rows_of(honest, "south", "ben"), rows_of(honest, "north", "ada"))
    attack(lie)
    shutil.copytree(honest / "keys", folder / "keys")
    config = meeting(folder, TWO, **LARGER, **changes)
    publish(lie, honest, folder, campaign_digest(config, 0))
    tamper(folder / "bucket" / "exchange" / "tiny" / "south" / "000000")
    north = open_party(config, "north", folder)
    shutil.copytree(honest / "north" / "store", north.home / "store")
    for share in north.store.root.glob("objects/share/*"):
        manifest = json.loads((share / "manifest.json").read_text())
        if manifest["identity"]["config"]["agent_id"] == "ben":
            shutil.rmtree(share)
    run_party(north)
    assert north.error is None, north.error
    return north


def learned_from(north: OneParty) -> set[str]:
    """The samplers whose answers weigh in ada's update."""
    from flows.record.record import read_entries

    [entry] = [e for e in read_entries(north.home / "campaigns" / "tiny") if e.stage == "credit"]
    table = read_table(north.store.folder("credit", entry.key) / "credit.parquet", CREDIT)
    return set(table["sampler"].to_pylist())


def forge_rewards(lie: Lie) -> None:
    for row in lie.tables["verdicts"]:
        row.update(reward=1.0, verdict="correct")


def claim_too_little(lie: Lie) -> None:
    for row in lie.tables["claims"]:
        row["mean_logprob"] -= 2.0


def claim_too_little_of_what_was_cut_off(lie: Lie) -> None:
    """Nobody knows how a text would have gone on that was cut off; what there is of it is checked all the same."""
    claim_too_little(lie)
    for row in lie.tables["answers"]:
        row["finish_reason"] = "length"
    for row in lie.tables["verdicts"]:
        row["verdict"] = "error"  # a verdict may depend on how an answer ended: no word that could be compared


def claim_nothing_of_no_tokens(lie: Lie) -> None:
    """Without a claim a learner's update ends, and an answer without tokens once needed none."""
    lie.tables["answers"][0]["tokens"] = 0
    lie.tables["claims"] = lie.tables["claims"][1:]


def claim_certainty(lie: Lie) -> None:
    for row in lie.tables["claims"]:
        row["mean_logprob"] = -1e-3


def claim_the_impossible(lie: Lie) -> None:
    lie.tables["claims"][0]["mean_logprob"] = 0.5


def copy_north(lie: Lie) -> None:
    """Publish north's answers as one's own, with north's own log-probs and right verdicts."""
    claims = {row["rollout_id"]: row for row in lie.north["claims"]}
    told = []
    for mine, theirs, verdict, right in zip(
        lie.tables["answers"], lie.north["answers"], lie.tables["verdicts"], lie.north["verdicts"], strict=True
    ):
        mine.update({key: theirs[key] for key in ("response_text", "finish_reason", "tokens")})
        verdict.update({key: right[key] for key in ("reward", "verdict", "extracted_answer")})
        if claim := claims.get(theirs["rollout_id"]):
            told.append({**claim, "rollout_id": mine["rollout_id"]})
    lie.tables["claims"] = told


def pick_the_best(lie: Lie) -> None:
    """Of everything sampled for a prompt, publish right answers only, as often as they fit; the log-probs are true."""
    claims = {row["rollout_id"]: row for row in lie.tables["claims"]}
    best: dict[str, dict[str, Any]] = {}
    for answer, verdict in zip(lie.tables["answers"], lie.tables["verdicts"], strict=True):
        if verdict["reward"] > 0 and answer["rollout_id"] in claims:
            best.setdefault(answer["prompt_id"], {**answer, "claim": claims[answer["rollout_id"]], "judged": verdict})
    for answer, verdict in zip(lie.tables["answers"], lie.tables["verdicts"], strict=True):
        if found := best.get(answer["prompt_id"]):
            answer.update({key: found[key] for key in ("response_text", "finish_reason", "tokens")})
            verdict.update({key: found["judged"][key] for key in ("reward", "verdict", "extracted_answer")})
            claims[answer["rollout_id"]] = {**found["claim"], "rollout_id": answer["rollout_id"]}
    lie.tables["claims"] = [claims[row["rollout_id"]] for row in lie.tables["answers"] if row["rollout_id"] in claims]


def send_too_much(lie: Lie) -> None:
    last = lie.tables["answers"][-1]
    lie.tables["answers"] += [{**last, "rollout_id": f"{last['rollout_id']}-{i}"} for i in range(50)]


def send_a_novel(lie: Lie) -> None:
    lie.tables["answers"][3]["response_text"] = "x" * 30_000


def answer_other_prompts(lie: Lie) -> None:
    answers = lie.tables["answers"]
    answers[0]["response_text"], answers[0]["prompt_id"] = "1", answers[-1]["prompt_id"]


def replay_another_version(lie: Lie) -> None:
    lie.change["answers"] = {"policy": "0" * 64}


def use_another_seed(lie: Lie) -> None:
    for kind in ("commit", "answers", "claims"):
        lie.change[kind] = {"key": "1" * 64}


@pytest.mark.parametrize(
    ("attack", "reason", "words"),
    [
        (forge_rewards, "lie", "rewards"),
        (claim_too_little, "implausible", "by the claimed probabilities"),
        (claim_too_little_of_what_was_cut_off, "implausible", "by the claimed probabilities"),
        (claim_nothing_of_no_tokens, "unfounded", "claims 0 tokens"),
        (claim_certainty, "lie", "sum to"),
        (claim_the_impossible, "lie", "no log of a probability"),
        (copy_north, "implausible", "also the learner's"),
        (pick_the_best, "implausible", "answers are right"),
        (send_too_much, "spam", "rows"),
        (send_a_novel, "spam", "characters"),
        (answer_other_prompts, "unfounded", "one by one"),
        (replay_another_version, "unfounded", "committed itself"),
        (use_another_seed, "unfounded", "other prompts, settings or seed"),
    ],
)
def test_a_hostile_party_is_found_out_and_nothing_is_learned_from_it(
    attack, reason: str, words: str, honest: Path, tmp_path: Path
) -> None:
    north = meet(attack, honest, tmp_path)
    assert north.reasons() == [("south", reason)], north.notes.warnings
    assert any(f"south: {reason}" in warning and words in warning for warning in north.notes.warnings)
    assert learned_from(north) == {"ada"}


def test_an_honest_party_is_learned_from(honest: Path, tmp_path: Path) -> None:
    north = meet(lambda lie: None, honest, tmp_path)
    assert north.reasons() == []
    assert learned_from(north) == {"ada", "ben"}


def unsign(place: Path) -> None:
    body = json.loads((place / "ben.answers.json").read_bytes())
    (place / "ben.answers.json").write_text(json.dumps({**body, "signature": ""}))


def alter(place: Path) -> None:
    body = json.loads((place / "ben.answers.json").read_bytes())
    body["message"]["source"] = "0" * 64
    (place / "ben.answers.json").write_text(json.dumps(body))


def alter_a_table(place: Path) -> None:
    (place / "ben.answers.parquet").write_bytes((place / "ben.answers.parquet").read_bytes()[:-1] + b"2")


def replay(place: Path) -> None:
    """The commitment stands where the answers should: signed by south, for another place."""
    (place / "ben.answers.json").write_bytes((place / "ben.commit.json").read_bytes())


def sign_for_another(place: Path) -> None:
    """North's key stands in for that of any other party."""
    body = json.loads((place / "ben.answers.json").read_bytes())["message"]
    key = place.parents[4] / "keys" / "north.key"
    (place / "ben.answers.json").write_bytes(seal(Message.model_validate(body), key.read_text()))


def be_late(place: Path) -> None:
    (place / "ben.answers.json").unlink()


def remove_the_commitment(place: Path) -> None:
    (place / "ben.commit.json").unlink()


@pytest.mark.parametrize(
    ("tamper", "party", "reason"),
    [
        (unsign, "south", "unsigned"),
        (alter, "south", "altered"),
        (alter_a_table, "south", "altered"),
        (replay, "south", "replayed"),
        (sign_for_another, "north", "foreign-named"),
        (be_late, "south", "late"),
        (remove_the_commitment, "south", "altered"),
    ],
)
def test_what_somebody_does_to_the_bucket_is_refused_by_name_and_frames_nobody(
    tamper, party: str, reason: str, honest: Path, tmp_path: Path
) -> None:
    """The campaign says who and what, goes on without these answers, and puts nobody into quarantine for it."""
    north = meet(lambda lie: None, honest, tmp_path, tamper, exchange={"round_seconds": 0.5})
    assert (party, reason) in north.reasons(), north.notes.warnings
    assert any(f"{party}: {reason}: " in w and "of ben" in w.replace("/ben.", " of ben ") for w in north.notes.warnings)
    assert learned_from(north) == {"ada"}
    assert north.exchange.mailbox.quarantined() == {}


def test_evidence_of_a_lie_convinces_a_third(honest: Path, tmp_path: Path) -> None:
    """Whoever has the evidence can repeat the verdict: the signed message, both tables of verdicts, the answers."""
    north = meet(forge_rewards, honest, tmp_path)
    [folder] = (north.exchange.mailbox.folder / "evidence").glob("south-lie-*")
    names = {"answers.parquet", "message.json", "published-verdicts.parquet", "right-verdicts.parquet", "why.json"}
    assert {path.name for path in folder.iterdir()} == names


def test_answers_at_which_the_verifier_fails_do_not_end_the_receivers_campaign(honest: Path, tmp_path: Path) -> None:
    """A campaign ends where the verifier fails at its own answers; nobody else may bring that about."""
    verifier = tmp_path / "fragile.py"
    verifier.write_text(
        'def judge(response, answer):\n    assert "crash" not in response\n    return float(answer in response)\n'
    )

    def crash(lie: Lie) -> None:
        for answer in lie.tables["answers"]:
            answer["response_text"] = "crash"

    north = meet(crash, honest, tmp_path, verify={"verifier": f"{verifier}:judge"})
    assert north.reasons() == [("south", "spam")], north.notes.warnings
    assert any("the verifier fails at" in warning for warning in north.notes.warnings)
    assert learned_from(north) == {"ada"}


def test_poisoned_text_with_a_right_answer_teaches_nothing(honest: Path, tmp_path: Path) -> None:
    """Text that the learner would never write is refused, or lies outside the window that HACPO learns from."""

    def poison(lie: Lie) -> None:
        for answer in lie.tables["answers"]:
            answer["response_text"] = "9+9-9+9-" + answer["response_text"]
        for row in lie.tables["verdicts"]:
            row["verdict"] = "error"  # undecided: no word about rewards that could be compared

    north = meet(poison, honest, tmp_path)
    found = north.reasons() == [("south", "alien")] or clipped_share(north) > 0.95
    assert found, (north.notes.warnings, clipped_share(north))


def clipped_share(north: OneParty) -> float:
    """The share of foreign answers outside the learner's window in its update."""
    from flows.record.record import read_entries

    [entry] = [e for e in read_entries(north.home / "campaigns" / "tiny") if e.stage == "update"]
    metrics = north.store.manifest("update", entry.key).metrics
    return 1.0 - metrics["update/foreign_inside_fraction"]


def test_a_weight_limit_bounds_what_passes_all_checks(honest: Path, tmp_path: Path) -> None:
    import numpy as np

    north = meet(lambda lie: None, honest, tmp_path, weight_limits={"south": 0.25})
    from flows.record.record import read_entries

    [entry] = [e for e in read_entries(north.home / "campaigns" / "tiny") if e.stage == "credit"]
    rows = read_table(north.store.folder("credit", entry.key) / "credit.parquet", CREDIT).to_pylist()
    weight = {
        who: np.sum([abs(r["omega"] * r["advantage"]) for r in rows if r["sampler"] == who]) for who in ("ada", "ben")
    }
    assert weight["ben"] == pytest.approx(0.25 * weight["ada"])
