"""verify: rollouts and the prompts' answers in; a verdict and a reward for each response out."""

import pytest
from stage_bench import Bench

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.verification import OverlongConfig, VerifyConfig
from stages.verify import VerifySlice

RESPONSES = [r"\boxed{5}", r"2+3=5, \boxed{ 5 }", r"\boxed{6}", "no idea"]


def verify_slice(**changes: object) -> VerifySlice:
    return VerifySlice(verify=VerifyConfig(**{"verifier": "exact", "fallbacks": (), **changes}))


@pytest.fixture
def inputs(bench: Bench) -> dict[str, ArtifactRef]:
    """One prompt with the answer 5, and four responses to it of 10, 20, 30 and 40 tokens."""
    prompt = {"prompt_id": ["p"], "messages": [[{"role": "user", "content": "2+3=?"}]], "answer": ["5"]}
    lengths = [10, 20, 30, 40]
    rollouts = {
        "rollout_id": [f"000000/ada/p/{g:02d}" for g in range(4)],
        "iteration": [0] * 4,
        "agent_id": ["ada"] * 4,
        "policy_digest": ["d"] * 4,
        "prompt_id": ["p"] * 4,
        "sample_index": range(4),
        "prompt_token_ids": [[1]] * 4,
        "response_text": RESPONSES,
        "response_token_ids": [[1] * length for length in lengths],
        "response_logprobs": [[-1.0] * length for length in lengths],
        "finish_reason": ["stop"] * 4,
        "seed": range(4),
    }
    return {
        "prompts": bench.publish("sample", prompts={**prompt, "source": ["arithmetic"], "tags": ["{}"]}),
        "rollouts": bench.publish("generate", rollouts=rollouts),
    }


def test_right_wrong_and_no_answer(bench, inputs):
    outcome = bench.run("verify", verify_slice(), inputs)
    rows = bench.rows(outcome.ref, "verdicts")
    assert [row["verdict"] for row in rows] == ["correct", "correct", "incorrect", "unparseable"]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0, 0.0]
    assert [row["extracted_answer"] for row in rows] == ["5", "5", "6", ""]
    assert outcome.metrics["verify/reward_mean"] == 0.5
    assert outcome.metrics["verify/unparseable_share"] == 0.25


def test_rewards_may_be_shaped_by_form_and_length(bench, inputs):
    overlong = OverlongConfig(max_tokens=20, buffer_tokens=20, penalty=0.5)
    shaped = verify_slice(format_reward=0.1, overlong=overlong)
    rows = bench.rows(bench.run("verify", shaped, inputs).ref, "verdicts")
    # Right and half too long, right and too long, wrong in a box but too long, no box and too long.
    assert [row["reward"] for row in rows] == [0.75, 0.5, 0.0, 0.0]


def test_times_are_kept_but_are_no_content(bench, inputs):
    ref = bench.run("verify", verify_slice(), inputs).ref
    assert len(bench.rows(ref, "timings")) == 4
    measured = {output.path: output.measured for output in bench.store.manifest("verify", ref.key).outputs}
    assert measured == {"verdicts.parquet": False, "timings.parquet": True}


def test_the_number_of_workers_is_not_part_of_the_key(bench, inputs):
    first = bench.run("verify", verify_slice(), inputs)
    assert bench.run("verify", verify_slice(workers=1, max_error_share=0.5), inputs).ref == first.ref
    assert bench.run("verify", verify_slice(verifier="numeric"), inputs).ref != first.ref
