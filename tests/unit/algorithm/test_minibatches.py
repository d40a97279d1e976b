"""The order in which a learner sees an iteration's responses."""

import numpy as np
import pytest

from hacrl_core.algorithm import HacpoConfig, foreign_window
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
        sampler_tokens=1,
        reference=None,
    )


RESPONSES = [response(p, a, s) for a in AGENTS for p in PROMPTS for s in range(2)]


def plan(responses=RESPONSES, *, seed=0, **settings):
    wanted = {"prompts_each": 2, "order": "own_first", "epochs": 1} | settings
    return minibatches(responses, rng=np.random.default_rng(seed), **wanted)


def summary(batch):
    return sorted({r.sampler for r in batch.responses}), list(dict.fromkeys(r.prompt_id for r in batch.responses))


def test_two_agents_own_first_then_foreign_and_every_update_narrows_the_window():
    groups = [["p0", "p1"], ["p2", "p3"], ["p4"]]
    batches = plan([r for r in RESPONSES if r.sampler != "cleo"], epochs=2)
    assert [summary(batch) for batch in batches] == [([a], group) for a in ("ada", "ben") for group in groups] * 2
    assert [batch.window_index for batch in batches] == list(range(12))
    assert [batch.has_foreign for batch in batches] == ([False] * 3 + [True] * 3) * 2


def test_several_samplers_take_turns_in_rounds_of_one_window():
    groups = [["p0", "p1"], ["p2", "p3"], ["p4"]]
    batches = plan()
    assert [summary(batch) for batch in batches[:3]] == [(["ada"], group) for group in groups]
    assert [batch.window_index for batch in batches] == [0, 1, 2, 3, 3, 4, 4, 5, 5]
    for start, group in zip((3, 5, 7), groups, strict=True):
        assert sorted(summary(batch)[0][0] for batch in batches[start : start + 2]) == ["ben", "cleo"]
        assert all(summary(batch)[1] == group for batch in batches[start : start + 2])
    first = {plan(seed=seed)[3].responses[0].sampler for seed in range(20)}
    assert first == {"ben", "cleo"}, "the seed draws who is first, not the name"
    assert plan() == batches


def test_with_five_agents_the_fourth_foreign_sampler_teaches():
    agents = ("ada", "b", "c", "d", "e")
    batches = plan([response(p, a, 0) for a in agents for p in PROMPTS[:4]])
    windows = {
        a: [foreign_window(b.window_index, HacpoConfig())[0] for b in batches if summary(b)[0] == [a]]
        for a in agents[1:]
    }
    assert all(low == pytest.approx([0.85, 0.875]) for low in windows.values())


def test_mixed_minibatches_hold_everybody_and_are_shuffled_by_the_seed():
    batches = plan(order="mixed")
    assert [len(batch.responses) for batch in batches] == [12, 12, 6]
    assert [batch.window_index for batch in batches] == [0, 1, 2]
    assert all(samplers == sorted(AGENTS) for samplers, _ in map(summary, batches))
    assert plan(order="mixed") == batches
    assert any(plan(order="mixed", seed=seed) != batches for seed in range(1, 5))


@pytest.mark.parametrize("order", ["own_first", "mixed"])
def test_every_response_comes_once_per_epoch_and_prompts_stay_together(order):
    batches = plan(order=order, epochs=3)
    once = batches[: len(batches) // 3]
    assert [batch.responses for batch in batches] == [batch.responses for batch in once] * 3
    assert sorted(r.rollout_id for batch in once for r in batch.responses) == sorted(r.rollout_id for r in RESPONSES)
    assert all(len(summary(batch)[1]) <= 2 for batch in once)


def test_a_sampler_without_responses_to_some_prompts_makes_no_empty_minibatch():
    some = [r for r in RESPONSES if r.is_own or r.prompt_id == "p4"]
    batches = plan(some)
    assert [summary(batch)[0] for batch in batches[:3]] == [["ada"]] * 3
    assert sorted(summary(batch)[0][0] for batch in batches[3:]) == ["ben", "cleo"]
    assert plan([]) == []
