"""verify: rollouts and the prompts' answers in; a verdict and a reward for each response out."""

import json
import re

import pytest
from stage_bench import Bench

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.verification import OverlongConfig, VerifyConfig
from hacrl_core.contracts.manifest import Identity, Provenance
from hacrl_core.contracts.tables import VERDICTS_2, read_table
from hacrl_core.problems import Problem
from hacrl_core.verification import verify_batch
from hacrl_core.verification.judge import JudgeAgent, Judging
from stages.judging import JudgeSlice
from stages.spec import OutFolder
from stages.verify import VerifySlice

RESPONSES = [r"\boxed{5}", r"2+3=5, \boxed{ 5 }", r"\boxed{6}", "no idea"]


def verify_slice(**changes: object) -> VerifySlice:
    return VerifySlice(verify=VerifyConfig(**{"verifier": "exact", "fallbacks": (), **changes}))


@pytest.fixture
def inputs(bench: Bench) -> dict[str, ArtifactRef]:
    return inputs_in(bench)


def inputs_in(bench: Bench) -> dict[str, ArtifactRef]:
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


def cut_off(bench, inputs, texts: list[str], reasons: list[str]) -> dict[str, ArtifactRef]:
    """The inputs with other texts and finish reasons; every answer is 5."""
    rows = bench.rows(inputs["rollouts"], "rollouts")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns |= {"response_text": texts, "finish_reason": reasons}
    return {**inputs, "rollouts": bench.publish("generate", rollouts=columns)}


def test_half_a_number_of_a_response_that_was_cut_off_is_not_rewarded(bench, inputs):
    """The first response broke off inside 55, the second ended with 5, the third was cut off after its box."""
    texts = ["the sum is 5", "the sum is 5", r"so \boxed{5} and then", "the sum is 6"]
    given = cut_off(bench, inputs, texts, ["length", "stop", "length", "length"])
    settings = {"verifier": "math", "fallbacks": ("phrase", "last", "whole")}
    judged = bench.run("verify", verify_slice(**settings), given)
    assert [row["reward"] for row in bench.rows(judged.ref, "verdicts")] == [1.0, 1.0, 1.0, 0.0]
    assert judged.metrics["verify/truncated_guess_share"] == 0.25
    complete = bench.run("verify", verify_slice(**settings, truncated="complete_only"), given)
    rows = bench.rows(complete.ref, "verdicts")
    assert [row["reward"] for row in rows] == [0.0, 1.0, 1.0, 0.0]
    assert [row["verdict"] for row in rows] == ["unparseable", "correct", "correct", "unparseable"]
    assert complete.metrics["verify/truncated_guess_share"] == 0.0


def test_the_default_verifier_pays_for_no_half_number_and_the_old_verdicts_keep_their_identity():
    new, old = VerifyConfig(verifier="strict"), VerifyConfig(verifier="strict", truncated="judge")
    assert new.complete_only
    assert not old.complete_only
    assert new.identity()["truncated"] == "complete_only"
    for config in (old, VerifyConfig(verifier="math"), VerifyConfig(verifier="exact")):
        assert "truncated" not in config.identity()
    cut = verify_batch(["the sum is 5", "the sum is 5"], ["5", "5"], new, truncated=[True, False])
    assert [verdict.reward for verdict in cut] == [0.0, 1.0]
    judged = verify_batch(["the sum is 5"], ["5"], old, truncated=[True])
    assert judged[0].reward == 1.0


def test_several_rewards_write_version_2_with_parts_and_metrics(bench, inputs):
    rewards = {"right": {"verifier": "exact", "weight": 2}, "boxed": {"verifier": "numeric", "weight": 1}}
    outcome = bench.run("verify", verify_slice(rewards=rewards), inputs)
    rows = read_table(outcome.ref.path / "verdicts.parquet", VERDICTS_2).to_pylist()
    assert json.loads(rows[0]["parts"]) == {"right": 1.0, "boxed": 1.0}
    assert [row["raw_reward"] for row in rows] == [3.0, 3.0, 0.0, 0.0]
    assert [row["reward"] for row in bench.rows(outcome.ref, "verdicts")] == [1.0, 1.0, 0.0, 0.0]
    assert outcome.metrics["verify/part/right"] == 0.5
    assert outcome.metrics["verify/raw_reward_mean"] == 1.5
    plain = bench.run("verify", verify_slice(), inputs)
    kinds = [output.kind for output in bench.store.manifest("verify", plain.ref.key).outputs]
    assert "verdicts/1" in kinds


