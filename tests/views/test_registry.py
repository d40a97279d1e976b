"""MLflow after a campaign: models, datasets, tables, figures, costs; and the same again after every replay."""

import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from flows.home import Home
from flows.record.history import History
from flows.record.record import read_campaign, read_entries
from flows.tracking.models import SharedFiles, write_flavour
from flows.tracking.projection import Projection
from flows.tracking.store_scheme import SCHEME
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.store import COLLECTED
from hacrl_core.contracts.manifest import Output

from .conftest import project, seen_config


def rows(home, query):
    with sqlite3.connect(home.root / "mlflow.db") as database:
        return database.execute(query).fetchall()


def everything(home):
    counts = {
        table: rows(home, f"select count(*) from {table}")[0][0]
        for table in (
            *("runs", "model_versions", "registered_models", "inputs", "datasets", "metrics", "tags", "params"),
            *("logged_models", "logged_model_metrics", "logged_model_tags", "trace_info", "spans", "assessments"),
        )
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
        # MLflow's number is the agent's version; it knows no number 0.
        assert [int(v.version) for v in found] == [1, 2, 3]
        assert [v.tags["hacrl.version"] for v in found] == ["1", "2", "3"]
        assert [v.tags["hacrl.key"] for v in found] == [entry.key for entry in history.versions[agent][1:]]
        for before, after in pairwise(found):
            assert after.tags["hacrl.parent"] == before.tags["hacrl.content"]
        for version in found:
            weights = Path(version.source.removeprefix("file://")) / "model" / "model.safetensors"
            # No copy: a link to the store's own file.
            assert weights.is_symlink()
            assert weights.resolve().is_relative_to(home.store.resolve())
        assert client.get_model_version_by_alias(f"seen.{agent}", "latest").version == found[-1].version
        best = client.get_model_version_by_alias(f"seen.{agent}", "best")
        assert int(best.tags["hacrl.version"]) == history.best(agent)
    copies = [p for p in (home.root / "mlartifacts").rglob("*.safetensors") if not p.is_symlink()]
    assert copies == []


def test_versions_of_an_agent_share_small_files_and_each_is_whole_without_the_others(tracked, tmp_path):
    home, config = tracked
    store = Store(home.store)
    history = History(config, store, read_entries(home.campaign("seen")))
    versions = [store.manifest(entry.stage, entry.key) for entry in history.versions["ada"][1:]]
    shared = SharedFiles()
    folders = [tmp_path / str(number) for number in range(3)]
    for folder, manifest in zip(folders, versions, strict=True):
        write_flavour(
            folder, store.folder(manifest.stage, manifest.key), manifest, folder.name, "run", "{{ x }}", shared
        )
    names = ("components/tokenizer/tokenizer.json", "components/tokenizer/chat_template.jinja", "model/config.json")
    for name in (*names, "model/generation_config.json"):
        assert len({(folder / name).stat().st_ino for folder in folders}) == 1, name
        assert not (folders[0] / name).is_symlink()
    assert len({(folder / "model/model.safetensors").resolve() for folder in folders}) == 3
    assert [f"model_id: {folder.name!r}" in (folder / "MLmodel").read_text() for folder in folders] == [True] * 3
    before = {name: (folders[1] / name).read_bytes() for name in names}
    shutil.rmtree(folders[0])
    last = versions[-1]
    write_flavour(folders[0], store.folder(last.stage, last.key), last, "again", "run", "{{ x }}", shared)
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() == before[name]
    gone = tmp_path / "gone"
    write_flavour(tmp_path / "4", gone, last, "gone", "run", "{{ x }}", shared)  # its files are being collected
    write_flavour(tmp_path / "5", store.folder(last.stage, last.key), last, "5", "run", "{{ x }}", shared)
    ended = json.loads((tmp_path / "5/model/generation_config.json").read_text())
    assert ended == json.loads((folders[1] / "model/generation_config.json").read_text())
    source = store.folder(last.stage, last.key)
    assert before[names[0]] == (source / "tokenizer.json").read_bytes()
    assert before[names[1]] == b"{{ x }}"


def test_the_best_version_loads_with_mlflow_and_writes_what_the_checkpoint_writes(tracked):
    """As users of MLflow do it. It ends its answers, although MLflow knows nothing of the campaign's end tokens."""
    import mlflow
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    home, config = tracked
    mlflow.set_tracking_uri(home.tracking_uri)
    loaded = mlflow.transformers.load_model("models:/seen.ada@best")
    history = History(config, Store(home.store), read_entries(home.campaign("seen")))
    entry = history.versions["ada"][history.best("ada")]
    folder = history.store.folder(entry.stage, entry.key)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name]), name
    question = [{"role": "user", "content": "2+3=?"}]
    [answer] = loaded(question, max_new_tokens=8, do_sample=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ends = loaded.model.generation_config.eos_token_id
    assert tokenizer.eos_token_id in ends
    written = plain.generate(**asked, max_new_tokens=8, do_sample=False, eos_token_id=ends)[0][
        asked["input_ids"].shape[1] :
    ]
    assert answer["generated_text"][-1]["content"] == tokenizer.decode(written, skip_special_tokens=True)


def test_every_kept_version_is_a_logged_model_with_a_metric_per_benchmark(tracked):
    from mlflow import MlflowClient

    home, config = tracked
    client = MlflowClient(tracking_uri=home.tracking_uri)
    history = History(config, Store(home.store), read_entries(home.campaign("seen")))
    [experiment] = [e.experiment_id for e in client.search_experiments() if e.name == "hacrl"]
    models = {model.name: model for model in client.search_logged_models([experiment])}
    assert set(models) == {f"seen-{agent}@{number}" for agent in config.agents for number in range(4)}
    digest = models["seen-ada@0"].metrics[0].dataset_digest
    assert len(digest) == 32
    for agent in config.agents:
        accuracy = dict(history.accuracy(agent, "held_out"))
        for number in range(4):
            [metric] = models[f"seen-{agent}@{number}"].metrics
            assert (metric.key, metric.dataset_name, metric.dataset_digest) == ("accuracy/held_out", "held_out", digest)
            assert (metric.step, metric.value) == (number, accuracy[number])
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    mine = {output.model_id for output in runs["seen/ben"].outputs.model_outputs}
    assert mine == {model.model_id for name, model in models.items() if name.startswith("seen-ben")}


def test_one_accuracy_has_one_name_and_the_campaign_has_the_mean(tracked):
    from mlflow import MlflowClient

    home, _ = tracked
    client = MlflowClient(tracking_uri=home.tracking_uri)
    runs = {run.info.run_name: run for run in client.search_runs(["1"])}
    ada = runs["seen/ada"].data.metrics
    same = [name for name, value in ada.items() if value == ada["accuracy/held_out"] and "held_out" in name]
    assert [name for name in same if "/kind/" not in name and "/level/" not in name] == ["accuracy/held_out"]
    for name in ("reward", "accuracy/held_out"):
        agents = [runs[f"seen/{agent}"].data.metrics[name] for agent in ("ada", "ben")]
        assert runs["seen"].data.metrics[name] == sum(agents) / 2


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
    alive = "select version from model_versions where name = 'seen.ada' and current_stage != 'Deleted_Internal'"
    assert rows(own, f"{alive} order by version") == [(2,), (3,)]
    gone = "select count(*) from logged_models where name = 'seen-ada@1' and lifecycle_stage = 'active'"
    assert rows(own, gone) == [(0,)]


def test_numbers_agree_with_versions_where_some_were_never_kept(own, tracked):
    """A version that was collected before MLflow heard of it takes its number with it."""
    shutil.copyfile(tracked[0].root / "blank.db", own.root / "mlflow.db")
    config, store = read_campaign(own.campaign("seen")), Store(own.store)
    for victim in History(config, store, read_entries(own.campaign("seen"))).versions["ada"][1:3]:
        (store.folder(victim.stage, victim.key) / COLLECTED).touch()
    project(own, config)
    alive = "select version from model_versions where name = 'seen.ada' and current_stage != 'Deleted_Internal'"
    assert rows(own, alive) == [(3,)]
    # No row stands for the numbers that are left out.
    assert rows(own, "select version from model_versions where name = 'seen.ada' order by version") == [(3,)]


def test_a_server_gets_a_source_that_it_accepts(tmp_path):
    """MLflow's servers refuse plain paths. Ours has a scheme that a repository reads where the store is mounted.

    In a process of its own that imports our module first: MLflow, which that module imports, looks it up in the middle.
    """
    (tmp_path / "config.json").write_text("{}")
    script = (
        "import sys, flows.tracking.registry\n"
        "from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository\n"
        "print([found.path for found in get_artifact_repository(sys.argv[1]).list_artifacts()])"
    )
    command = [sys.executable, "-W", "error:Failure attempting to register", "-c", script, f"{SCHEME}://{tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "['config.json']\n", done.stderr


def test_campaign_config_is_the_one_recorded(tracked):
    assert tracked[1] == seen_config()


def test_files_that_are_made_of_others_are_never_taken_for_them(tmp_path):
    """A checkpoint with nothing but a config: what its generation config is made of is that one file."""
    shared, manifests = SharedFiles(), []
    for name, content in (("config.json", '{"eos_token_id": 7}'), ("tokenizer_config.json", '{"eos_token_id": 7}')):
        source = tmp_path / name
        source.mkdir()
        (source / name).write_text(content)
        sha256 = hashlib.sha256(content.encode()).hexdigest()
        manifests.append((source, SimpleNamespace(outputs=[Output(path=name, kind="file", bytes=9, sha256=sha256)])))
    found = []
    for source, manifest in manifests:
        manifest.provenance = SimpleNamespace(packages={})
        write_flavour(source / "model", source, manifest, "m", "r", None, shared)
        found.append(json.loads((source / "model/model/generation_config.json").read_text()))
    assert found == [{"eos_token_id": [7]}, {"eos_token_id": []}]
