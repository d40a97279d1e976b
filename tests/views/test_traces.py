"""Rollouts as MLflow traces, what people say about them, and what the machine did; also in a new database."""

import io
import json
import shutil
import sqlite3
import time
from pathlib import Path

import pytest
from rich.console import Console

from flows.home import Home
from flows.record.feedback import Label, read_labels
from flows.record.record import read_entries
from flows.report.page import write_report
from flows.tracking.feedback import meaning, show_feedback
from flows.tracking.projection import Projection
from flows.tracking.system import NAME, SystemSampler
from flows.tracking.traces import stored_table
from flows.views.rollouts import show_rollouts
from hacrl_core.artifacts import Store
from hacrl_core.contracts.tables import CREDIT, ROLLOUTS, VERDICTS

from .conftest import project


def traces(home: Home):
    from mlflow.tracing.client import TracingClient

    found = TracingClient(home.tracking_uri).search_traces(locations=["1"], max_results=100)
    return {trace.info.trace_id: trace for trace in found}


def content(found):
    """What must be the same after every replay, and in another database; only the runs' ids are MLflow's own."""
    return {
        name: (
            trace.info.request_time,
            trace.info.execution_duration,
            trace.info.request_preview,
            trace.info.response_preview,
            {key: value for key, value in trace.info.tags.items() if key != "mlflow.artifactLocation"},
            sorted((a.assessment_id, a.name, a.value, a.source.source_type) for a in trace.info.assessments),
            [(span.span_id, span.parent_id, span.name, span.inputs, span.outputs) for span in trace.data.spans],
        )
        for name, trace in found.items()
    }


@pytest.fixture
def mine(own: Home, tracked) -> Home:
    """The campaign in a home of its own, with everything in MLflow."""
    shutil.copyfile(tracked[0].root / "blank.db", own.root / "mlflow.db")
    project(own, tracked[1])
    return own


def told(home: Home, out: Path | None = None) -> str:
    console = Console(file=io.StringIO(), width=100)
    show_feedback(console, home, "seen", out)
    return console.file.getvalue()


def test_every_agent_and_iteration_has_traces_that_say_what_the_tables_say(tracked):
    home, config = tracked
    store, found = Store(home.store), traces(home)
    entries = {(e.stage, e.agent, e.iteration): e for e in read_entries(home.campaign("seen")) if not e.variant}
    assert len(found) == 3 * 2 * config.tracking.traces
    for trace in found.values():
        agent, iteration = trace.info.tags["hacrl.agent"], int(trace.info.tags["hacrl.iteration"])
        rollout = trace.info.tags["hacrl.rollout"]
        tables = {
            schema.name: {
                row["rollout_id"]: row
                for row in stored_table(store, entries[stage, learner, iteration - 1], schema).to_pylist()
            }
            for stage, learner, schema in (
                ("generate", agent, ROLLOUTS),
                ("verify", agent, VERDICTS),
                ("credit", "ben", CREDIT),
            )
        }
        said = {a.name: a.value for a in trace.info.assessments}
        assert said["verdict"] == tables["verdicts"][rollout]["verdict"]
        assert said["reward"] == tables["verdicts"][rollout]["reward"]
        assert said["advantage_ben"] == tables["credit"][rollout]["advantage"]
        written, judged = trace.data.spans[1], trace.data.spans[2]
        assert written.outputs["choices"][0]["message"]["content"] == tables["rollouts"][rollout]["response_text"]
        assert judged.outputs["verdict"] == said["verdict"]
    # All agents answer the same prompts, so that their answers can be compared.
    asked = {
        agent: sorted(t.info.request_preview for t in found.values() if t.info.tags["hacrl.agent"] == agent)
        for agent in config.agents
    }
    assert asked["ada"] == asked["ben"]


def test_a_trace_is_linked_to_its_agents_run(tracked):
    from mlflow import MlflowClient
    from mlflow.tracing.client import TracingClient

    home, config = tracked
    runs = {r.info.run_name: r.info.run_id for r in MlflowClient(tracking_uri=home.tracking_uri).search_runs(["1"])}
    for agent in config.agents:
        own = TracingClient(home.tracking_uri).search_traces(locations=["1"], run_id=runs[f"seen/{agent}"])
        assert {trace.info.tags["hacrl.agent"] for trace in own} == {agent}


def test_a_lost_database_gets_the_same_traces_and_what_people_said(mine, tracked):
    import mlflow
    from mlflow.entities import AssessmentSource

    first = next(name for name, t in traces(mine).items() if t.info.tags["hacrl.agent"] == "ada")
    mlflow.set_tracking_uri(mine.tracking_uri)
    person = AssessmentSource("HUMAN", "eve")
    mlflow.log_feedback(trace_id=first, name="verdict", value="correct", source=person, rationale="it is right")
    assert "eve" in told(mine)
    before = content(traces(mine))
    shutil.copyfile(tracked[0].root / "blank.db", mine.root / "mlflow.db")
    assert traces_in_new_database(mine) == {}
    project(mine, tracked[1])
    assert content(traces_in_new_database(mine)) == before


