"""credit: all samplers' verdicts and the capability so far in; one learner's advantages and new capability out."""

import pytest
from stage_bench import Bench

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.algorithm import preset
from stages.credit import CreditSlice

Rewards = dict[str, list[float | None]]


def credit_slice(method: str = "hacpo", iteration: int = 0, **changes: object) -> CreditSlice:
    algorithm = preset(method, **changes)
    return CreditSlice(learner="ada", agents=("ada", "ben"), iteration=iteration, algorithm=algorithm)


def verdicts(bench: Bench, agent: str, rewards: Rewards) -> ArtifactRef:
    """Publish verdicts by prompt; None stands for a verifier that failed."""
    rows = [(prompt, g, reward) for prompt, given in rewards.items() for g, reward in enumerate(given)]
    columns = {
        "rollout_id": [f"000000/{agent}/{prompt}/{g:02d}" for prompt, g, _ in rows],
        "prompt_id": [prompt for prompt, _, _ in rows],
        "reward": [reward or 0.0 for _, _, reward in rows],
        "verdict": [{1.0: "correct", 0.0: "incorrect", None: "error"}[reward] for _, _, reward in rows],
        "extracted_answer": [""] * len(rows),
        "verifier": ["exact"] * len(rows),
    }
    return bench.publish("verify", verdicts=columns)


def inputs(bench: Bench, ada: Rewards, ben: Rewards, **more: ArtifactRef) -> dict[str, ArtifactRef]:
    return {"verdicts/ada": verdicts(bench, "ada", ada), "verdicts/ben": verdicts(bench, "ben", ben), **more}


def advantages(bench: Bench, outcome) -> dict[str, float]:
    return {row["rollout_id"]: row["advantage"] for row in bench.rows(outcome.ref, "credit")}


def test_a_prompt_that_all_solve_teaches_nothing(bench):
    solved = {"p": [1.0, 1.0]}
    found = advantages(bench, bench.run("credit", credit_slice(), inputs(bench, solved, solved)))
    assert found == dict.fromkeys(found, 0.0)
    assert len(found) == 4


def test_right_answers_are_above_the_baseline_and_wrong_ones_below(bench):
    both = {"p": [1.0, 0.0]}
    found = advantages(bench, bench.run("credit", credit_slice(), inputs(bench, both, both)))
    for agent in ("ada", "ben"):
        assert found[f"000000/{agent}/p/00"] > 0 > found[f"000000/{agent}/p/01"]
    assert sum(found.values()) == pytest.approx(0)


def test_a_stronger_samplers_responses_weigh_more_in_the_gradient(bench):
    outcome = bench.run("credit", credit_slice(), inputs(bench, {"p": [1.0, 0.0]}, {"p": [1.0, 1.0]}))
    rows = {row["rollout_id"]: row for row in bench.rows(outcome.ref, "credit")}
    # ω(sampler, learner): the sampler's capability over the learner's.
    assert rows["000000/ben/p/00"]["omega"] == pytest.approx(2.0)
    assert rows["000000/ada/p/00"]["omega"] == 1.0


def test_without_sharing_the_others_get_no_credit(bench):
    both = {"p": [1.0, 0.0]}
    outcome = bench.run("credit", credit_slice("gspo"), inputs(bench, both, both))
    assert {row["sampler"] for row in bench.rows(outcome.ref, "credit")} == {"ada"}


def test_a_response_on_which_the_verifier_failed_gets_no_credit(bench):
    outcome = bench.run("credit", credit_slice(), inputs(bench, {"p": [1.0, None]}, {"p": [1.0, 0.0]}))
    assert "000000/ada/p/01" not in advantages(bench, outcome)
    assert outcome.metrics["credit/unjudged"] == 1


def test_capability_is_a_mean_over_the_last_iterations(bench):
    first = bench.run("credit", credit_slice(), inputs(bench, {"p": [1.0, 1.0]}, {"p": [0.0, 1.0]}))
    given = inputs(bench, {"p": [0.0, 0.0]}, {"p": [0.0, 1.0]}, previous=first.ref)
    second = bench.run("credit", credit_slice(iteration=1), given)
    now = {(row["agent_id"], row["iteration"]): row for row in bench.rows(second.ref, "capability")}
    assert {place: row["mean_reward"] for place, row in now.items()} == {
        ("ada", 0): 1.0,
        ("ben", 0): 0.5,
        ("ada", 1): 0.0,
        ("ben", 1): 0.5,
    }
    assert now["ada", 1]["capability"] == pytest.approx(0.5)
    forgetful = bench.run("credit", credit_slice(iteration=1, capability_window=1), given)
    assert {row["iteration"] for row in bench.rows(forgetful.ref, "capability")} == {1}
