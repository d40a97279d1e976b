"""Reward functions as people write them for TRL and verl, unchanged, and several rewards together."""

from textwrap import dedent
from typing import Any

import pytest

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.problems import Problem
from hacrl_core.verification import verify_batch

FUNCTIONS = r"""
    import asyncio, re

    def text_of(message):
        return message[0]["content"]

    # TRL: plain text, with and without further columns.
    def by_length(completions, **kwargs):
        return [min(1.0, len(set(text)) / 10) for text in completions]

    def in_box(completions, ground_truth, **kwargs):
        found = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
        return [1.0 if match and match.group(1) == gold else 0.0 for match, gold in zip(found, ground_truth)]

    # TRL: conversations, the prompt included.
    def echoes(prompts, completions, **kwargs):
        return [float(text_of(answer) == prompt[-1]["content"]) for prompt, answer in zip(prompts, completions)]

    # TRL: a function for one kind of problem says None for the others.
    def maths_only(prompts, completions, kind, **kwargs):
        return [None if name != "maths" else float("4" in text) for text, name in zip(completions, kind)]

    async def slowly(prompts, completions, **kwargs):
        await asyncio.sleep(0.01)
        return [0.25 for _ in completions]

    def too_few(completions, **kwargs):
        return [1.0]

    def one_bad(completions, **kwargs):
        if "bad" in completions:
            raise ValueError("bad")
        return [1.0 for _ in completions]

    # verl.
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "toy" and extra_info["index"] >= 0
        return 1.0 if ground_truth in solution_str else 0.0

    def compute_score_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        right = solution_str == ground_truth
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str, "length": len(solution_str)}

    def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
        return [float(a == b) for a, b in zip(solution_strs, ground_truths)]

    # Ours.
    async def waits(response, problem):
        await asyncio.sleep(0.01)
        return response == problem.answer

    def many(responses, problems):
        return [(response == problem.answer, response) for response, problem in zip(responses, problems)]

    calls = 0
    def counted(responses, problems):
        global calls
        calls += 1
        return [1.0 / len(responses) for _ in responses]
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "rewards_of_others.py"
    path.write_text(dedent(FUNCTIONS))
    return str(path)


def problem(number: int, answer: str = "4", **columns: Any) -> Problem:
    messages = ({"role": "user", "content": f"question {number}"},)
    return Problem(f"p{number}", messages, answer, "toy", {}, {"index": number, **columns})  # type: ignore[arg-type]


def run(name: str, responses: list[str], problems: list[Problem] | None = None, **settings: Any) -> list[Any]:
    asked = problems or [problem(i) for i in range(len(responses))]
    config = VerifyConfig(verifier=name, workers=1, **settings)
    return verify_batch(responses, [p.answer for p in asked], config, problems=asked)


def test_trl_functions_run_unchanged(rewards: str) -> None:
    assert [v.reward for v in run(f"{rewards}:by_length", ["abcde", "aa"])] == [0.5, 0.1]
    assert [v.verdict for v in run(f"{rewards}:in_box", [r"\boxed{4}", "4"])] == ["correct", "incorrect"]
    assert [v.reward for v in run(f"{rewards}:echoes", ["question 0", "question 0"])] == [1.0, 0.0]
    assert [v.reward for v in run(f"{rewards}:slowly", ["a", "b"])] == [0.25, 0.25]


def test_none_says_that_a_reward_does_not_apply(rewards: str) -> None:
    asked = [problem(0, kind="maths"), problem(1, kind="poems")]
    applies, not_here = run(f"{rewards}:maths_only", ["4", "4"], asked)
    assert (applies.verdict, not_here.verdict, not_here.absent) == ("correct", "error", True)


def test_verl_functions_run_unchanged(rewards: str) -> None:
    assert [v.reward for v in run(f"{rewards}:compute_score", ["so 4", "5"])] == [1.0, 0.0]
    asked = [problem(0, reward_model={"ground_truth": "x"}), problem(1)]
    good, bad = run(f"{rewards}:compute_score_dict", ["x", "no"], asked, reward_range=(-1, 1))
    assert (good.verdict, good.reward, good.extracted_answer) == ("correct", 1.0, "x")
    assert (bad.verdict, bad.reward, bad.raw, bad.metrics["length"]) == ("incorrect", 0.0, -1.0, 2.0)
    assert [v.reward for v in run(f"{rewards}:compute_scores", ["4", "5"])] == [1.0, 0.0]


def test_async_and_batch_verifiers(rewards: str) -> None:
    assert [v.reward for v in run(f"{rewards}:waits", ["4", "5"])] == [1.0, 0.0]
    found = run(f"{rewards}:many", ["4", "5", "4"])
    assert [(v.reward, v.extracted_answer) for v in found] == [(1.0, "4"), (0.0, "5"), (1.0, "4")]
    assert [v.reward for v in run(f"{rewards}:counted", list("abcd"))] == [0.25] * 4


def test_one_bad_response_of_a_batch_costs_one_verdict(rewards: str) -> None:
    assert [v.verdict for v in run(f"{rewards}:one_bad", ["a", "bad", "b"])] == ["correct", "error", "correct"]
    few = run(f"{rewards}:too_few", ["a", "b"])
    assert [v.verdict for v in few] == ["correct", "correct"], "alone, one result for one response is right"


def test_several_rewards_are_weighted_summed_and_scaled(rewards: str) -> None:
    asked = [problem(0, "x", kind="maths"), problem(1, "x", kind="poems"), problem(2, "x", kind="maths")]
    config = VerifyConfig.model_validate(
        {
            "workers": 1,
            "rewards": {
                "right": {"verifier": f"{rewards}:compute_score_dict", "range": [-1, 1], "weight": 2},
                "maths": {"verifier": f"{rewards}:maths_only", "weight": 1},
                "variety": {"verifier": f"{rewards}:by_length", "weight": -0.5},
            },
        }
    )
    first, second, third = verify_batch(["x", "x", "4"], ["x"] * 3, config, problems=asked)
    # The sum lies between 2·(-1) + 0 - 0.5 = -2.5 and 2·1 + 1 - 0 = 3.
    assert first.raw == pytest.approx(2 + 0 - 0.05)
    assert first.reward == pytest.approx((2 - 0.05 + 2.5) / 5.5)
    assert {name: first.parts[name] for name in ("right", "maths", "variety")} == {
        "right": 1.0, "maths": 0.0, "variety": 0.1
    }  # fmt: skip
    assert "maths" not in second.parts
    assert second.raw == pytest.approx(2 - 0.05)
    assert (third.verdict, third.raw) == ("incorrect", pytest.approx(-2 + 1 - 0.05))
    assert first.metrics["right/length"] == 1.0


def test_a_reward_that_fails_makes_the_whole_verdict_an_error(rewards: str) -> None:
    config = VerifyConfig.model_validate(
        {
            "workers": 1,
            "rewards": {"exact": {"verifier": "exact"}, "fragile": {"verifier": f"{rewards}:one_bad", "weight": 0.1}},
        }
    )
    found = verify_batch(["bad", "4"], ["bad", "4"], config)
    assert [v.verdict for v in found] == ["error", "correct"]
    assert (found[0].reward, found[1].reward) == (0.0, 1.0)
    assert "fragile" in found[0].message
