"""Three parties, three homes, three different agents and one bucket: equal to the central campaign, bit for bit."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.exchange.parties import AGENTS, PARTIES, OneParty, central, meeting, open_party, run_all
from tests.flow.conftest import tiny

pytestmark = pytest.mark.exchange
# Every column that may be in the bucket. A new one is a decision about what leaves a party.
COLUMNS = {
    "answers.parquet": {"rollout_id", "prompt_id", "sample_index", "response_text", "finish_reason", "tokens"},
    "verdicts.parquet": {"rollout_id", "prompt_id", "reward", "verdict", "extracted_answer", "verifier"},
    "claims.parquet": {"rollout_id", "mean_logprob", "tokens"},
}
FIELDS = {
    *("version", "campaign", "kind", "party", "agent", "iteration", "policy", "key", "source", "tables", "members"),
}


@pytest.fixture(scope="module")
def together(
    tmp_path_factory: pytest.TempPathFactory, seed_store: Path, central_digests: dict[str, str]
) -> tuple[Path, list[OneParty]]:
    folder = tmp_path_factory.mktemp("three")
    config = meeting(folder)
    parties = [open_party(config, name, folder, seed_store) for name in PARTIES]
    run_all(parties)
    return folder, parties


def test_three_parties_equal_the_central_campaign(together, central_digests: dict[str, str]) -> None:
    known = {}
    for party in together[1]:
        assert party.error is None, party.error
        assert not party.notes.warnings
        assert party.reasons() == []
        known |= party.digests()
        for label, digest in party.digests().items():
            assert central_digests[label] == digest, f"{party.name}: {label}"
    assert known.keys() == central_digests.keys()


def test_parties_change_no_number(seed_store: Path, central_digests: dict[str, str]) -> None:
    """The campaign without parties, in which agents read each other's rollouts whole, has the same versions."""
    plain = tiny(agents=AGENTS)
    found = central(plain, seed_store)
    assert {label: central_digests[label] for label in found} == found


def test_every_object_and_every_column_in_the_bucket(together) -> None:
    folder, _ = together
    objects = sorted(path for path in (folder / "bucket").rglob("*") if path.is_file())
    kinds = set()
    for path in objects:
        parts = path.relative_to(folder / "bucket" / "exchange" / "tiny").parts
        party, iteration, name = parts
        agent, *_ = name.split(".")
        assert agent in PARTIES[party]
        assert iteration in ("000000", "000001")
        kinds.add(name.split(".", 1)[1])
        if name.endswith(".parquet"):
            assert set(pq.read_schema(path).names) == COLUMNS[name.split(".", 1)[1]]
        else:
            body = json.loads(path.read_bytes())
            assert set(body) == {"message", "signature"}
            assert set(body["message"]) == FIELDS
            assert {key for table in body["message"]["tables"] for key in table} <= {"path", "sha256", "bytes"}
    assert kinds == {"commit.json", "answers.json", "claims.json", *COLUMNS}
    assert len(objects) == 3 * 2 * 6


def test_homes_hold_no_weights_of_others(together) -> None:
    for party in together[1]:
        versions = [*(party.home / "store" / "objects").glob("warmstart/*"), *party.home.glob("store/objects/update/*")]
        assert len(versions) == 1 + 2


def test_a_party_that_runs_again_asks_the_bucket_for_nothing(together) -> None:
    from flows.campaign import run_campaign
    from flows.exchange.session import open_exchange
    from flows.record.record import Record
    from flows.run.divergence import Watch
    from flows.run.runner import Replay
    from flows.stage_calls import StageCalls

    party = together[1][0]
    hidden = together[0] / "bucket-away"
    (together[0] / "bucket").rename(hidden)
    try:
        store = party.store
        with Record(party.home / "campaigns" / "tiny", party.config) as record:
            exchange = open_exchange(party.config, record.folder, store, party.notes.warn)
            known = exchange.party_run(store, record, local=True)
            run_campaign(party.config, StageCalls(party.config), known.over(Replay(store, record, Watch())), known)
    finally:
        if (together[0] / "bucket").exists():
            (together[0] / "bucket").rmdir()
        hidden.rename(together[0] / "bucket")
