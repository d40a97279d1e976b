"""verify: rollouts + answers → a verdict and a reward for each response.

Where some prompts were answered again, the verdicts before that are an input too: the other responses keep theirs.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import IdentityUnlessDefault, StrictConfig
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.contracts.manifest import canonical_json
from hacrl_core.contracts.tables import PROMPTS_2, TIMINGS, VERDICTS, VERDICTS_2, read_answers, read_table
from hacrl_core.problems.problem import Problem
from hacrl_core.verification import Verdict, VerdictKind, check_error_share, response_is_boxed
from hacrl_core.verification.verdict import metric_name
from stages.judging import JudgeSlice, judging_of
from stages.partial import verify_resumable
from stages.spec import Context, OutFolder, Result, Stage


class VerifySlice(StrictConfig):
    """What verification reads of the config."""

    verify: VerifyConfig
    verifier_source: str = ""  # digest of the user's own verifier
    judges: Annotated[dict[str, JudgeSlice], IdentityUnlessDefault] = Field(default_factory=dict)
    reward_sources: Annotated[dict[str, str], IdentityUnlessDefault] = Field(default_factory=dict)


def run(
    inputs: Mapping[str, ArtifactRef], config: VerifySlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Compare every response with its prompt's answer."""
    rollouts = read_answers(inputs["rollouts"].path)
    prompts = read_table(inputs["prompts"].path / "prompts.parquet", PROMPTS_2)
    asked = {row["prompt_id"]: _problem(row) for row in prompts.to_pylist()}
    ids, prompt_ids = rollouts["rollout_id"].to_pylist(), rollouts["prompt_id"].to_pylist()
    problems = [asked[prompt] for prompt in prompt_ids]
    lengths = rollouts["tokens"].to_pylist()
    responses = rollouts["response_text"].to_pylist()
    truncated = [reason == "length" for reason in rollouts["finish_reason"].to_pylist()]
    known = _verdicts_before(inputs["verdicts"]) if "verdicts" in inputs else {}
    new = [row for row, rollout in enumerate(ids) if rollout not in known]
    judged_now = verify_resumable(
        [responses[row] for row in new],
        [problems[row].answer for row in new],
        config.verify,
        context,
        problems=[problems[row] for row in new],
        judging=judging_of(inputs, config.judges, config.verify, context),
        truncated=[truncated[row] for row in new],
        token_counts=[lengths[row] for row in new],
    )
    known |= dict(zip((ids[row] for row in new), judged_now, strict=True))
    verdicts = [known[rollout] for rollout in ids]
    check_error_share(verdicts, config.verify)
    columns: dict[str, list[Any]] = {
        "rollout_id": ids,
        "prompt_id": prompt_ids,
        "reward": [v.reward for v in verdicts],
        "verdict": [v.verdict.value for v in verdicts],
        "extracted_answer": [v.extracted_answer for v in verdicts],
        "verifier": [v.verifier for v in verdicts],
    }
    detailed = bool(config.verify.rewards) or any(v.parts or v.metrics or v.raw != v.reward for v in verdicts)
    if detailed:
        columns["raw_reward"] = [v.raw for v in verdicts]
        columns["parts"] = [canonical_json(dict(v.parts)) for v in verdicts]
        columns["metrics"] = [canonical_json(dict(v.metrics)) for v in verdicts]
        columns["message"] = [v.message for v in verdicts]
    out.write(VERDICTS_2 if detailed else VERDICTS, columns)
    out.write(TIMINGS, {"rollout_id": ids, "milliseconds": [v.milliseconds for v in verdicts]}, measured=True)
    metrics = _metrics(verdicts, _truncated_guesses(verdicts, responses, truncated))
    return Result(metrics | (_detailed_metrics(verdicts) if detailed else {}))


def _verdicts_before(verdicts: ArtifactRef) -> dict[str, Verdict]:
    """The verdicts of an artifact by rollout; what they took was counted there."""
    return {
        row["rollout_id"]: Verdict(
            reward=row["reward"],
            verdict=VerdictKind(row["verdict"]),
            extracted_answer=row["extracted_answer"],
            milliseconds=0.0,
            verifier=row["verifier"],
            raw_reward=row["raw_reward"],
            parts=json.loads(row["parts"]),
            metrics=json.loads(row["metrics"]),
            message=row["message"],
        )
        for row in read_table(verdicts.path / "verdicts.parquet", VERDICTS_2).to_pylist()
    }


def _problem(row: Mapping[str, Any]) -> Problem:
    """The problem as a verifier reads it, from a row of the prompts."""
    tags, columns = json.loads(row["tags"]), json.loads(row["columns"])
    return Problem(row["prompt_id"], tuple(row["messages"]), row["answer"], row["source"], tags, columns)


def _metrics(verdicts: Sequence[Verdict], truncated_guesses: int) -> dict[str, float]:
    judged = [v.reward for v in verdicts if v.verdict is not VerdictKind.ERROR]
    counts = Counter(v.verdict.value for v in verdicts)
    metrics = {
        "verify/reward_mean": float(np.mean(judged)) if judged else 0.0,
        "verify/error_share": counts["error"] / len(verdicts),
        # Half a number may equal the gold by chance.
        "verify/truncated_guess_share": truncated_guesses / len(verdicts),
    }
    for kind in ("correct", "incorrect", "unparseable", "timeout"):
        metrics[f"verify/{kind}_share"] = counts[kind] / len(verdicts)
    return metrics


def _detailed_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Means of the raw reward, of each part and of each metric, over the responses that have it."""
    judged = [v for v in verdicts if v.verdict is not VerdictKind.ERROR]
    found: dict[str, list[float]] = {"verify/raw_reward_mean": [v.raw for v in judged]}
    for verdict in judged:
        for name, value in verdict.parts.items():
            found.setdefault(f"verify/part/{metric_name(name)}", []).append(value)
        for name, value in verdict.metrics.items():
            found.setdefault(f"verify/metric/{metric_name(name)}", []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def _truncated_guesses(verdicts: Sequence[Verdict], responses: Sequence[str], truncated: Sequence[bool]) -> int:
    """Count the rewarded responses that were cut off and have no answer in a complete box."""
    rows = zip(verdicts, responses, truncated, strict=True)
    return sum(cut and v.verdict is VerdictKind.CORRECT and not response_is_boxed(text) for v, text, cut in rows)


STAGE = Stage("verify", 1, VerifySlice, run)
