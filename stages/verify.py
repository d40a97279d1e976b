"""verify: rollouts + answers → a verdict and a reward for each response."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow.compute as pc

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import StrictConfig
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.contracts.tables import PROMPTS, ROLLOUTS, TIMINGS, VERDICTS, read_table
from hacrl_core.verification import Verdict, VerdictKind, check_error_share, response_is_boxed
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
    truncated = [reason == "length" for reason in rollouts["finish_reason"].to_pylist()]
    verdicts = verify_resumable(responses, golds, config.verify, context, truncated=truncated, token_counts=lengths)
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
        # Half a number may equal the gold by chance.
        "verify/truncated_guess_share": _truncated_guesses(verdicts, responses, truncated) / len(verdicts),
    }
    for kind in ("correct", "incorrect", "unparseable", "timeout"):
        metrics[f"verify/{kind}_share"] = counts[kind] / len(verdicts)
    return Result(metrics)


def _truncated_guesses(verdicts: Sequence[Verdict], responses: Sequence[str], truncated: Sequence[bool]) -> int:
    """Count the rewarded responses that were cut off and have no answer in a complete box."""
    rows = zip(verdicts, responses, truncated, strict=True)
    return sum(cut and v.verdict is VerdictKind.CORRECT and not response_is_boxed(text) for v, text, cut in rows)


STAGE = Stage("verify", 1, VerifySlice, run)
