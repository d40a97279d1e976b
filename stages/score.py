"""score: learner + everyone's rollouts → log-probs of each response under the learner, in the learner's own tokens."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import NonNegativeInt

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import NotIdentity, StrictConfig
from hacrl_core.config.training import ScoreConfig
from hacrl_core.contracts.tables import PROMPTS, ROLLOUTS, SCORES, read_table
from stages.spec import Context, Metrics, OutFolder, Result, Stage


class ScoreSlice(StrictConfig):
    """What scoring reads of the config."""

    learner: str
    samplers: tuple[str, ...]
    iteration: NonNegativeInt
    score: ScoreConfig
    max_tokens: int  # the learner's limit on a response
    is_reference: bool = False  # under the learner's first version, for KL; not the policy that sampled
    most: int | None = None  # score only so many responses, evenly spaced: enough for a diagnostic
    mismatch_warning: Annotated[float, NotIdentity] = 0.02
    chat_template: str | None = None

    def known(self, row: Mapping[str, Any]) -> bool:
        """Whether sampling already gave the log-probs that scoring this response would give."""
        return self.score.own == "sampled" and row["is_own"] and not self.is_reference


def run(
    inputs: Mapping[str, ArtifactRef], config: ScoreSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Compute the log-probs of everybody's responses under the learner."""
    from hacrl_core.learning.fused import kernel_metrics
    from hacrl_core.learning.scoring import score_sequences
    from hacrl_core.learning.sequences import TrainSequence

    version = inputs["agent"]
    # On a GPU memory is dear: there the first version takes the place of the newest one.
    beside = config.is_reference and context.device == "cpu"
    load = context.warm.first_version if beside else context.warm.agent
    agent = load(version.path, version.digest, device=context.device, attention=context.attention)
    _, fingerprint = context.warm.tokenizer(version.path)
    rows = [row for sampler in config.samplers for row in _rows_of(agent, fingerprint, sampler, inputs, config)]
    scorable = [row for row in rows if row["token_ids"]]
    if config.most is not None:
        scorable = scorable[:: max(1, -(-len(scorable) // config.most))]
    # Identical responses to a prompt have identical log-probs: each is scored once.
    unknown = [row for row in scorable if not config.known(row)]
    sequences = [TrainSequence(tuple(row["prompt_token_ids"]), tuple(row["token_ids"])) for row in unknown]
    distinct = {sequence: place for place, sequence in enumerate(dict.fromkeys(sequences))}
    scored = score_sequences(
        agent,
        list(distinct),
        token_budget=config.score.token_budget,
        temperature=config.score.temperature,
        autocast=config.score.autocast,
        max_logits_mb=config.score.max_logits_mb,
    )
    fresh = iter(scored[distinct[sequence]] for sequence in sequences)
    logprobs = [np.array(row["response_logprobs"]) if config.known(row) else next(fresh) for row in scorable]
    columns: dict[str, list[Any]] = {
        name: [row[name] for row in scorable]
        for name in ("rollout_id", "sampler", "is_own", "prompt_id", "prompt_token_ids", "token_ids", "truncated")
    }
    columns["logprobs"] = logprobs
    columns["mean_logprob"] = [float(np.mean(values, dtype=np.float64)) for values in logprobs]
    out.write(SCORES, columns)
    metrics = _metrics(config, rows, scorable, columns, logprobs, len(distinct))
    metrics |= kernel_metrics("reference" if config.is_reference else "score", agent.device)
    if metrics.get("score/sampling_mismatch_mean", 0.0) > config.mismatch_warning:
        context.warn(
            f"score {config.learner} #{config.iteration}: sampling and scoring log-probs differ by "
            f"{metrics['score/sampling_mismatch_mean']:.3g} per token on average, more than {config.mismatch_warning}; "
            "the generation engine and the trainer disagree about the same weights"
        )
    return Result(metrics)


def _rows_of(
    agent: Any, fingerprint: str, sampler: str, inputs: Mapping[str, ArtifactRef], config: ScoreSlice
) -> list[dict[str, Any]]:
    """Return one sampler's rollouts in the learner's tokens.

    The learner's own and those of an agent with the same tokenizer and chat template are taken verbatim; the others are
    tokenised anew.
    """
    from hacrl_core.rendering import encode_response, render_prompt

    table = read_table(inputs[f"rollouts/{sampler}"].path / "rollouts.parquet", ROLLOUTS)
    is_own = sampler == config.learner
    writer = json.loads((inputs[f"rollouts/{sampler}"].path / "sampler.json").read_text())
    verbatim = is_own or (writer["tokenizer"], writer["chat_template"]) == (fingerprint, config.chat_template)
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        row.update(sampler=sampler, is_own=is_own, truncated=False, token_ids=row["response_token_ids"])
    if verbatim:
        return rows
    prompts = read_table(inputs["prompts"].path / "prompts.parquet", PROMPTS)
    messages = dict(zip(prompts["prompt_id"].to_pylist(), prompts["messages"].to_pylist(), strict=True))
    rendered = {prompt: render_prompt(agent.tokenizer, text, config.chat_template) for prompt, text in messages.items()}
    for row in rows:
        finished = row["finish_reason"] == "stop"
        encoded = encode_response(
            agent.tokenizer,
            row["response_text"],
            finished=finished,
            stop_token_id=agent.stop_token_ids[0],
            max_tokens=config.max_tokens,
        )
        row.update(
            prompt_token_ids=rendered[row["prompt_id"]], token_ids=list(encoded.token_ids), truncated=encoded.truncated
        )
    return rows


def _metrics(
    config: ScoreSlice,
    rows: list[Any],
    scorable: list[Any],
    columns: dict[str, list[Any]],
    logprobs: list[Any],
    distinct: int,
) -> Metrics:
    if config.is_reference:
        return {
            "reference/responses": float(len(scorable)),
            "reference/own_mean_logprob": float(np.mean(columns["mean_logprob"])),
        }
    own = [i for i, row in enumerate(scorable) if row["is_own"]]
    metrics = {
        "score/responses": float(len(rows)),
        "score/unscorable": float(len(rows) - len(scorable)),
        "score/distinct_share": distinct / max(sum(not config.known(row) for row in scorable), 1),
        "score/truncated_share": float(np.mean(columns["truncated"])) if scorable else 0.0,
    }
    if own:
        metrics["score/own_mean_logprob"] = float(np.mean([columns["mean_logprob"][i] for i in own]))
    if own and config.score.own == "scored":
        differences = np.concatenate([np.abs(logprobs[i] - np.array(scorable[i]["response_logprobs"])) for i in own])
        metrics["score/sampling_mismatch_mean"] = float(differences.mean())
        metrics["score/sampling_mismatch_max"] = float(differences.max())
    return metrics


STAGE = Stage("score", 2, ScoreSlice, run)
