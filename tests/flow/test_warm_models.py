"""One loaded model serves score and update of a version, and the update's result the next one; no artifact shows it."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from flows.campaign import run_campaign
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.errors import DivergenceError
from hacrl_core.warm import WarmModels
from stages.runner import run_stage
from stages.spec import Context, StageCall
from tests.flow.conftest import TINY, Inline, tiny

CONFIG = {"agents": {"ada": TINY["agents"]["ada"]}, "iterations": 3, "algorithm": {"preset": "gspo"}, "evaluate": {}}


class Cold(Inline):
    """Every stage in a process of its own, as far as anything kept warm is concerned."""

    def submit(self, planned):
        self.context = Context()
        return super().submit(planned)


def campaign(kind, root):
    config = tiny(**CONFIG)
    runner = kind(Store(root))
    run_campaign(config, StageCalls(config), runner)
    return runner


@pytest.fixture(scope="module")
def warm_run(tmp_path_factory):
    torch.set_num_threads(1)
    loaded, load = [], WarmModels._load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WarmModels, "_load", lambda self, path, *rest: loaded.append(path) or load(self, path, *rest))
        runner = campaign(Inline, tmp_path_factory.mktemp("warm"))
    return runner, loaded


def before_update(runner, iteration, root):
    """A copy of the store without that update, and the call that makes it again."""
    shutil.copytree(runner.store.root / "objects", root / "objects")
    ref = runner.outcomes[f"update ada #{iteration}"].ref
    manifest = json.loads((ref.path / "manifest.json").read_text())
    roles = {
        "agent": f"update ada #{iteration - 1}",
        "credit": f"credit ada #{iteration}",
        "scores/ada": f"score ada #{iteration}",
        "reference": f"score ada reference #{iteration}",
    }
    shutil.rmtree(root / ref.path.relative_to(runner.store.root))
    found = {role: runner.outcomes[label].ref for role, label in roles.items() if label in runner.outcomes}
    inputs = {r: replace(one, path=root / one.path.relative_to(runner.store.root)) for r, one in found.items()}
    config = tiny(**CONFIG)
    planned = StageCalls(config, "").update("ada", None, {"ada": None}, None, iteration)
    return Store(root), StageCall("update", planned.config, inputs, manifest["identity"]["seed"], "ada", iteration)


def test_weights_are_loaded_once_and_artifacts_equal_those_of_cold_processes(warm_run, tmp_path):
    runner, loaded = warm_run
    assert len(loaded) == 2, "the first version for score and update, and once more for the KL; then nothing"
    shutil.copytree(runner.store.root / "objects" / "warmstart", tmp_path / "objects" / "warmstart")
    cold = campaign(Cold, tmp_path)
    assert {label: o.ref.digest for label, o in cold.outcomes.items()} == {
        label: o.ref.digest for label, o in runner.outcomes.items()
    }


def test_what_is_kept_is_what_was_published(warm_run):
    runner, _ = warm_run
    newest = runner.outcomes["update ada #2"].ref
    kept = runner.context.warm.newest
    agent = kept.agent
    assert (kept.policy_digest, agent.checkpoint) == (newest.digest, newest.path)
    on_disk = load_file(newest.path / "model.safetensors")
    for name, parameter in agent.model.named_parameters():
        assert torch.equal(parameter, on_disk[name])
        assert parameter.grad is None


def test_a_failed_update_leaves_no_half_trained_model_behind(warm_run, tmp_path, monkeypatch):
    from hacrl_core.learning.trainer import Trainer

    runner, _ = warm_run
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, *a: replace(step(self, *a), finite=self.updates % 2 == 1))
    context, (store, call) = Context(), before_update(runner, 1, tmp_path)
    with pytest.raises(DivergenceError, match="not finite"):
        run_stage(store, call, context)
    assert context.warm.newest is None


def test_a_lost_race_is_not_kept(warm_run, tmp_path, monkeypatch):
    """Somebody else publishes the key first: their bytes count, and this process has not seen them."""
    runner, _ = warm_run
    store, call = before_update(runner, 1, tmp_path)
    publish = Store.publish

    def late(self, staged, identity, *rest):
        theirs = self.folder(identity.stage, identity.key)
        shutil.copytree(runner.outcomes["update ada #1"].ref.path, theirs)
        return publish(self, staged, identity, *rest)

    monkeypatch.setattr(Store, "publish", late)
    context = Context()
    outcome = run_stage(store, call, context)
    assert outcome.ref.digest == runner.outcomes["update ada #1"].ref.digest
    assert context.warm.newest is None
