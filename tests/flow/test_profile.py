"""hacrl run --profile: the trace's format, its tracks, where the time went, and a real profiled campaign."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.home import Home
from flows.record.history import read_history
from flows.record.trace import MLFLOW, PREFECT, newest_trace, read_events, where_time_went
from flows.report.panels import sections
from flows.run.launch import open_campaign, run_stages
from flows.run.profile import Tracer
from flows.run.runner import ThreadRunner
from flows.run.worker import PROFILED_CALL
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import StrictConfig
from hacrl_core.operations import nested
from hacrl_core.spans import RECORDER, Span, span
from stages.spec import Outcome, StageCall
from tests.flow.conftest import tiny


def checked(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace after checking it as Chrome's format wants it: one JSON array, nesting spans."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["pid"] in named
        if event["ph"] == "X":
            assert event["name"]
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        around: list[float] = []
        for begin, end in sorted(spans, key=lambda one: (one[0], -one[1])):
            # Sums of times that were rounded to nanoseconds may differ in the last digit.
            while around and around[-1] <= begin + 0.001:
                around.pop()
            assert not around or end <= around[-1] + 1
            around.append(end)
    return events


def call(stage: str, agent: str = "ada") -> StageCall:
    return StageCall(stage, StrictConfig(), agent=agent, iteration=0)


@pytest.fixture
def tracer(tmp_path):
    tracer = Tracer(tmp_path)
    yield tracer
    tracer.close()


def test_a_process_records_nothing_unless_it_is_profiled():
    assert not RECORDER.on
    with span("inputs", "inputs"):
        pass
    assert RECORDER.take() == []


def test_overlapping_work_is_put_on_several_tracks_and_inner_work_stays_inside(tracer):
    def work(name: str) -> None:
        with span(name, "stage"):
            time.sleep(0.02)
            with span("publish", "publish"):
                time.sleep(0.01)

    threads = [threading.Thread(target=work, args=(f"credit a{number} #0",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.close()
    events = [event for event in checked(tracer.path) if event["ph"] == "X"]
    assert len({event["tid"] for event in events if event["cat"] == "stage"}) == 4
    assert sum(event["cat"] == "publish" for event in events) == 4


def test_waiting_idle_and_inner_work_add_up(tracer, tmp_path):
    base = time.time()
    tracer._begun = base
    tracer._waiting = {"generate ada #0": base, "score ada #0": base + 1.0, "generate ben #0": base}
    tracer.spans("ben", [Span("generate ben #0", "stage", base, base + 1.0, 1, 0)])
    tracer.spans("ada", [Span("generate ada #0", "stage", base, base + 3.0, 1, 0)])
    tracer.spans(
        "ada",
        [
            Span("inputs", "inputs", base + 3.0, base + 3.5, 1, 1),
            Span("publish", "publish", base + 4.5, base + 5.0, 1, 1),
            Span("score ada #0", "stage", base + 3.0, base + 5.0, 1, 0),
        ],
    )
    tracer.close()
    checked(tracer.path)
    spent = {one.process: one.seconds for one in where_time_went(tracer.path)}
    assert spent["ada"] == pytest.approx({"generate": 3.0, "inputs": 0.5, "publish": 0.5, "score": 1.0, "idle": 0.0})
    assert spent["ben"] == pytest.approx({"generate": 1.0, "idle": 4.0})
    assert spent["waiting"] == pytest.approx({"waits for ada": 2.0})


def test_what_is_told_to_servers_has_tracks_by_thread_and_changes_no_other_number(tracer):
    base = time.time()
    tracer._begun = base
    tracer.spans("ben", [Span("generate ben #0", "stage", base, base + 1.0, 1, 0)])
    tracer.spans("campaign", [Span("credit ada #0", "stage", base + 1.0, base + 2.0, 1, 0)])
    stages = where_time_went_so_far(tracer)
    tracer.spans(
        "campaign",
        [
            Span("metrics", MLFLOW, base + 0.25, base + 0.75, 7, 1),
            Span("send 13 stages", MLFLOW, base + 0.0, base + 1.0, 7, 0),
            Span("look at the machine", MLFLOW, base + 0.5, base + 0.75, 8, 0),
            Span("send progress", PREFECT, base + 0.5, base + 1.5, 9, 0),
            # After the last stage.
            Span("end the runs", MLFLOW, base + 2.0, base + 5.0, 7, 0),
        ],
    )
    tracer.close()
    events = checked(tracer.path)
    sent = [event for event in events if event.get("cat") == MLFLOW]
    assert {event["name"] for event in sent if event["tid"] == 0} == {"metrics", "send 13 stages", "end the runs"}
    assert {event["name"] for event in sent if event["tid"] == 1} == {"look at the machine"}
    spent = {one.process: one.seconds for one in where_time_went(tracer.path)}
    beside = {name: spent.pop(name) for name in list(spent) if "beside" in name}
    assert spent == stages
    assert spent["ben"] == pytest.approx({"generate": 1.0, "idle": 1.0})
    assert list(beside.values()) == [pytest.approx({MLFLOW: 4.25}), pytest.approx({PREFECT: 1.0})]


def where_time_went_so_far(tracer: Tracer) -> dict[str, dict[str, float]]:
    tracer._file.flush()
    return {one.process: one.seconds for one in where_time_went(tracer.path)}


def test_a_stage_whose_process_reported_nothing_is_shown_from_start_to_end(tracer, tmp_path):
    tracer.stage_started(call("update"), [])
    tracer.stage_finished(call("update"), Outcome(ArtifactRef("update", "k", "d", tmp_path), False, 0.0, {}))
    tracer.stage_started(call("score"), [])
    tracer.stage_failed(call("score"), ValueError("lost"))
    tracer.close()
    assert [event["name"] for event in checked(tracer.path) if event["ph"] == "X"] == ["update ada iteration 1"]
    assert tracer._waiting == {}


def test_what_a_killed_run_leaves_can_be_read(tracer, tmp_path):
    tracer.spans("ada", [Span(f"update ada #{n}", "stage", float(n), n + 0.5, 1, 0) for n in range(50)])
    tracer._file.flush()
    torn = tmp_path / "torn.json"
    torn.write_text(tracer.path.read_text()[:-30])
    assert sum(event["ph"] == "X" for event in read_events(torn)) == 49


def test_operations_end_inside_the_one_around_them_and_threads_stay_apart():
    events = [(1, 0.0, 10.0, "linear"), (1, 4.0, 11.0, "addmm"), (2, 5.0, 30.0, "backward"), (1, 12.0, 13.0, "add")]
    assert nested(events) == [
        (1, 0.0, 10.0, "linear"),
        (1, 4.0, 10.0, "addmm"),
        (1, 12.0, 13.0, "add"),
        (2, 5.0, 30.0, "backward"),
    ]


@pytest.mark.slow
def test_a_profiled_campaign_shows_what_mlflow_and_prefect_were_told_within_the_run(tmp_path, monkeypatch):
    from flows.run.launch import launch

    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    agents = tiny().model_dump(mode="json", exclude_none=True)["agents"]
    for agent in agents.values():
        agent["warmstart"]["steps"] = 5
    config = tiny(
        iterations=2, agents=agents, evaluate={}, tracking={"enabled": True}, runtime={"profile": True}
    )  # fmt: skip
    begun = time.time()
    history = launch(config, Home(tmp_path), Console(quiet=True)).history
    whole = 1e6 * (time.time() - begun)
    events = checked(newest_trace(Home(tmp_path).campaign(config.name)))
    beside = [event for event in events if event.get("cat") in (MLFLOW, PREFECT)]
    told = {(event["cat"], event["name"]) for event in beside}
    assert {(MLFLOW, name) for name in ("open", "metrics", "versions", "traces", "end the runs")} <= told
    assert {(MLFLOW, "tables, pictures and report"), (MLFLOW, "look at the machine")} <= told
    assert {(PREFECT, name) for name in ("send bars and lines", "send progress", "send summary", "summary")} <= told
    assert all(event["ts"] >= 0 and event["ts"] + event["dur"] <= whole for event in beside)
    threads = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {"mlflow", "system metrics", "prefect view"} <= threads
    # Stages are as long as their manifests say, and idle time ends with the last of them.
    spent = {one.process: one.seconds for one in where_time_went(newest_trace(Home(tmp_path).campaign(config.name)))}
    stages = [event for event in events if event.get("cat") == "stage"]
    span_of_stages = (max(e["ts"] + e["dur"] for e in stages) - min(e["ts"] for e in stages)) / 1e6
    for agent in config.agents:
        assert sum(spent[agent].values()) == pytest.approx(span_of_stages, rel=0.01)
    measured = sum(f.manifest.provenance.seconds for f in history.stages("update", "ada"))
    assert sum(e["dur"] for e in stages if e["name"].startswith("update ada")) / 1e6 >= measured
    panel = next(panel for s in sections(history) if s.key == "time" for panel in s.panels if panel.key == "profile")
    assert {MLFLOW, PREFECT, "update", "idle"} <= {label for label, _ in panel.rows}


@pytest.mark.slow
def test_a_profiled_campaign_has_a_trace_of_all_its_processes_and_a_panel(tmp_path):
    agents = tiny().model_dump(mode="json", exclude_none=True)["agents"]
    for agent in agents.values():
        agent["warmstart"]["steps"] = 5
    config = tiny(
        iterations=2, agents=agents, evaluate={}, tracking={"enabled": False},
        runtime={"profile": True, "profile_ops": ["score"]},
    )  # fmt: skip
    home = Home(tmp_path)
    with open_campaign(config, home, Console(quiet=True)) as campaign:
        run_stages(campaign, ThreadRunner)
    folder = home.campaign(config.name)
    trace = newest_trace(folder)
    events = checked(trace)
    names = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
    assert {"campaign", "ada", "ben"} <= names.keys()
    stages = {event["name"] for event in events if event.get("cat") == "stage"}
    wanted = {"sample iteration 1", "credit ben iteration 2", "update ada iteration 2", "verify ben iteration 1"}
    assert {"warmstart ada"} | wanted <= stages
    ops = [event for event in events if event.get("cat") == "op"]
    # The second call is profiled: the iteration's own or the reference's, whichever the process was given first.
    calls = [event for event in events if event.get("cat") == "stage" and event["name"].startswith("score ada")]
    scored = sorted(calls, key=lambda event: event["ts"])[PROFILED_CALL - 1]
    own = [event for event in ops if event["pid"] == names["ada"]]
    assert any("mm" in event["name"] for event in own)
    assert all(scored["ts"] - 1e3 <= e["ts"] and e["ts"] + e["dur"] <= scored["ts"] + scored["dur"] + 1e3 for e in own)
    time_section = next(s for s in sections(read_history(campaign.store, folder)) if s.key == "time")
    panel = next(panel for panel in time_section.panels if panel.key == "profile")
    assert {"update", "generate", "publish", "inputs", "idle"} <= {label for label, _ in panel.rows}
