"""Three parties over a real S3 server."""

from pathlib import Path

import pytest

from hacrl_core.artifacts.bucket import Bucket
from tests.bucket.conftest import credentials, fresh, weed
from tests.exchange.parties import PARTIES, meeting, open_party, run_all
from tests.exchange.whitelist import check_everything

__all__ = ["credentials", "fresh", "weed"]
pytestmark = pytest.mark.exchange


def test_three_parties_meet_in_seaweedfs(
    weed: str, fresh, tmp_path: Path, seed_store: Path, central_digests: dict[str, str]
) -> None:
    settings = fresh(weed)
    config = meeting(tmp_path, exchange={"bucket": settings.model_dump(), "round_seconds": 600, "poll_seconds": 0.3})
    parties = [open_party(config, name, tmp_path, seed_store) for name in PARTIES]
    run_all(parties)
    known: dict[str, str] = {}
    for party in parties:
        assert party.error is None, party.error
        assert party.reasons() == []
        known |= party.digests()
    assert known == central_digests
    check_everything(Bucket(settings), "tiny", PARTIES, 2, deadlines=True)
