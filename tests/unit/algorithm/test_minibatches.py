"""The order in which a learner sees an iteration's responses."""

import numpy as np
import pytest

from hacrl_core.algorithm.minibatches import Response, minibatches

AGENTS = ("cleo", "ada", "ben")  # the learner is ada
PROMPTS = [f"p{i}" for i in range(5)]


def response(prompt, sampler, sample):
    return Response(
        rollout_id=f"{prompt}/{sampler}/{sample}",
        prompt_id=prompt,
        sampler=sampler,
        is_own=sampler == "ada",
        advantage=1.0,
        omega=1.0,
        prompt_token_ids=(1,),
        token_ids=(2,),
        old_logprobs=(-1.0,),
        old_mean=-1.0,
        sampler_mean=-1.0,
        reference=None,
    )


RESPONSES = [response(p, a, s) for a in AGENTS for p in PROMPTS for s in range(2)]


def plan(responses=RESPONSES, *, seed=0, **settings):
    wanted = {"prompts_each": 2, "order": "own_first", "epochs": 1} | settings
    return minibatches(responses, rng=np.random.default_rng(seed), **wanted)


def summary(batch):
    return sorted({r.sampler for r in batch}), list(dict.fromkeys(r.prompt_id for r in batch))


def test_own_first_then_each_sampler_by_name():
    groups = [["p0", "p1"], ["p2", "p3"], ["p4"]]
    assert [summary(batch) for batch in plan()] == [([a], group) for a in ("ada", "ben", "cleo") for group in groups]


def test_mixed_minibatches_hold_everybody_and_are_shuffled_by_the_seed():
    batches = plan(order="mixed")
    assert [len(batch) for batch in batches] == [12, 12, 6]
    assert all(samplers == sorted(AGENTS) for samplers, _ in map(summary, batches))
    assert plan(order="mixed") == batches
    assert any(plan(order="mixed", seed=seed) != batches for seed in range(1, 5))


@pytest.mark.parametrize("order", ["own_first", "mixed"])
def test_every_response_comes_once_per_epoch_and_prompts_stay_together(order):
    batches = plan(order=order, epochs=3)
    once = batches[: len(batches) // 3]
    assert batches == once * 3
    assert sorted(r.rollout_id for batch in once for r in batch) == sorted(r.rollout_id for r in RESPONSES)
    assert all(len(summary(batch)[1]) <= 2 for batch in once)


def test_a_sampler_without_responses_to_some_prompts_makes_no_empty_minibatch():
    some = [r for r in RESPONSES if r.is_own or r.prompt_id == "p4"]
    assert [summary(batch)[0] for batch in plan(some)] == [["ada"], ["ada"], ["ada"], ["ben"], ["cleo"]]
    assert plan([]) == []
