"""generate: an agent and prompts in; rollouts, each prompt answered several times, out."""

import json

import pytest
from stage_bench import Bench

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.generation import BuiltinEngineConfig, GenerateConfig
from stages.generate import GenerateSlice
from stages.spec import Outcome


def generate_slice(**changes: object) -> GenerateSlice:
    settings = {"max_tokens": 16, **changes}
    return GenerateSlice(agent_id="ada", iteration=7, samples_per_prompt=4, generate=GenerateConfig(**settings))


def rollouts(shared: Bench, inputs: dict, seed: int = 0, **changes: object) -> list[dict]:
    return shared.rows(shared.run("generate", generate_slice(**changes), inputs, seed).ref, "rollouts")


def test_every_prompt_is_answered_several_times(shared, ada, prompts):
    rows = rollouts(shared, {"agent": ada, "prompts": prompts})
    asked = [row["prompt_id"] for row in shared.rows(prompts, "prompts")]
    assert [(row["prompt_id"], row["sample_index"]) for row in rows] == [(p, s) for p in asked for s in range(4)]
    for row in rows:
        assert row["rollout_id"] == f"000007/ada/{row['prompt_id']}/{row['sample_index']:02d}"
        assert row["policy_digest"] == ada.digest
        assert row["finish_reason"] in ("stop", "length")
        assert len(row["response_logprobs"]) == len(row["response_token_ids"]) <= 16
        assert max(row["response_logprobs"]) <= 0
    assert len({tuple(row["response_token_ids"]) for row in rows}) > 3


def test_the_seed_decides_what_is_sampled(shared, ada, prompts):
    inputs = {"agent": ada, "prompts": prompts}
    texts = [[row["response_text"] for row in rollouts(shared, inputs, seed)] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_greedy_samples_are_all_alike(shared, ada, prompts):
    rows = rollouts(shared, {"agent": ada, "prompts": prompts}, temperature=0.0)
    for prompt in {row["prompt_id"] for row in rows}:
        assert len({row["response_text"] for row in rows if row["prompt_id"] == prompt}) == 1


def test_settings_that_change_only_the_speed_find_the_same_artifact(shared, ada, prompts):
    inputs = {"agent": ada, "prompts": prompts}
    first = shared.run("generate", generate_slice(), inputs)
    for changes in ({"batch_size": 2}, {"engine": BuiltinEngineConfig(fast_path=False)}):
        assert shared.run("generate", generate_slice(**changes), inputs).ref == first.ref


def test_the_artifact_says_whose_tokens_these_are(shared, ada, prompts):
    ref = shared.run("generate", generate_slice(), {"agent": ada, "prompts": prompts}).ref
    sampler = json.loads((ref.path / "sampler.json").read_text())
    assert sampler["agent_id"] == "ada"
    assert len(sampler["tokenizer"]) == 64


def verdicts_of(shared: Bench, rows: list[dict], kinds: list[str]) -> ArtifactRef:
    """Verdicts made by hand: each group of four gets these."""
    said = [kinds[row["sample_index"] % 4] for row in rows]
    columns = {name: [row[name] for row in rows] for name in ("rollout_id", "prompt_id")}
    rewards = [1.0 if kind == "correct" else 0.0 for kind in said]
    beside = {"extracted_answer": [""] * len(rows), "verifier": ["hand"] * len(rows)}
    return shared.publish("verify", verdicts={**columns, "reward": rewards, "verdict": said, **beside})


def again(shared: Bench, inputs: dict, kinds: list[str]) -> tuple[Outcome, Outcome]:
    first = shared.run("generate", generate_slice(), inputs)
    verdicts = verdicts_of(shared, shared.rows(first.ref, "rollouts"), kinds)
    slice_ = generate_slice().model_copy(update={"attempt": 1})
    return first, shared.run("generate", slice_, {**inputs, "rollouts": first.ref, "verdicts": verdicts})


def test_where_every_prompt_has_a_signal_no_engine_is_asked_and_nothing_changes(shared, ada, prompts, monkeypatch):
    inputs = {"agent": ada, "prompts": prompts}
    shared.run("generate", generate_slice(), inputs)
    monkeypatch.setattr("stages.generate.generate_resumable", None)
    first, second = again(shared, inputs, ["correct", "incorrect", "error", "correct"])
    assert second.ref.digest == first.ref.digest
    assert second.ref.key != first.ref.key
    counted = {name: second.metrics[f"generate/{name}"] for name in ("responses", "tokens", "resampled_share")}
    assert counted == {"responses": 0, "tokens": 0, "resampled_share": 0}
    assert second.metrics["generate/response_length_mean"] == first.metrics["generate/response_length_mean"]


@pytest.mark.parametrize(
    "kinds",
    [["correct"] * 4, ["incorrect", "unparseable", "timeout", "incorrect"], ["correct", "error"] * 2, ["error"] * 4],
)
def test_one_reward_is_no_signal_and_what_was_not_judged_does_not_count(shared, ada, prompts, kinds):
    first, second = again(shared, {"agent": ada, "prompts": prompts}, kinds)
    rows = shared.rows(second.ref, "rollouts")
    before = shared.rows(first.ref, "rollouts")
    assert [row["prompt_id"] for row in rows] == [row["prompt_id"] for row in before]
    assert [row["sample_index"] for row in rows] == [row["sample_index"] + 4 for row in before]
    assert not {row["seed"] for row in rows} & {row["seed"] for row in before}
    assert second.metrics["generate/responses"] == len(rows)
    assert second.metrics["generate/resampled_share"] == 1
