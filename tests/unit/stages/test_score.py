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


def settled_slice(learner: str, **changes: object) -> ScoreSlice:
    return score_slice(learner).model_copy(update={"boundary": "settled", **changes})


def rewritten(shared: Bench, rollouts: ArtifactRef, agent: ArtifactRef, lead: str, end: str) -> ArtifactRef:
    """Rollouts whose sampler begins with ``lead`` and ends with the stop string ``end`` instead of its end token."""
    tokenizer, rows = load_tokenizer(agent.path), shared.rows(rollouts, "rollouts")
    for row in rows:
        finished = row["finish_reason"] == "stop"
        row["response_text"] = lead + row["response_text"]
        ids = tokenizer.encode(row["response_text"] + (end if finished else ""), add_special_tokens=False)
        row.update(response_token_ids=ids, response_logprobs=[-1.0] * len(ids))
    return shared.publish("generate", rollouts={name: [row[name] for row in rows] for name in rows[0]})


def test_warm_starts_of_one_convention_have_the_same_scores_settled_or_not(shared, inputs, ben):
    given = {**inputs, "sampler/ben": ben}
    before, now = (
        shared.rows(shared.run("score", config, given).ref, "scores")
        for config in (score_slice("ada"), settled_slice("ada"))
    )
    assert now == before


def test_a_stop_string_of_the_sampler_is_not_scored_as_an_end_that_the_learner_never_writes(shared, inputs, ada, ben):
    """ben begins with a space and ends with '?', ada with its end token: each reads the other in its own convention."""
    odd = rewritten(shared, inputs["rollouts/ben"], ben, " ", "?")
    (odd.path / "sampler.json").write_text((inputs["rollouts/ben"].path / "sampler.json").read_text())
    plain = {
        row["rollout_id"]: row for row in shared.rows(shared.run("score", score_slice("ada"), inputs).ref, "scores")
    }
    outcome = shared.run("score", settled_slice("ada"), {**inputs, "rollouts/ben": odd, "sampler/ben": ben})
    settled = {row["rollout_id"]: row for row in shared.rows(outcome.ref, "scores")}
    assert {key: row["token_ids"] for key, row in settled.items()} == {k: row["token_ids"] for k, row in plain.items()}
    assert {"score/foreign_first_logprob", "score/foreign_last_logprob"} < outcome.metrics.keys()
    back = {**inputs, "agent": ben, "rollouts/ben": odd, "sampler/ada": ada}
    read = shared.rows(shared.run("score", settled_slice("ben", stop_strings=("?",)), back).ref, "scores")
    tokenizer = load_tokenizer(ben.path)
    texts = {row["rollout_id"]: row for row in shared.rows(inputs["rollouts/ada"], "rollouts")}
    foreign = [row for row in read if not row["is_own"] and not row["truncated"]]
    assert foreign
    for row in foreign:
        wrote = texts[row["rollout_id"]]
        end = "?" if wrote["finish_reason"] == "stop" else ""
        assert tokenizer.decode(row["token_ids"]) == f" {wrote['response_text'].strip()}{end}"


def test_one_tokenizer_with_another_template_keeps_the_ids_and_renders_the_prompt_anew(shared, inputs, ada, prompts):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if short %}={% endif %}"
    for options, boundary in (({}, "settled"), ({"short": True}, "settled")):
        config = score_slice("ada", ("ada", "twin")).model_copy(
            update={"chat_template": template, "template_options": options, "boundary": boundary}
        )
        given = {**inputs, "rollouts/twin": inputs["rollouts/ada"], "sampler/twin": ada}
        # Two samplers must not share ids of rollouts.
        rows = shared.rows(given["rollouts/twin"], "rollouts")
        renamed = {name: [row[name] for row in rows] for name in rows[0]}
        renamed["rollout_id"] = [name.replace("ada", "twin") for name in renamed["rollout_id"]]
        given["rollouts/twin"] = shared.publish("generate", rollouts=renamed)
        scores = shared.rows(shared.run("score", config, given).ref, "scores")
        own = {row["rollout_id"]: row["response_token_ids"] for row in rows}
        twin = [row for row in scores if row["sampler"] == "twin"]
        assert [row["token_ids"] for row in twin] == [own[row["rollout_id"].replace("twin", "ada")] for row in twin]
        tokenizer = load_tokenizer(ada.path)
        asked = {row["prompt_id"]: row["messages"] for row in shared.rows(prompts, "prompts")}
        for row in twin:
            end = "=" if options else ""
            assert tokenizer.decode(row["prompt_token_ids"]).endswith(asked[row["prompt_id"]][-1]["content"] + end)
