"""score: a learner and every sampler's rollouts in; log-probs of each response in the learner's own tokens out."""

import numpy as np
import pytest
from stage_bench import Bench

from hacrl_core.agents.agent import load_tokenizer
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.training import ScoreConfig
from stages.generate import GenerateSlice
from stages.score import ScoreSlice


def score_slice(learner: str, samplers: tuple[str, ...] = ("ada", "ben"), **changes: object) -> ScoreSlice:
    score = ScoreConfig(**changes)
    return ScoreSlice(learner=learner, samplers=samplers, iteration=0, score=score, max_tokens=16)


@pytest.fixture(scope="module")
def inputs(shared: Bench, ada: ArtifactRef, ben: ArtifactRef, prompts: ArtifactRef) -> dict[str, ArtifactRef]:
    """Both agents' rollouts; ada is the learner."""
    found = {"agent": ada, "prompts": prompts}
    for name, agent in (("ada", ada), ("ben", ben)):
        config = GenerateSlice(agent_id=name, iteration=0, samples_per_prompt=2, generate=GenerateConfig(max_tokens=16))
        found[f"rollouts/{name}"] = shared.run("generate", config, {"agent": agent, "prompts": prompts}).ref
    return found


def test_own_responses_have_the_log_probs_of_sampling(shared, inputs):
    outcome = shared.run("score", score_slice("ada"), inputs)
    scores = {row["rollout_id"]: row for row in shared.rows(outcome.ref, "scores")}
    for rollout in shared.rows(inputs["rollouts/ada"], "rollouts"):
        score = scores[rollout["rollout_id"]]
        assert score["is_own"]
        assert score["token_ids"] == rollout["response_token_ids"]
        np.testing.assert_allclose(score["logprobs"], rollout["response_logprobs"], atol=1e-4)
        assert score["mean_logprob"] == pytest.approx(np.mean(score["logprobs"]), abs=1e-6)
    assert outcome.metrics["score/sampling_mismatch_max"] < 1e-4


def test_foreign_responses_are_the_same_text_in_the_learners_tokens(shared, inputs, ada):
    tokenizer = load_tokenizer(ada.path)
    rows = shared.rows(shared.run("score", score_slice("ada"), inputs).ref, "scores")
    foreign = {row["rollout_id"]: row for row in rows if not row["is_own"]}
    compared = 0
    for rollout in shared.rows(inputs["rollouts/ben"], "rollouts"):
        score = foreign.get(rollout["rollout_id"])
        if score is None or score["truncated"]:
            continue
        assert tokenizer.decode(score["token_ids"], skip_special_tokens=True) == rollout["response_text"]
        assert score["token_ids"] != rollout["response_token_ids"]
        compared += 1
    assert compared


def test_memory_settings_change_no_result(shared, inputs):
    first = shared.run("score", score_slice("ada"), inputs)
    assert shared.run("score", score_slice("ada", token_budget=64, max_logits_mb=1), inputs).ref == first.ref
    assert shared.run("score", score_slice("ada", temperature=2.0), inputs).ref != first.ref


def test_the_sampler_may_be_believed_about_its_own_responses(shared, inputs):
    outcome = shared.run("score", score_slice("ada", samplers=("ada",), own="sampled"), inputs)
    sampled = {row["rollout_id"]: row["response_logprobs"] for row in shared.rows(inputs["rollouts/ada"], "rollouts")}
    assert {row["rollout_id"]: row["logprobs"] for row in shared.rows(outcome.ref, "scores")} == sampled
    assert "score/sampling_mismatch_mean" not in outcome.metrics
