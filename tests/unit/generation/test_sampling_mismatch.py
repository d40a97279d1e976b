"""The score stage compares its log-probs with those of sampling, and says so when they part."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.training import ScoreConfig
from hacrl_core.contracts.tables import ROLLOUTS, write_table
from hacrl_core.generation.builtin import BuiltinEngine
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from stages.score import ScoreSlice, run
from stages.spec import Context, OutFolder

Checkpoint = Callable[[str], Path]


def score(folder: Path, checkpoint: Path, off: float, **settings: object) -> tuple[dict[str, float], list[str]]:
    """Rollouts of the built-in engine, every other log-prob ``off`` by so much, through the stage: its metrics and
    warnings.
    """
    requests = [GenerationRequest(f"p/{g:02d}", (4, 5, 6), g) for g in range(6)]
    got = BuiltinEngine().generate(checkpoint, "d", requests, SamplingParams(max_tokens=12))
    rollouts = folder / "rollouts"
    rollouts.mkdir()
    columns = {
        "rollout_id": [f"000003/ada/{g.request_id}" for g in got],
        "iteration": [3] * 6,
        "agent_id": ["ada"] * 6,
        "policy_digest": ["d"] * 6,
        "prompt_id": ["p"] * 6,
        "sample_index": list(range(6)),
        "prompt_token_ids": [r.prompt_token_ids for r in requests],
        "response_text": [g.text for g in got],
        "response_token_ids": [g.token_ids for g in got],
        "response_logprobs": [[lp + off * (-1) ** t for t, lp in enumerate(g.policy_logprobs)] for g in got],
        "finish_reason": [g.finish_reason for g in got],
        "seed": [r.seed for r in requests],
    }
    write_table(rollouts / "rollouts.parquet", ROLLOUTS, columns)
    (rollouts / "sampler.json").write_text(json.dumps({"agent_id": "ada", "tokenizer": "t", "chat_template": None}))
    inputs = {
        "agent": ArtifactRef("update", "a", "d", checkpoint),
        "rollouts/ada": ArtifactRef("generate", "r", "e", rollouts),
    }
    config = ScoreSlice(learner="ada", samplers=("ada",), iteration=3, score=ScoreConfig(), max_tokens=12, **settings)
    out = folder / "scores"
    out.mkdir()
    warnings: list[str] = []
    result = run(inputs, config, None, OutFolder(out), Context(warn=warnings.append))
    return result.metrics, warnings


def test_engines_that_agree_are_not_warned_about(checkpoint: Checkpoint, tmp_path: Path) -> None:
    metrics, warnings = score(tmp_path, checkpoint("qwen2"), 0.0)
    assert metrics["score/sampling_mismatch_max"] < 1e-5
    assert warnings == []


def test_sampling_that_disagrees_with_scoring_is_warned_about(checkpoint: Checkpoint, tmp_path: Path) -> None:
    metrics, (warning,) = score(tmp_path, checkpoint("llama"), 0.05)
    assert metrics["score/sampling_mismatch_mean"] == pytest.approx(
        0.05, abs=1e-5
    )  # errors of either sign do not cancel
    assert warning == (
        "score ada iteration 4: sampling and scoring log-probs differ by 0.05 per token on average, more than 0.02; "
        "the generation engine and the trainer disagree about the same weights"
    )


@pytest.mark.parametrize(("threshold", "fires"), [(0.049, True), (0.051, False)])
def test_the_threshold_is_the_users(checkpoint: Checkpoint, tmp_path: Path, threshold: float, fires: bool) -> None:
    _, warnings = score(tmp_path, checkpoint("llama"), 0.05, mismatch_warning=threshold)
    assert len(warnings) == fires
