"""generate: an agent and prompts in; rollouts, each prompt answered several times, out."""

import json

from stage_bench import Bench

from hacrl_core.config.generation import BuiltinEngineConfig, GenerateConfig
from stages.generate import GenerateSlice


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
