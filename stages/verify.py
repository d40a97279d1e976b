"""verify: rollouts + answers → a verdict and a reward for each response."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pyarrow.compute as pc

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import StrictConfig
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.contracts.tables import PROMPTS, ROLLOUTS, TIMINGS, VERDICTS, read_table
from hacrl_core.verification import VerdictKind, check_error_share
from stages.partial import verify_resumable
from stages.spec import Context, OutFolder, Result, Stage


class VerifySlice(StrictConfig):
    """What verification reads of the config."""

    verify: VerifyConfig
    verifier_source: str = ""  # digest of the user's own verifier


def run(
    inputs: Mapping[str, ArtifactRef], config: VerifySlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Compare every response with its prompt's answer."""
    rollouts = read_table(inputs["rollouts"].path / "rollouts.parquet", ROLLOUTS)
    prompts = read_table(inputs["prompts"].path / "prompts.parquet", PROMPTS)
    answers = dict(zip(prompts["prompt_id"].to_pylist(), prompts["answer"].to_pylist(), strict=True))
    ids, prompt_ids = rollouts["rollout_id"].to_pylist(), rollouts["prompt_id"].to_pylist()
    golds = [answers[prompt] for prompt in prompt_ids]
    lengths = pc.list_value_length(rollouts["response_token_ids"]).to_pylist()
    responses = rollouts["response_text"].to_pylist()
    verdicts = verify_resumable(responses, golds, config.verify, context, token_counts=lengths)
    check_error_share(verdicts, config.verify)
    counts = Counter(v.verdict.value for v in verdicts)
    out.write(
        VERDICTS,
        {
            "rollout_id": ids,
            "prompt_id": prompt_ids,
            "reward": [v.reward for v in verdicts],
            "verdict": [v.verdict.value for v in verdicts],
            "extracted_answer": [v.extracted_answer for v in verdicts],
            "verifier": [v.verifier for v in verdicts],
        },
    )
    out.write(TIMINGS, {"rollout_id": ids, "milliseconds": [v.milliseconds for v in verdicts]}, measured=True)
    judged = [v.reward for v in verdicts if v.verdict is not VerdictKind.ERROR]
    metrics = {
        "verify/reward_mean": float(np.mean(judged)) if judged else 0.0,
        "verify/error_share": counts["error"] / len(verdicts),
    }
    for kind in ("correct", "incorrect", "unparseable", "timeout"):
        metrics[f"verify/{kind}_share"] = counts[kind] / len(verdicts)
    return Result(metrics)


STAGE = Stage("verify", 1, VerifySlice, run)
