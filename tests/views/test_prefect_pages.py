"""What Prefect's pages show: keys, the bars of the timeline, tables. The flow tests use a real server."""

import math
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.settings import Settings

from flows.scheduling.pages import _markdown, _rows, key
from flows.scheduling.tally import Tally
from flows.scheduling.timeline import Timeline
from flows.servers.state import BOUNDED
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import StrictConfig
from hacrl_core.errors import StageError
from stages.spec import Outcome, StageCall

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


REF = ArtifactRef("update", "k", "d", Path("nowhere"))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timeline(clock):
    return Timeline(clock)


def call(stage, agent="ada", iteration=0):
    return StageCall(stage, NOTHING, agent=agent, iteration=iteration)


def found(metrics=None):
    return Outcome(REF, True, 0.0, metrics or {})


def play(timeline, clock, stage, seconds, agent="ada", iteration=0, **metrics):
    timeline.stage_started(call(stage, agent, iteration), [])
    clock.now += seconds
    timeline.stage_finished(call(stage, agent, iteration), Outcome(REF, False, seconds, metrics))


def shown(timeline):
    """The last state of each bar by its name, and the lines' texts."""
    states, lines = timeline.take()
    last = {state.id: state for state in states}
    return {state.name: state for state in last.values()}, [line.text for line in lines]


def test_cached_stages_share_one_bar_for_each_stretch(timeline, clock):
    for iteration in range(300):
        for agent in ("ada", "ben"):
            timeline.stage_finished(call("verify", agent, iteration), found())
    play(timeline, clock, "score", 1, iteration=300)
    timeline.stage_finished(call("sample", "", 301), found())
    timeline.end(complete=True)
    bars, lines = shown(timeline)
    assert {name for name, bar in bars.items() if bar.state == "Cached"} == {
        "600 stages from the store, iterations 1 to 300",
        "sample iteration 302",
    }
    assert "600 stages from the store, iterations 1 to 300: found in the store" in lines


def test_an_agent_has_a_bar_for_each_iteration_with_what_happened_in_it(timeline, clock):
    for iteration in range(3):
        play(timeline, clock, "generate", 9, iteration=iteration)
        play(timeline, clock, "verify", 1, iteration=iteration, **{"verify/reward_mean": 0.25})
        play(timeline, clock, "update", 6, iteration=iteration)
    timeline.end(complete=True)
    bars, lines = shown(timeline)
    assert [(bar.name, bar.state, bar.at - bar.began) for bar in bars.values()] == [
        ("ada iteration 1", "Completed", 16.0),
        ("ada iteration 2", "Completed", 16.0),
        ("ada iteration 3", "Completed", 16.0),
    ]
    assert lines[1] == "ada iteration 2: reward 0.250, generate 9.00 s, verify 1.00 s, update 6.00 s"


def test_short_iterations_share_a_bar_and_any_campaign_has_few_hundred(timeline, clock):
    shares, count = [], 0
    for iteration in range(20_000):
        for agent in ("ada", "ben"):
            play(timeline, clock, "update", 0.5, agent=agent, iteration=iteration)
        states, lines = timeline.take()
        count += len(states)
        shares.append(len(lines))
    assert count < 2 * 2 * 100 * (1 + math.log(20_000 / 500))
    assert sum(shares) < count
    timeline.end(complete=True)
    bars, _ = shown(timeline)
    assert all(bar.name.endswith(" to 20000") for bar in bars.values())


def test_a_long_stage_has_a_bar_of_its_own_while_it_runs(timeline, clock):
    timeline.stage_started(call("generate"), [])
    timeline.stage_started(call("warmstart", "ben", None), [])
    clock.now += 21
    bars, _ = shown(timeline)
    assert (bars["generate ada iteration 1"].state, bars["generate ada iteration 1"].began) == ("Running", 1000.0)
    assert bars["warmstart ben"].state == "Running"
    clock.now += 9
    timeline.stage_finished(call("generate"), Outcome(REF, False, 30.0, {}))
    bars, lines = shown(timeline)
    assert (bars["generate ada iteration 1"].state, bars["generate ada iteration 1"].at) == ("Completed", 1030.0)
    assert lines == ["generate ada iteration 1: 30.0 s"]


def test_a_failed_stage_is_a_bar_with_its_reason_and_the_rest_is_cancelled(timeline, clock):
    timeline.stage_started(call("generate", "ben"), [])
    timeline.stage_started(call("generate"), [])
    clock.now += 1
    timeline.stage_failed(call("generate"), StageError("generate ada iteration 1: the disk is full"))
    timeline.warn("the campaign ends")
    timeline.end(complete=False)
    bars, lines = shown(timeline)
    assert {name: bar.state for name, bar in bars.items()} == {
        "generate ada iteration 1": "Failed",
        "ada iteration 1": "Cancelled",
        "ben iteration 1": "Cancelled",
    }
    assert bars["generate ada iteration 1"].message == "generate ada iteration 1: the disk is full"
    assert lines[:2] == ["generate ada iteration 1: the disk is full", "the campaign ends"]


def test_the_table_and_the_summary_say_what_the_campaign_reached(history, tmp_path):
    rows = _rows(history)
    assert [row["agent"] for row in rows] == ["ada", "ben"]
    for row in rows:
        points = history.accuracy(row["agent"], "held_out")
        assert row["accuracy, held_out"] == f"{points[-1][1]:.1%}"
        assert row["gain, held_out"] == f"{100 * (points[-1][1] - points[0][1]):+.1f}"
        assert row["responses"] == "72"
    text = _markdown(history, tmp_path)
    assert "3 of 3 iterations, 144 responses" in text
    assert "](data:image/png;base64,iVBOR" in text
    assert "| ada |" in text


def test_the_table_counted_while_running_is_that_of_the_history(history):
    tally = Tally(history.config, clock=iter([0.0, 2.0, 5.0, 7.0]).__next__)
    for done in history.finished:
        entry = done.entry
        made = StageCall(entry.stage, NOTHING, agent=entry.agent, iteration=entry.iteration, variant=entry.variant)
        tally.stage_finished(made, Outcome(REF, False, 1.0, done.manifest.metrics))
    assert tally.rows() == _rows(history)
    assert tally.seconds_left(0) is None
    for iteration in range(4):
        tally.iteration_finished(iteration)
    assert tally.seconds_left(history.config.iterations - 5) == 10.0


def test_our_servers_keep_their_database_bounded(monkeypatch):
    for name, value in BOUNDED.items():
        monkeypatch.setenv(name, value)
    server = Settings().server
    assert server.events.retention_period == timedelta(days=1)
    assert {"events", "flow_runs"} <= server.services.db_vacuum.enabled_vacuum_types
    assert server.services.db_vacuum.retention_period == timedelta(days=30)
