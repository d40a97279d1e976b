"""MLflow after a campaign: models, datasets, tables, figures, costs; and the same again after every replay."""

import json
import shutil
import sqlite3
from collections import Counter
from itertools import pairwise
from pathlib import Path

from flows.home import Home
from flows.record.history import History
from flows.record.record import read_campaign, read_entries
from flows.tracking.projection import Projection
from flows.tracking.registry import SCHEME, StoreRepository
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.store import COLLECTED

from .conftest import project, seen_config


def rows(home, query):
    with sqlite3.connect(home.root / "mlflow.db") as database:
        return database.execute(query).fetchall()


def everything(home):
    counts = {
        table: rows(home, f"select count(*) from {table}")[0][0]
        for table in ("runs", "model_versions", "registered_models", "inputs", "datasets", "metrics", "tags", "params")
    }
    files = Counter(str(p.relative_to(home.root)) for p in (home.root / "mlartifacts").rglob("*") if p.is_file())
    return counts, files


def test_every_kept_version_is_registered_where_it_lies_with_its_lineage(tracked):
    from mlflow import MlflowClient

    home, config = tracked
    client = MlflowClient(tracking_uri=home.tracking_uri)
    history = History(config, Store(home.store), read_entries(home.campaign("seen")))
    for agent in config.agents:
        found = sorted(client.search_model_versions(f"name='seen.{agent}'"), key=lambda v: int(v.version))
        assert [v.tags["hacrl.version"] for v in found] == ["0", "1", "2", "3"]
        assert [v.tags["hacrl.key"] for v in found] == [entry.key for entry in history.versions[agent]]
        for before, after in pairwise(found):
            assert after.tags["hacrl.parent"] == before.tags["hacrl.content"]
        for version in found:
            folder = Path(version.source.removeprefix("file://"))
            assert (folder / "model.safetensors").exists()  # no copy: the store's own folder
            assert folder.is_relative_to(home.store)
        assert client.get_model_version_by_alias(f"seen.{agent}", "latest").version == found[-1].version
        best = client.get_model_version_by_alias(f"seen.{agent}", "best")
        assert int(best.tags["hacrl.version"]) == history.best(agent)
    weights = [p for p in (home.root / "mlartifacts").rglob("*") if p.suffix in (".safetensors", ".bin")]
    assert weights == []


def test_a_model_of_the_registry_loads_as_a_checkpoint(tracked):
    import mlflow
    from transformers import AutoConfig

    home, _ = tracked
    mlflow.set_tracking_uri(home.tracking_uri)
    folder = mlflow.artifacts.download_artifacts("models:/seen.ada@best")
    assert AutoConfig.from_pretrained(folder).model_type == "llama"


def test_runs_have_datasets_with_digests_a_table_figures_and_the_report(tracked):
    from mlflow import MlflowClient

    home, _ = tracked
    client = MlflowClient(tracking_uri=home.tracking_uri)
    [experiment] = [e for e in client.search_experiments() if e.name == "hacrl"]
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"seen", "seen/ada", "seen/ben"}
    assert runs["seen/ada"].data.tags["mlflow.parentRunId"] == runs["seen"].info.run_id
    for run in runs.values():
        inputs = {i.dataset.name: i for i in run.inputs.dataset_inputs}
        assert set(inputs) == {"training problems", "held_out"}
        assert all(len(i.dataset.digest) == 32 for i in inputs.values())
        assert inputs["held_out"].tags[0].value == "evaluation"
    table = json.loads(Path(client.download_artifacts(runs["seen"].info.run_id, "rollouts.json")).read_text())
    assert {row[2] for row in table["data"]} == {"ada", "ben"}
    assert all(len(row) == len(table["columns"]) for row in table["data"])
    assert json.loads(runs["seen"].data.tags["mlflow.loggedArtifacts"]) == [{"path": "rollouts.json", "type": "table"}]
    names = {a.path for a in client.list_artifacts(runs["seen"].info.run_id)}
    assert {"figures", "report.html", "rollouts.json", "config.json"} <= names
    costs = {m.step: m.value for m in client.get_metric_history(runs["seen"].info.run_id, "cost/responses")}
    assert costs == {1: 48, 2: 96, 3: 144}
    assert {"reward", "accuracy/held_out"} <= set(runs["seen/ada"].data.metrics)


def test_replaying_leaves_everything_as_it_is(tracked):
    home, config = tracked
    before = everything(home)
    assert project(home, config) is False
    with sqlite3.connect(home.root / "mlflow.db") as database:  # as if it had never been told that it has everything
        database.execute("update tags set value = 'no' where key = 'hacrl.complete'")
    assert project(home, config) is True
    assert everything(home) == before


def test_a_projection_opened_anew_in_mid_campaign_goes_on_with_the_right_numbers(tracked, tmp_path):
    """After an outage only what was pending is sent again; costs and the best version still count from the start."""
    home, config = tracked
    other = Home(tmp_path)
    (tmp_path / "store").symlink_to(home.store)
    (tmp_path / "campaigns").symlink_to(home.campaigns)
    shutil.copyfile(home.root / "blank.db", tmp_path / "mlflow.db")
    entries = read_entries(home.campaign("seen"))
    late = [e for e in entries if e.iteration is not None and e.iteration >= 2]
    Projection(config, Store(other.store), other.tracking_uri, other).log(late)
    wanted = (
        "select value from latest_metrics join runs using (run_uuid) where name = 'seen' and key = 'cost/responses'"
    )
    assert rows(other, wanted) == [(144.0,)]
    assert rows(other, "select alias, name, version from registered_model_aliases order by name") == rows(
        home, "select alias, name, version from registered_model_aliases order by name"
    )


def test_versions_that_are_no_longer_kept_leave_the_registry(tracked, own):
    shutil.copyfile(tracked[0].root / "mlflow.db", own.root / "mlflow.db")
    config = read_campaign(own.campaign("seen"))
    store = Store(own.store)
    victim = History(config, store, read_entries(own.campaign("seen"))).versions["ada"][1]
    (store.folder(victim.stage, victim.key) / COLLECTED).touch()
    assert store.is_collected(victim.stage, victim.key)
    with sqlite3.connect(own.root / "mlflow.db") as database:
        database.execute("update tags set value = 'no' where key = 'hacrl.complete'")
    project(own, config)
    left = rows(
        own, "select count(*) from model_versions where name = 'seen.ada' and current_stage != 'Deleted_Internal'"
    )
    assert left == [(3,)]


def test_a_server_gets_a_source_that_it_accepts(tmp_path):
    """MLflow's servers refuse plain paths. Ours has a scheme that a repository reads where the store is mounted."""
    (tmp_path / "config.json").write_text("{}")
    repository = StoreRepository(f"{SCHEME}://{tmp_path}")
    assert [found.path for found in repository.list_artifacts()] == ["config.json"]


def test_campaign_config_is_the_one_recorded(tracked):
    assert tracked[1] == seen_config()
