"""Models and versions that are written straight into MLflow's database: the same rows as its own client writes."""

import re
import shutil
import sqlite3

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from flows.tracking import database
from flows.tracking.database import ModelDraft, VersionDraft, create_models, mark_ready, register_versions

TABLES = ("logged_models", "logged_model_params", "logged_model_tags", "model_versions", "model_version_tags")
NAME = "demo.ada"


@pytest.fixture
def opened(blank_database, tmp_path):
    """Return a client of a database of its own, its file, an experiment and a run."""

    def open_one(file="mlflow.db"):
        place = tmp_path / file
        shutil.copyfile(blank_database, place)
        client = MlflowClient(tracking_uri=f"sqlite:///{place}")
        experiment = client.create_experiment("models", artifact_location=tmp_path.as_uri())
        client.create_registered_model(NAME)
        return client, place, experiment, client.create_run(experiment).info.run_id

    return open_one


@pytest.fixture
def by_client(monkeypatch):
    """Have everything go through MLflow's client, as with a server."""

    def choose():
        monkeypatch.setattr(database, "open_store", lambda client: None)
        monkeypatch.setattr(database, "open_registry", lambda client: None)

    return choose


def write(client, experiment, run):
    """Create three models, make two of them ready, and register two, with a number left out between them."""
    drafts = [ModelDraft(f"demo-ada@{n}", run, {"hacrl.key": f"k{n}"}, {"iteration": str(n)}) for n in range(3)]
    models = create_models(client, experiment, drafts)
    mark_ready(client, models[:2])
    versions = [
        VersionDraft(n, f"file:///models/{n}", run, model.model_id, {"hacrl.version": str(n)}, f"after {n} iterations")
        for n, model in ((1, models[0]), (3, models[1]))
    ]
    return models, register_versions(client, NAME, versions)


def content(place):
    """Return the rows of all tables in an order of their own, without ids and times; deleted versions are left out."""
    found = {}
    with sqlite3.connect(place) as connection:
        connection.row_factory = sqlite3.Row
        query = "select version from model_versions where current_stage = 'Deleted_Internal'"
        deleted = {row["version"] for row in connection.execute(query)}
        for table in TABLES:
            rows = [dict(row) for row in connection.execute(f"select * from {table}")]
            rows = [row for row in rows if row.get("version") not in deleted]
            found[table] = sorted(
                sorted(
                    (column, re.sub(r"m-[0-9a-f]{32}", "ID", str(value)))
                    for column, value in row.items()
                    if not re.search("time|run_id", column)
                )
                for row in rows
            )
    return found


def test_the_rows_are_those_of_mlflows_own_client(opened, by_client):
    client, ours, experiment, run = opened("ours.db")
    models, numbers = write(client, experiment, run)
    other, theirs, experiment, run = opened("theirs.db")
    by_client()
    expected, same = write(other, experiment, run)
    assert numbers == same == [1, 3]
    assert content(ours) == content(theirs)
    assert {table: len(rows) for table, rows in content(ours).items()} == dict(
        zip(TABLES, (3, 3, 3, 2, 2), strict=True)
    )
    # What is at hand of a model is what MLflow says of it.
    for written, client_ in ((models, client), (expected, other)):
        for model in written:
            asked = client_.get_logged_model(model.model_id)
            for field in ("name", "status", "tags", "params", "artifact_location", "source_run_id", "model_type"):
                assert getattr(model, field) == getattr(asked, field), field
            assert asked.last_updated_timestamp >= asked.creation_timestamp > 1_700_000_000_000


@pytest.mark.parametrize("direct", [True, False])
def test_models_are_pending_until_they_are_marked(opened, by_client, direct):
    if not direct:
        by_client()
    client, _, experiment, run = opened()
    models, _ = write(client, experiment, run)
    found = [str(client.get_logged_model(model.model_id).status) for model in models]
    assert found == [str(model.status) for model in models] == ["READY", "READY", "PENDING"]
    mark_ready(client, [])
    assert create_models(client, experiment, []) == register_versions(client, NAME, []) == []


@pytest.mark.parametrize("direct", [True, False])
def test_a_model_that_is_gone_does_not_become_ready(opened, by_client, direct):
    if not direct:
        by_client()
    client, place, experiment, run = opened()
    models, _ = write(client, experiment, run)
    with sqlite3.connect(place) as connection:
        connection.execute("delete from logged_models where model_id = ?", (models[2].model_id,))
    with pytest.raises(MlflowException, match=r"gone|not found"):
        mark_ready(client, models[2:])
    assert str(models[2].status) == "PENDING"


@pytest.mark.parametrize("direct", [True, False])
def test_numbers_go_up_whatever_is_there_already(opened, by_client, direct):
    """A number that is taken, or below one that was deleted, becomes the next free one."""
    if not direct:
        by_client()
    client, _, _, run = opened()
    drafts = [VersionDraft(n, f"file:///models/{n}", run, "m-1", {}, "") for n in (4, 4, 2, 9)]
    assert register_versions(client, NAME, drafts) == [4, 5, 6, 9]
    client.delete_model_version(NAME, "9")
    assert register_versions(client, NAME, drafts[:1]) == [10]
    client.create_model_version(NAME, "file:///models/by-hand")
    assert register_versions(client, NAME, drafts[-1:]) == [12]
    found = sorted(int(version.version) for version in client.search_model_versions(f"name='{NAME}'"))
    assert found == [4, 5, 6, 10, 11, 12]


def test_a_deleted_experiment_and_an_unknown_model_take_nothing(opened):
    client, place, experiment, run = opened()
    with pytest.raises(MlflowException, match="not found"):
        register_versions(client, "demo.nobody", [VersionDraft(1, "file:///x", run, "m-1", {}, "")])
    client.delete_experiment(experiment)
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        create_models(client, experiment, [ModelDraft("x", run, {}, {})])
    assert not any(content(place).values())


def test_a_batch_is_written_as_a_whole_or_not_at_all(opened):
    client, place, _, run = opened()
    impossible = VersionDraft(2, "file:///models/2", run, "m-1", {"of no type": object()}, "")  # type: ignore[dict-item]
    with pytest.raises(MlflowException):
        register_versions(client, NAME, [VersionDraft(1, "file:///models/1", run, "m-1", {}, ""), impossible])
    assert content(place)["model_versions"] == []


def test_stores_that_are_built_otherwise_are_spoken_to_through_the_client(opened, monkeypatch):
    client, *_ = opened()
    assert database.open_store(client) is not None
    assert database.open_registry(client) is not None
    monkeypatch.setattr(database, "_OF_MODELS", ("a_name_of_another_release",))
    monkeypatch.setattr(database, "_OF_VERSIONS", ("a_name_of_another_release",))
    assert database.open_store(client) is None
    assert database.open_registry(client) is None
