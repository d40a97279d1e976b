"""Metrics that are written straight into MLflow's database: the same rows as MLflow's own client writes."""

import random
import shutil
import sqlite3

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from flows.tracking.points import send_points


def client_of(blank_database, place):
    shutil.copyfile(blank_database, place)
    client = MlflowClient(tracking_uri=f"sqlite:///{place}")
    experiment = client.create_experiment("points", artifact_location=place.parent.as_uri())
    return client, [client.create_run(experiment).info.run_id for _ in range(2)]


def rows(place, table, runs):
    with sqlite3.connect(place) as database:
        found = database.execute(f"select run_uuid, key, step, timestamp, value, is_nan from {table}").fetchall()
    return sorted((runs.index(run), *rest) for run, *rest in found)


def batches():
    """Metrics in no order, some of them twice, one not a number and one infinite."""
    chance = random.Random(3)
    points = [
        Metric(f"update/{name}", chance.random(), 1000 * step + chance.randrange(3), step)
        for name in ("loss", "entropy", "kl")
        for step in range(20)
    ]
    points += [Metric("update/loss", float("nan"), 5, 3), Metric("update/kl", float("inf"), 6, 40)]
    # Of one step and time the higher value is the latest, whichever comes first.
    points += [Metric("reward", value, 7, 7) for value in (0.5, 0.25, 0.75)]
    chance.shuffle(points)
    return points[:30], points[20:50], [], points[40:], points[:10]


def test_a_database_gets_the_rows_that_mlflow_itself_writes(blank_database, tmp_path):
    ours, theirs = tmp_path / "ours.db", tmp_path / "theirs.db"
    direct, own = client_of(blank_database, ours)
    plain, others = client_of(blank_database, theirs)
    for batch in batches():
        send_points(direct, {own[0]: batch, own[1]: batch[:5]})
        for run, metrics in zip(others, (batch, batch[:5]), strict=True):
            plain.log_batch(run, metrics=metrics)
    for table in ("metrics", "latest_metrics"):
        written = rows(ours, table, own)
        assert written == rows(theirs, table, others)
        assert len(written) >= 4
    assert direct.get_run(own[0]).data.metrics["reward"] == 0.75


def test_a_run_that_was_deleted_takes_nothing_and_neither_do_the_others_of_its_batch(blank_database, tmp_path):
    client, runs = client_of(blank_database, tmp_path / "mlflow.db")
    client.delete_run(runs[1])
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        send_points(client, {run: [Metric("reward", 1.0, 1, 1)] for run in runs})
    assert rows(tmp_path / "mlflow.db", "metrics", runs) == []


def test_a_server_gets_points_through_its_client():
    class Client:
        class _tracking_client:
            store = object()

        def __init__(self):
            self.sent = []

        def log_batch(self, run, metrics):
            self.sent.append((run, len(metrics)))

    client = Client()
    send_points(client, {"a": list(range(2500)), "b": [1]})
    assert client.sent == [("a", 1000), ("a", 1000), ("a", 500), ("b", 1)]


def test_a_store_that_is_built_otherwise_gets_them_through_its_client(blank_database, tmp_path, monkeypatch):
    client, runs = client_of(blank_database, tmp_path / "points.db")
    monkeypatch.setattr("flows.tracking.database._OF_RUNS", ("engine", "a_name_of_another_release"))
    sent = []
    monkeypatch.setattr(type(client), "log_batch", lambda self, run, metrics: sent.append((run, len(metrics))))
    send_points(client, {runs[0]: [Metric("reward", 0.5, 7, step) for step in range(1500)]})
    assert sent == [(runs[0], 1000), (runs[0], 500)]
