import numpy as np
import pytest

from hacrl_core.errors import ContractError
from hacrl_core.evaluation import Outcomes, by_tag, summarise, wilson_interval


def _outcomes(rewards, tags=None, answers=None, tokens=None, truncated=None):
    rewards = np.array(rewards, dtype=np.float64)
    p, s = rewards.shape
    return Outcomes(
        rewards,
        answers or tuple(tuple("1" if r == 1 else "0" for r in row) for row in rewards),
        np.array(tokens if tokens is not None else np.arange(p * s).reshape(p, s), dtype=np.int64),
        np.array(truncated if truncated is not None else np.zeros((p, s)), dtype=bool),
        tuple(tags or ({} for _ in range(p))),
    )


def test_summary_by_hand():
    found = summarise(_outcomes([[1, 0, 1, 0], [0, 0, 0, 1]], truncated=[[0, 0, 1, 0], [0, 0, 0, 1]]), (1, 4))
    interval = wilson_interval(0.75, 2)
    assert found == {
        "problems": 2,
        "samples": 4,
        "avg@4": pytest.approx(0.375),
        "avg@4/low": interval.low,
        "avg@4/high": interval.high,
        "tokens_mean": 3.5,
        "tokens_max": 7,
        "tokens_total": 28,
        "truncated_share": 0.25,
        "unverified_share": 0,
        "pass@1": pytest.approx(0.375),
        "best@1": 0.5,
        "maj@1": 0.5,
        "pass@4": 1,
        "best@4": 1,
        "maj@4": 0.5,
    }


def test_tags_partition_the_problems():
    tags = [{"level": level, "subject": "Algebra"} for level in ("10", "2", "2")] + [{}]
    found = by_tag(_outcomes([[1], [0], [1], [1]], tags), (1,))
    assert list(found["level"]) == ["2", "10"]  # as numbers, not as text
    assert {value: m["avg@1"] for value, m in found["level"].items()} == {"2": 0.5, "10": 1.0}
    assert found["subject"]["Algebra"]["problems"] == 3


def test_nothing_verified_reports_no_number_instead_of_nan():
    found = summarise(_outcomes([[np.nan, np.nan]]), (1, 2))
    assert found["unverified_share"] == 1
    assert not any(np.isnan(value) for value in found.values())
    assert "avg@2" not in found


def test_shaped_rewards_have_no_interval():
    found = summarise(_outcomes([[1.2], [-0.5]]), (1,))
    assert found["avg@1"] == pytest.approx(0.35)
    assert "avg@1/low" not in found


def test_no_problems():
    empty = Outcomes(np.zeros((0, 2)), (), np.zeros((0, 2), np.int64), np.zeros((0, 2), bool), ())
    assert summarise(empty, (1,)) == {"problems": 0.0, "samples": 2.0}
    assert by_tag(empty, (1,)) == {}


def test_shapes_must_agree():
    with pytest.raises(ContractError, match="differ in shape"):
        _outcomes([[1, 0]], tokens=[[3]])
