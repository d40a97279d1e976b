"""update: a learner, scores and credit in; the learner's next version out."""

import pytest
import torch
from stage_bench import Bench

from hacrl_core.agents.agent import load_agent
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.algorithm import preset
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.training import ScoreConfig, UpdateConfig
from hacrl_core.learning import fused, trainer
from stages.generate import GenerateSlice
from stages.score import ScoreSlice
from stages.update import UpdateSlice


def update_slice(**changes: object) -> UpdateSlice:
    settings = {"learning_rate": 1e-3, "weight_decay": 0.0}
    return UpdateSlice(
        learner="ada",
        samplers=("ada",),
        iteration=0,
        minibatch_prompts=3,
        algorithm=preset("gspo"),
        update=UpdateConfig(**settings),
        **changes,
    )


@pytest.fixture(scope="module")
def rollouts(shared: Bench, ada: ArtifactRef, prompts: ArtifactRef) -> ArtifactRef:
    config = GenerateSlice(agent_id="ada", iteration=0, samples_per_prompt=2, generate=GenerateConfig(max_tokens=16))
    return shared.run("generate", config, {"agent": ada, "prompts": prompts}).ref


def score(shared: Bench, agent: ArtifactRef, rollouts: ArtifactRef, prompts: ArtifactRef) -> ArtifactRef:
    config = ScoreSlice(learner="ada", samplers=("ada",), iteration=0, score=ScoreConfig(), max_tokens=16)
    return shared.run("score", config, {"agent": agent, "prompts": prompts, "rollouts/ada": rollouts}).ref


def credit(shared: Bench, rollouts: ArtifactRef, advantages: list[float]) -> ArtifactRef:
    """Publish made-up advantages for the first so many rollouts."""
    rows = shared.rows(rollouts, "rollouts")[: len(advantages)]
    columns = {
        "rollout_id": [row["rollout_id"] for row in rows],
        "sampler": ["ada"] * len(rows),
        "prompt_id": [row["prompt_id"] for row in rows],
        "is_own": [True] * len(rows),
        "reward": [0.0] * len(rows),
        "omega": [1.0] * len(rows),
        "baseline": [0.0] * len(rows),
        "advantage": advantages,
    }
    return shared.publish("credit", credit=columns)


@pytest.fixture
def inputs(shared, ada, rollouts, prompts):
    def build(advantages: list[float]) -> dict[str, ArtifactRef]:
        scores = score(shared, ada, rollouts, prompts)
        return {"agent": ada, "scores/ada": scores, "credit": credit(shared, rollouts, advantages)}

    return build


def weights(ref: ArtifactRef) -> dict[str, torch.Tensor]:
    return load_agent(ref.path).model.state_dict()


def test_what_is_above_the_baseline_becomes_likelier(shared, ada, rollouts, prompts, inputs):
    outcome = shared.run("update", update_slice(), inputs([1.0, -1.0, 0.0, 0.0, 0.0, 0.0]))
    before = shared.rows(score(shared, ada, rollouts, prompts), "scores")
    after = shared.rows(score(shared, outcome.ref, rollouts, prompts), "scores")
    gains = [new["mean_logprob"] - old["mean_logprob"] for old, new in zip(before, after, strict=True)]
    assert gains[0] > 0
    assert gains[0] > gains[1]
    assert outcome.metrics["update/updates"] == 1
    assert outcome.metrics["update/skipped"] == 0


def test_nothing_is_learned_where_all_advantages_are_zero(shared, ada, inputs):
    outcome = shared.run("update", update_slice(), inputs([0.0] * 6))
    old, new = weights(ada), weights(outcome.ref)
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_the_update_is_the_same_every_time(shared, inputs, tmp_path):
    given = inputs([1.0, -1.0, 0.5, 0.0, 0.0, -0.5])
    first = shared.run("update", update_slice(), given, seed=5)
    speed = UpdateConfig(learning_rate=1e-3, weight_decay=0.0, token_budget=512)
    again = shared.run("update", update_slice().model_copy(update={"update": speed}), given, seed=5)
    assert (first.cached, again.cached) == (False, True)


def test_a_version_stays_as_it_was_when_the_verifier_failed_too_often(shared, ada, inputs):
    warnings: list[str] = []
    shared.context.warn = warnings.append
    outcome = shared.run("update", update_slice(max_error_share=0.25), inputs([1.0, -1.0]))
    assert outcome.ref.digest == ada.digest
    assert outcome.metrics["update/verifier_failed"] == 1
    assert "skipped" in warnings[0]


@pytest.mark.parametrize(("off", "said"), [(2e-4, 1), (0.5e-4, 0)])
def test_log_probs_that_score_and_update_compute_differently_are_warned_about(shared, inputs, monkeypatch, off, said):
    """A learner whose passes differ from the scored ones by ``off``, as in bfloat16 on other batch shapes."""
    passed = trainer.fused_pass

    def shifted(*args, **kwargs):
        outcome = passed(*args, **kwargs)
        for _, stats in outcome.stats:
            stats["score_mismatch"] += off
        return outcome

    monkeypatch.setattr(trainer, "fused_pass", shifted)
    warnings: list[str] = []
    shared.context.warn = warnings.append
    outcome = shared.run("update", update_slice(), inputs([1.0, -1.0, 0.5, off]))
    assert outcome.metrics["update/score_mismatch_max"] == pytest.approx(off, rel=0.05)
    assert [f"{off:.2g} between score and update" in line for line in warnings] == [True] * said


@pytest.mark.parametrize(
    ("found", "path"), [({}, None), ({"x/fused_triton": 1.0}, "triton"), ({"x/fused_triton": 0.0}, "torch")]
)
def test_the_manifest_says_which_code_computed_the_loss_on_a_gpu(shared, inputs, monkeypatch, found, path):
    monkeypatch.setattr(fused, "kernel_metrics", lambda stage, device: found)
    outcome = shared.run("update", update_slice(), inputs([1.0, -1.0, len(found) + sum(found.values())]))
    manifest = shared.store.manifest(outcome.ref.stage, outcome.ref.key)
    assert manifest.provenance.hardware.get("fused_loss") == path


def test_only_several_other_samplers_change_the_identity():
    """They are heard in rounds now; with one other sampler, or everybody mixed, the minibatches are what they were."""
    shared = {"algorithm": preset("hacpo"), "learner": "ada"}

    def identity(*samplers: str, **changes: object) -> dict[str, object]:
        return update_slice().model_copy(update={**shared, "samplers": samplers, **changes}).identity()

    assert "foreign_minibatches" not in identity("ada", "ben")
    assert identity("ada", "ben", "cleo")["foreign_minibatches"] == "rounds"
    mixed = UpdateConfig(learning_rate=1e-3, minibatch_order="mixed")
    assert "foreign_minibatches" not in identity("ada", "ben", "cleo", update=mixed)
    assert "foreign_minibatches" not in identity("ada", algorithm=preset("gspo"))