@pytest.mark.parametrize("by_iteration", [True, False])
def test_short_iterations_share_traces_and_a_replay_chooses_the_same(own, tracked, monkeypatch, by_iteration):
    entries = read_entries(own.campaign("seen"))
    store = Store(own.store)
    generated = [0.0, 0.0, 0.0]
    for entry in entries:
        if entry.stage == "generate":
            generated[entry.iteration] += store.manifest("generate", entry.key).provenance.seconds
    # The seconds are full in the middle of the third iteration, and the first has traces in any case.
    monkeypatch.setattr("flows.tracking.traces.FIRST", 1)
    monkeypatch.setattr("flows.tracking.traces.SECONDS_APART", sum(generated[:2]) + generated[2] / 2)
    shutil.copyfile(tracked[0].root / "blank.db", own.root / "mlflow.db")
    if by_iteration:
        record = own.campaign("seen") / "stages.jsonl"
        lines = record.read_text()
        record.write_text("")
        projection = Projection(tracked[1], store, own.tracking_uri, own)
        for n in (None, 0, 1, 2):
            projection.log([entry for entry in entries if entry.iteration == n])
        record.write_text(lines)
    project(own, tracked[1])
    found = traces(own).values()
    assert {trace.info.tags["hacrl.iteration"] for trace in found} == {"1", "3"}
    assert len(found) == 2 * 2 * tracked[1].tracking.traces


def traces_in_new_database(home: Home):
    """MLflow keeps a connection to the file that was there before; another address opens the new one."""
    return traces(Home(home.root / "store" / ".."))


def test_feedback_is_kept_with_the_campaign_and_shown(mine, tmp_path):
    import mlflow
    from mlflow.entities import AssessmentSource

    mlflow.set_tracking_uri(mine.tracking_uri)
    assert "no human verdict yet" in told(mine)
    found = {t.info.tags["hacrl.agent"] + t.info.tags["hacrl.iteration"]: t for t in traces(mine).values()}
    miss, right = found["ada3"], found["ben3"]
    said = next(a.value for a in miss.info.assessments if a.name == "verdict")
    other = "incorrect" if said == "correct" else "correct"
    person = AssessmentSource("HUMAN", "eve")
    kept = mlflow.log_feedback(trace_id=miss.info.trace_id, name="verdict", value=other, source=person)
    agreed = next(a.value for a in right.info.assessments if a.name == "verdict") == "correct"
    mlflow.log_feedback(trace_id=right.info.trace_id, name="correct", value=agreed, source=person)
    mlflow.log_feedback(trace_id=right.info.trace_id, name="style", value="terse", source=person)
    out = told(mine, tmp_path / "cases.jsonl")
    assert "2 labelled: 1 agree with the verifier" in out
    assert "style = 'terse' by eve is no verdict" in " ".join(out.split())
    labels = read_labels(mine.campaign("seen"))
    assert sorted((label.agent, label.iteration, label.is_miss) for label in labels) == [
        ("ada", 3, True),
        ("ben", 3, False),
    ]
    cases = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    case = next(case for case in cases if case["agent"] == "ada")
    assert (case["response"], case["verifier"], case["label"]) == (miss.info.response_preview, said, other)
    shown = Console(file=io.StringIO(), width=200)
    show_rollouts(shown, mine, "seen", 3, "ada", None, None, 1000)
    assert f"{said} (eve: {other})" in shown.file.getvalue()
    [page] = write_report(mine, "seen", tmp_path / "report", pictures=False)
    assert "2 labelled: 1 agree with the verifier" in page.read_text()
    # Taken back in MLflow, it is taken back here; without MLflow it stays.
    mlflow.delete_assessment(trace_id=miss.info.trace_id, assessment_id=kept.assessment_id)
    told(mine)
    assert [label.agent for label in read_labels(mine.campaign("seen"))] == ["ben"]
    (mine.root / "mlflow.db").unlink()
    assert "1 labelled" in told(mine)


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("verdict", "correct", "correct"),
        ("verdict", "Incorrect", "incorrect"),
        ("correct", True, "correct"),
        ("is_correct", "no", "incorrect"),
        ("verdict", "maybe", None),
        ("helpful", True, None),
    ],
)
def test_what_an_assessment_means(name, value, verdict):
    assert meaning(name, value) == verdict


def test_a_miss_is_a_disagreement_about_the_reward():
    def label(said: str, verdict: str) -> Label:
        return Label("r", "ada", 1, said, verdict, "eve", 0.0, "", "t", "a")

    assert label("unparseable", "correct").is_miss
    assert label("correct", "incorrect").is_miss
    assert not label("unparseable", "incorrect").is_miss


def test_what_the_machine_did_is_recorded_and_sent_from_the_record(own, tracked):
    folder = own.campaign("seen")
    with SystemSampler(folder, seconds=0.05):
        for _ in range(400):
            if (folder / NAME).exists() and len((folder / NAME).read_text().splitlines()) >= 2:
                break
            time.sleep(0.05)
    lines = [json.loads(line) for line in (folder / NAME).read_text().splitlines()]
    (folder / NAME).open("a").write('{"at": 1, "val')  # torn by a crash
    shutil.copyfile(tracked[0].root / "blank.db", own.root / "mlflow.db")
    project(own, tracked[1])
    with sqlite3.connect(own.root / "mlflow.db") as database:
        query = "select timestamp, value from metrics join runs using (run_uuid) where name = 'seen' and key = ?"
        sent = database.execute(query, ("system/cpu_utilization_percentage",)).fetchall()
    assert sorted(sent) == [(line["at"], line["values"]["cpu_utilization_percentage"]) for line in lines]
