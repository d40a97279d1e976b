"""score.own: sampled takes the learner's own log-probs from sampling: the same numbers without the pass."""

import numpy as np
import pytest
from pydantic import ValidationError

from hacrl_core.contracts.tables import SCORES, read_table
from tests.flow.conftest import tiny


def scores(runner, label):
    return read_table(runner.outcomes[label].ref.path / "scores.parquet", SCORES).to_pydict()


def test_sampled_log_probs_equal_scored_ones_and_foreign_responses_are_still_scored(run_inline):
    scored, _ = run_inline(tiny(iterations=1))
    sampled, _ = run_inline(tiny(iterations=1, score={"own": "sampled"}))
    for agent in ("ada", "ben"):
        label = next(name for name in sampled.outcomes if name.startswith("score") and agent in name)
        assert label in sampled.ran
        slow, fast = scores(scored, label), scores(sampled, label)
        assert slow["rollout_id"] == fast["rollout_id"]
        assert True in slow["is_own"]
        assert False in slow["is_own"]
        for ours, theirs in zip(fast["logprobs"], slow["logprobs"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
        metrics = sampled.outcomes[label].metrics
        assert "score/sampling_mismatch_mean" not in metrics
        assert metrics["score/own_mean_logprob"] == pytest.approx(
            scored.outcomes[label].metrics["score/own_mean_logprob"], abs=1e-5
        )


def test_an_agent_alone_needs_no_scoring_pass(run_inline, monkeypatch):
    def refuse(*args, **kwargs):
        assert not args[1], "nothing is left to score"
        return []

    monkeypatch.setattr("hacrl_core.learning.scoring.score_sequences", refuse)
    runner, _ = run_inline(
        tiny(iterations=2, algorithm={"preset": "gspo", "measure_kl": False}, score={"own": "sampled"})
    )
    assert sum(label.startswith("update") for label in runner.ran) == 4


@pytest.mark.parametrize(
    "generate",
    [
        {"max_tokens": 24, "engine": {"kind": "vllm"}},
        {"max_tokens": 24, "engine": {"kind": "builtin", "dtype": "bfloat16"}},
    ],
)
def test_other_numbers_than_the_trainers_are_refused(generate):
    with pytest.raises(ValidationError, match=r"score\.own sampled: only the built-in engine in float32"):
        tiny(generate=generate, score={"own": "sampled"})
