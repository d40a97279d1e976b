"""A whole tiny campaign on two ranks: near to one process, and the same bits every time."""

import pytest
import torch

from flows.campaign import run_campaign
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.learning.sharded import policy
from tests.flow.conftest import TINY, Inline, tiny
from tests.ranks.tasks import Forgotten

pytestmark = pytest.mark.ranks
# They depend on how rows are packed or on the process, not on the numbers.
OTHER = ("padding_share", "peak_memory_bytes", "sampling_mismatch")


def outcomes(root, settings=None, **update):
    config = tiny(**{"iterations": 2, "evaluate": {}, **(settings or {}), "update": {**TINY["update"], **update}})
    runner = Inline(Store(root))
    run_campaign(config, StageCalls(config), runner)
    runner.context.warm.close()
    return runner.outcomes


def test_two_ranks_against_one_and_against_themselves(tmp_path):
    torch.set_num_threads(1)
    one, two, again = (outcomes(tmp_path / name, ranks=ranks) for name, ranks in (("1", 1), ("2", 2), ("3", 2)))
    assert one.keys() == two.keys()
    assert {label: o.ref.digest for label, o in two.items()} == {label: o.ref.digest for label, o in again.items()}
    for label in ("generate ada #0", "credit ben #0"):
        assert one[label].ref.key == two[label].ref.key, "stages before the first update are shared"
    for label, outcome in one.items():
        if label.startswith(("score", "update")):
            assert outcome.ref.key != two[label].ref.key, "ranks are part of the key"
            assert outcome.metrics.keys() == two[label].metrics.keys(), label
            for name, value in outcome.metrics.items():
                if not any(other in name for other in OTHER):
                    assert two[label].metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-5), f"{label} {name}"
    assert two["update ada #0"].metrics["update/score_mismatch_max"] < 1e-5


@pytest.mark.parametrize("autocast", ["none", "bf16"])
def test_a_version_with_adapters_is_read_once_and_no_artifact_shows_that_it_was_kept(tmp_path, monkeypatch, autocast):
    """Ranks that forget every version after it was published read each from its files, for score and for update."""
    torch.set_num_threads(1)
    settings = {
        "agents": {"ada": TINY["agents"]["ada"]},
        "iterations": 3,
        "algorithm": {"preset": "gspo"},
        "score": {"autocast": autocast},
    }
    lora = {"ranks": 2, "autocast": autocast, "learning_rate": 1e-2, "lora": {"rank": 3, "alpha": 6.0}}
    loaded, load = [], policy.load_sharded
    monkeypatch.setattr(policy, "load_sharded", lambda rank, *a, **k: loaded.append(a) or load(rank, *a, **k))
    kept = outcomes(tmp_path / "kept", settings, **lora)
    of_kept = len(loaded)
    loaded.clear()
    monkeypatch.setattr(policy, "Published", Forgotten)
    read = outcomes(tmp_path / "read", settings, **lora)
    assert {label: o.ref.digest for label, o in kept.items()} == {label: o.ref.digest for label, o in read.items()}
    assert len({o.ref.digest for label, o in kept.items() if label.startswith("update")}) == 3
    assert len(loaded) == of_kept + 4, "score and update of the two versions that were trained"
