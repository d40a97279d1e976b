"""sample: the problems' config, a seed and an iteration in; the prompts of that iteration out."""

import json

import pytest
from stage_bench import TASK, sample_slice

from hacrl_core.errors import StageError


def test_prompts_come_with_their_answers(bench):
    prompts = bench.rows(bench.run("sample", sample_slice(prompts=4)).ref, "prompts")
    assert len({row["prompt_id"] for row in prompts}) == 4
    for row in prompts:
        (message,) = row["messages"]
        left, right = message["content"].removesuffix("=?").split("+")
        assert message["role"] == "user"
        assert row["answer"] == str(int(left) + int(right))
        assert json.loads(row["tags"])["kind"] == "addition"


def test_the_seed_and_the_iteration_decide(bench):
    def drawn(seed: int, iteration: int) -> list[str]:
        ref = bench.run("sample", sample_slice(iteration=iteration), seed=seed).ref
        return [row["prompt_id"] for row in bench.rows(ref, "prompts")]

    assert drawn(0, 0) == drawn(0, 0)
    assert drawn(0, 0) != drawn(0, 1)
    assert drawn(0, 0) != drawn(1, 0)


def test_the_same_call_is_answered_from_the_store(bench):
    first = bench.run("sample", sample_slice())
    again = bench.run("sample", sample_slice())
    assert (first.cached, again.cached) == (False, True)
    assert again.ref == first.ref


def test_every_iteration_of_a_finite_set_goes_through_it_in_a_new_order(bench):
    problems = TASK.model_copy(update={"size": 8})
    epochs = []
    for epoch in range(2):
        refs = [bench.run("sample", sample_slice(problems=problems, iteration=2 * epoch + i)).ref for i in range(2)]
        epochs.append([row["prompt_id"] for ref in refs for row in bench.rows(ref, "prompts")])
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_problems_that_changed_since_the_campaign_began_are_refused(bench):
    with pytest.raises(StageError, match="the problems changed on disk"):
        bench.run("sample", sample_slice(content_digest="another"))
