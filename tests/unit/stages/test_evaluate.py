"""evaluate: an agent and a benchmark in; an answer and a verdict per problem, and the accuracy, out."""

import numpy as np
from stage_bench import TASK

from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.problems import load_problems
from stages.evaluate import EvaluateSlice

HELD_OUT = TASK.model_copy(update={"split": "held_out", "size": 6})


def evaluate_slice(name: str = "sums", **changes: object) -> EvaluateSlice:
    benchmark = BenchmarkConfig(**{"name": name, "problems": HELD_OUT, "max_tokens": 16, **changes})
    return EvaluateSlice(
        benchmark=benchmark,
        content_digest=load_problems(HELD_OUT).content_digest,
        generate=GenerateConfig(max_tokens=99),
        verify=VerifyConfig(verifier="exact"),
    )


def test_each_problem_has_an_answer_and_a_verdict(shared, ada):
    outcome = shared.run("evaluate", evaluate_slice(), {"agent": ada})
    rows = shared.rows(outcome.ref, "evaluation")
    assert [row["problem_id"] for row in rows] == [problem.problem_id for problem in load_problems(HELD_OUT).problems]
    for row in rows:
        assert (row["verdict"] == "correct") == (row["reward"] == 1.0)
        assert row["tokens"] <= 16
    accuracy = np.mean([row["reward"] for row in rows])
    assert outcome.metrics["evaluate/sums/accuracy"] == accuracy
    low, high = (outcome.metrics[f"evaluate/sums/accuracy_{end}"] for end in ("low", "high"))
    assert 0 <= low <= accuracy <= high <= 1


def test_several_samples_give_pass_at_k(shared, ada):
    config = evaluate_slice(samples=3, temperature=1.0)
    outcome = shared.run("evaluate", config, {"agent": ada})
    rows = shared.rows(outcome.ref, "evaluation")
    assert [row["sample_index"] for row in rows] == [0, 1, 2] * 6
    metrics = {name.removeprefix("evaluate/sums/"): value for name, value in outcome.metrics.items()}
    assert {"avg@3", "pass@1", "pass@3", "best@3", "maj@3"} <= metrics.keys()
    assert metrics["pass@1"] <= metrics["pass@3"]


def test_the_schedule_is_not_part_of_the_key(shared, ada):
    first = shared.run("evaluate", evaluate_slice(), {"agent": ada})
    assert shared.run("evaluate", evaluate_slice(every=2, before=False), {"agent": ada}).ref == first.ref
    assert shared.run("evaluate", evaluate_slice(max_tokens=8), {"agent": ada}).ref != first.ref
