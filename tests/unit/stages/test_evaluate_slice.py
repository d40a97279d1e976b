"""What of its slice the evaluate stage uses for verification, and what of it is identity."""

from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.verification import OverlongConfig, VerifyConfig
from hacrl_core.verification import verify_batch
from stages.evaluate import EvaluateSlice, outcomes_of


def slice_of(benchmark, **verify):
    return EvaluateSlice(
        benchmark=BenchmarkConfig.model_validate(benchmark),
        content_digest="d",
        generate=GenerateConfig(max_tokens=8),
        verify=VerifyConfig(**verify),
    )


def test_the_benchmarks_tolerance_replaces_the_campaigns_and_is_identity():
    """2.1 % off is wrong, 0.6 % off is rounded; a unit, a sign or a power of ten is never forgiven."""
    strict, minerva = slice_of("math500"), slice_of("minerva_math")
    responses = [rf"\boxed{{{answer}}}" for answer in ("1.61", "1.634", "-1.6", "16", r"1.6 \times 10^{-1}")]
    kinds = [[v.reward for v in verify_batch(responses, ["1.6"] * 5, s.verification)] for s in (strict, minerva)]
    assert kinds == [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert minerva.identity()["verify"]["tolerance"] == 0.01
    own = {"problems": "minerva_math", "tolerance": 0.02}
    assert slice_of(own).identity() != minerva.identity()
    # What the campaign says does not matter where the benchmark says its own.
    assert slice_of("minerva_math", tolerance=0.5).identity() == minerva.identity()
    assert slice_of("math500", tolerance=0.5).identity() != strict.identity()


def test_shaped_rewards_are_for_training():
    """An overlong penalty needs token counts and would change the reward; an evaluation has neither."""
    shaped = slice_of("math500", format_reward=0.2, overlong=OverlongConfig(max_tokens=8, buffer_tokens=4))
    assert [v.reward for v in verify_batch([r"\boxed{1}", r"\boxed{2}"], ["1", "1"], shaped.verification)] == [1, 0]
    assert shaped.identity() == slice_of("math500").identity()


def test_spellings_of_an_answer_vote_together():
    columns = {
        "verdict": ["incorrect", "correct", "correct", "error"],
        "extracted_answer": ["7", r"\dfrac{1}{2}", r"\frac{1}{2}", ""],
        "tokens": [1, 2, 3, 4],
        "truncated": [False, False, False, True],
        "tags": ['{"level":"5"}'] * 4,
    }
    outcomes = outcomes_of(columns, 4)
    assert outcomes.answers_PS[0][1] == outcomes.answers_PS[0][2] != outcomes.answers_PS[0][0]
    assert outcomes.rewards_PS[0, :3].tolist() == [0, 1, 1]
    assert outcomes.rewards_PS[0, 3] != outcomes.rewards_PS[0, 3]
    assert outcomes.tags_P == ({"level": "5"},)