def test_an_agent_of_the_campaign_judges_and_is_asked_once(shared, ada):
    bench, inputs = shared, inputs_in(shared)
    judge = {"agent": "ada", "template": "{problem}{response}", "pattern": r"(\d)", "range": (0, 9), "max_tokens": 4}
    judges = {"ada": JudgeSlice(generate=GenerateConfig(max_tokens=4))}
    config = VerifySlice(
        verify=VerifyConfig.model_validate({"verifier": "judge", "judge": judge, "max_error_share": 1.0}), judges=judges
    )
    outcome = bench.run("verify", config, {**inputs, "judge/ada": ada})
    kept = [json.loads(path.read_text()) for path in (bench.store.root / "judgements").glob("*/*.json")]
    assert {answer["prompt"] for answer in kept} == {f"2+3=?{response}" for response in RESPONSES}
    assert {answer["model"] for answer in kept} == {ada.digest}
    by_prompt = {answer["prompt"]: re.findall(r"\d", answer["answer"]) for answer in kept}
    rows = read_table(outcome.ref.path / "verdicts.parquet", VERDICTS_2).to_pylist()
    for row, response in zip(rows, RESPONSES, strict=True):
        digits = by_prompt[f"2+3=?{response}"]
        assert row["verdict"] == ("error" if not digits else "correct" if digits[-1] == "9" else "incorrect")
        assert not digits or row["raw_reward"] == float(digits[-1])
    # Answers are kept beside the artifact: another stage call with the same questions asks nobody.
    calls: list[str] = []
    kept_answers = Judging(bench.store.root / "judgements", {"ada": JudgeAgent(calls.extend, ada.digest)})
    problem = Problem("p", ({"role": "user", "content": "2+3=?"},), "5", "arithmetic")
    verify_batch(RESPONSES, ["5"] * 4, config.verify, problems=[problem] * 4, judging=kept_answers)
    assert calls == []


CHANCE = "The load takes 40 minutes, which is a quarter of the whole time of 5"
TOLD = "So the answer is 5."


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({}, [0.0, 1.0, 1.0]),  # the last number of a text is no answer
        ({"fallbacks": ["phrase", "last", "whole"]}, [1.0, 1.0, 1.0]),
        ({"fallbacks": []}, [0.0, 0.0, 1.0]),
        ({"verifier": "math"}, [1.0, 1.0, 1.0]),  # as its campaigns were begun
        ({"rewards": {"right": {"verifier": "strict"}}}, [0.0, 1.0, 1.0]),
    ],
)
def test_training_pays_for_an_answer_that_is_given_and_not_for_the_last_number(settings, rewards):
    verify = VerifyConfig.model_validate(settings).for_training()
    found = verify_batch([CHANCE, TOLD, r"\boxed{5}"], ["5"] * 3, verify)
    assert [verdict.reward for verdict in found] == rewards


def test_fallbacks_that_are_left_out_have_the_keys_of_those_they_mean():
    named = VerifyConfig(fallbacks=("phrase", "last", "whole"))
    assert VerifyConfig().identity() == named.identity()
    assert VerifyConfig().for_training().identity() == VerifyConfig(fallbacks=("phrase", "whole")).identity()
    assert named.for_training() == named


def test_responses_that_are_not_new_keep_their_verdict_and_nobody_is_asked_again(bench, inputs):
    """The verdict of the first response is altered by hand: it stays, with all that it said."""
    altered = {
        "rollout_id": ["000000/ada/p/00"],
        "prompt_id": ["p"],
        "reward": [0.25],
        "verdict": ["incorrect"],
        "extracted_answer": ["kept"],
        "verifier": ["hand"],
        "raw_reward": [-3.0],
        "parts": ['{"form":0.5}'],
        "metrics": ['{"steps":2.0}'],
        "message": ["said before"],
    }
    identity = Identity(stage="verify", stage_version=0, config={"made": "by hand"}, inputs={})
    out = OutFolder(bench.store.stage_folder(identity.key))
    out.write(VERDICTS_2, altered)
    provenance = Provenance(started=0, finished=0, seconds=0)
    before = bench.store.publish(out.path, identity, out.tables, {}, {}, provenance)
    outcome = bench.run("verify", verify_slice(), {**inputs, "verdicts": before})
    rows = read_table(outcome.ref.path / "verdicts.parquet", VERDICTS_2).to_pylist()
    assert rows[0] == {name: values[0] for name, values in altered.items()}
    assert [row["verdict"] for row in rows[1:]] == ["correct", "incorrect", "unparseable"]
    assert outcome.metrics["verify/reward_mean"] == pytest.approx((0.25 + 1) / 4)
    assert outcome.metrics["verify/part/form"] == 0.5
