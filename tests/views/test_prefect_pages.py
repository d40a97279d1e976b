"""What Prefect's pages show: keys, one task for many cached stages, tables. The flow tests use a real server."""

import pytest

from flows.scheduling.pages import MAX_LABELS, CachedStages, _markdown, _rows, key
from hacrl_core.config.base import StrictConfig
from stages.spec import StageCall

NOTHING = StrictConfig()


@pytest.mark.parametrize(
    ("campaign", "wanted"),
    [
        ("demo", "hacrl-demo-agents"),
        ("Night_run.2", "hacrl-night-run-2-agents"),
        ("x" * 60, f"hacrl-{'x' * 60}-agents"),
    ],
)
def test_keys_have_only_what_prefect_allows(campaign, wanted):
    assert key(campaign, "agents") == wanted


def test_cached_stages_become_one_task_for_each_stretch():
    told = []
    stages = CachedStages(lambda name, labels: told.append((name, labels)))
    for iteration in range(300):
        for agent in ("ada", "ben"):
            stages.add(StageCall("verify", NOTHING, agent=agent, iteration=iteration))
    stages.flush()
    stages.flush()
    stages.add(StageCall("sample", NOTHING, iteration=300))
    stages.flush()
    stages.add(StageCall("score", NOTHING, agent="ada", iteration=300))
    stages.add(StageCall("score", NOTHING, agent="ben", iteration=300))
    stages.flush()
    assert [name for name, _ in told] == [
        "600 stages from the store #0 to #299",
        "sample #300",
        "2 stages from the store #300",
    ]
    assert len(told[0][1]) == MAX_LABELS
    assert told[2][1] == ["score ada #300", "score ben #300"]


def test_the_table_and_the_summary_say_what_the_campaign_reached(history):
    rows = _rows(history)
    assert [row["agent"] for row in rows] == ["ada", "ben"]
    for row in rows:
        points = history.accuracy(row["agent"], "held_out")
        assert row["accuracy, held_out"] == f"{points[-1][1]:.1%}"
        assert row["gain, held_out"] == f"{100 * (points[-1][1] - points[0][1]):+.1f}"
        assert row["responses"] == "72"
    text = _markdown(history)
    assert "3 of 3 iterations, 144 responses" in text
    assert "](data:image/png;base64,iVBOR" in text
    assert "| ada |" in text
