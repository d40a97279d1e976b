"""A whole tiny campaign on two ranks: near to one process, and the same bits every time."""

import pytest
import torch

from flows.campaign import run_campaign
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from tests.flow.conftest import TINY, Inline, tiny

pytestmark = pytest.mark.ranks
# They depend on how rows are packed or on the process, not on the numbers.
OTHER = ("padding_share", "peak_memory_bytes", "sampling_mismatch")


def outcomes(root, **update):
    config = tiny(iterations=2, update={**TINY["update"], **update}, evaluate={})
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
