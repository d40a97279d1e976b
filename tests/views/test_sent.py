"""A campaign that goes on: MLflow is sent what it lacks, and what it has it keeps."""

import shutil
import sqlite3

import pytest

from flows.record.record import read_campaign, read_entries
from flows.tracking import projection as module
from flows.tracking.projection import Projection
from hacrl_core.artifacts import Store

from .conftest import project
from .test_registry import everything, rows


@pytest.fixture
def sent(monkeypatch):
    """Every metric that is sent, as run, name and step."""
    found = []
    send = module.send_points

    def noted(client, points):
        found.extend((run, metric.key, metric.step) for run, metrics in points.items() for metric in metrics)
        send(client, points)

    monkeypatch.setattr(module, "send_points", noted)
    return found


@pytest.fixture
def mine(own, tracked):
    """A home of its own whose database is empty."""
    shutil.copyfile(tracked[0].root / "blank.db", own.root / "mlflow.db")
    return own, read_campaign(own.campaign("seen")), read_entries(own.campaign("seen"))


def stopped_after(mine, iterations, *more):
    """Send what a run had sent that was stopped then; ``more``: labels of the next iteration that it had sent."""
    home, config, entries = mine
    until = [e for e in entries if e.iteration is None or e.iteration < iterations or e.label in more]
    Projection(config, Store(home.store), home.tracking_uri, home).log(until)
    return until


def values(home):
    return sorted(rows(home, "select name, key, step, value from metrics join runs using (run_uuid)"))


def test_a_run_that_goes_on_sends_the_rest_and_mlflow_has_the_same_in_the_end(mine, sent, tracked):
    home, config, entries = mine
    until = stopped_after(mine, 2)
    before = set(sent)
    sent.clear()
    # The whole campaign is walked again, with what is in the store.
    later = Projection(config, Store(home.store), home.tracking_uri, home)
    later.log(until)
    # An evaluation after two iterations counts to those; all else that MLflow has is not sent again.
    assert sent == []
    later.log(entries)
    later.mark_complete(entries)
    assert sent
    assert not before & set(sent)
    assert values(home) == values(tracked[0])
    assert everything(home)[0] == everything(tracked[0])[0]


def test_an_iteration_under_way_is_sent_whole_with_its_traces_and_means(mine, sent, tracked):
    home, config, entries = mine
    third = ("sample #2", "generate ada #2", "verify ada #2", "credit ada #2")
    record = home.campaign("seen") / "stages.jsonl"
    text = record.read_text()
    # So far the record ends in the third iteration.
    lines = [line for line in text.splitlines() if '#2"' not in line or any(f'"{label}"' in line for label in third)]
    record.write_text("\n".join(line for line in lines if '#3"' not in line) + "\n")
    stopped_after(mine, 2, *third)
    sent.clear()
    resumed = Projection(config, Store(home.store), home.tracking_uri, home)
    record.write_text(text)
    resumed.log(entries)
    resumed.mark_complete(entries)
    assert any(name == "generate/tokens" and step == 3 for _, name, step in sent)
    assert not any(step in (1, 2) and name.startswith("update/") for _, name, step in sent)
    assert values(home) == values(tracked[0])
    assert everything(home)[0]["trace_info"] == everything(tracked[0])[0]["trace_info"]


def test_a_database_from_an_old_copy_gets_what_it_misses(mine, tmp_path, tracked):
    home, config, _ = mine
    stopped_after(mine, 1)
    shutil.copyfile(home.root / "mlflow.db", tmp_path / "copy.db")
    assert project(home, config)
    shutil.copyfile(tmp_path / "copy.db", home.root / "mlflow.db")
    assert project(home, config)
    assert values(home) == values(tracked[0])


def test_without_the_list_or_the_tag_everything_is_sent_again_and_nothing_is_there_twice(mine, sent, tracked):
    home, config, _ = mine
    project(home, config)
    whole = len(sent)
    for forget in ("list", "tag"):
        sent.clear()
        with sqlite3.connect(home.root / "mlflow.db") as database:
            database.execute("update tags set value = 'no' where key = 'hacrl.complete'")
            if forget == "tag":
                database.execute("delete from tags where key = 'hacrl.sent'")
        if forget == "list":
            (home.campaign("seen") / "mlflow-sent.txt").write_bytes(b"\xff\x00 torn")
        project(home, config)
        assert len(sent) == whole
        assert values(home) == values(tracked[0])
