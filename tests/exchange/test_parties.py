"""Three parties, three homes, three different agents and one bucket: equal to the central campaign, bit for bit."""

from pathlib import Path

import pytest

from flows.exchange.session import _verdicts_to_share
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.contracts.tables import VERDICTS_2, write_table
from tests.exchange.parties import AGENTS, PARTIES, OneParty, central, meeting, open_party, run_all
from tests.exchange.whitelist import check_everything, check_table
from tests.flow.conftest import tiny

pytestmark = pytest.mark.exchange


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
    bucket = Bucket(together[1][0].config.exchange.bucket)
    check_everything(bucket, "tiny", PARTIES, 2, deadlines=False)
    # The test sees what should not be there.
    for name, content in (("exchange/tiny/north/000000/model.safetensors", b"x"), ("note.txt", b"")):
        bucket.write(name, content)
        with pytest.raises(AssertionError):
            check_everything(bucket, "tiny", PARTIES, 2, deadlines=False)
        bucket.delete(name)


def test_a_verifiers_notes_and_measurements_stay_at_home(tmp_path: Path) -> None:
    """A task may add columns to its verdicts: what a program printed, parts of a reward, measurements."""
    path = tmp_path / "verdicts.parquet"
    row = {"rollout_id": "r", "prompt_id": "p", "reward": 1.0, "verdict": "correct", "extracted_answer": "7"}
    row |= {"verifier": "code", "raw_reward": 1.0, "parts": "{}", "metrics": '{"seconds": 3}', "message": "at home"}
    write_table(path, VERDICTS_2, {name: [value] for name, value in row.items()})
    shared = _verdicts_to_share(path)
    assert b"at home" not in shared
    check_table("north/000000/ada.verdicts.parquet", shared)


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
