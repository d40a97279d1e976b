"""score: learner + everyone's rollouts → log-probs of each response under the learner, in the learner's own tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.agents import Attention
from hacrl_core.config.base import IdentityUnlessDefault, NotIdentity, StrictConfig
from hacrl_core.config.training import HeadPrecision, ScoreConfig
from hacrl_core.contracts.tables import PROMPTS, ROLLOUTS, SCORES, read_answers, read_table
from stages.spec import Context, Metrics, OutFolder, Result, Stage

if TYPE_CHECKING:
    from hacrl_core.learning.sharded.ranks import Rank


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
    template_options: Annotated[dict[str, Any], IdentityUnlessDefault] = Field(default_factory=dict)
    # settled: foreign responses get the learner's own beginning and end; needs the samplers' versions as inputs
    boundary: Annotated[Literal["as_written", "settled"], IdentityUnlessDefault] = "as_written"
    stop_strings: Annotated[tuple[str, ...], IdentityUnlessDefault] = ()  # the learner's
    # As in the update, whose ratios compare with these log-probs.
    head_precision: Annotated[HeadPrecision, IdentityUnlessDefault] = "fp32"
    ranks: Annotated[PositiveInt, IdentityUnlessDefault] = 1
    offload: Annotated[bool, NotIdentity] = False

    def known(self, row: Mapping[str, Any]) -> bool:
        """Whether sampling already gave the log-probs that scoring this response would give."""
        return self.score.own == "sampled" and row["is_own"] and not self.is_reference


def run(
    inputs: Mapping[str, ArtifactRef], config: ScoreSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Compute the log-probs of everybody's responses under the learner."""
    import torch

    from hacrl_core.learning.fused import kernel_metrics
    from hacrl_core.learning.sequences import TrainSequence

    agent = _reader(inputs["agent"], config, context)
    rows = [row for sampler in config.samplers for row in _rows_of(agent, sampler, inputs, config, context)]
    scorable = [row for row in rows if row["token_ids"]]
    if config.most is not None:
        scorable = scorable[:: max(1, -(-len(scorable) // config.most))]
    # Identical responses to a prompt have identical log-probs: each is scored once.
    unknown = [row for row in scorable if not config.known(row)]
    sequences = [TrainSequence(tuple(row["prompt_token_ids"]), tuple(row["token_ids"])) for row in unknown]
    distinct = {sequence: place for place, sequence in enumerate(dict.fromkeys(sequences))}
    score = _score_here if config.ranks == 1 else _score_on_ranks
    scored = score(agent, list(distinct), inputs["agent"], config, context)
    fresh = iter(scored[distinct[sequence]] for sequence in sequences)
    logprobs = [np.array(row["response_logprobs"]) if config.known(row) else next(fresh) for row in scorable]
    columns: dict[str, list[Any]] = {
        name: [row[name] for row in scorable]
        for name in ("rollout_id", "sampler", "is_own", "prompt_id", "prompt_token_ids", "token_ids", "truncated")
    }
    columns["logprobs"] = logprobs
    # The numbers of np.mean, at a quarter of its price for a short array.
    columns["mean_logprob"] = [float(np.add.reduce(values, dtype=np.float64) / len(values)) for values in logprobs]
    out.write(SCORES, columns)
    metrics = _metrics(config, rows, scorable, columns, logprobs, len(distinct))
    metrics |= kernel_metrics("reference" if config.is_reference else "score", torch.device(context.device))
    if metrics.get("score/sampling_mismatch_mean", 0.0) > config.mismatch_warning:
        context.warn(
            f"score {config.learner} iteration {config.iteration + 1}: sampling and scoring log-probs differ by "
            f"{metrics['score/sampling_mismatch_mean']:.3g} per token on average, more than {config.mismatch_warning}; "
            "the generation engine and the trainer disagree about the same weights"
        )
    return Result(metrics)


def _reader(version: ArtifactRef, config: ScoreSlice, context: Context) -> Any:
    """Return what reads responses: the agent, or only its tokenizer and end tokens where ranks have its weights."""
    if config.ranks > 1:
        from hacrl_core.agents.agent import read_agent

        tokenizer, _ = context.warm.tokenizer(version.path)
        return read_agent(version.path, tokenizer, own_code=context.warm.own_code)
    # The newest version is needed again by the update: the first one takes its place only where memory is short.
    beside = config.is_reference and context.warm.has_room_for_first(context.device)
    load = context.warm.first_version if beside else context.warm.agent
    return load(version.path, version.digest, device=context.device, attention=context.attention)


def _score_here(agent: Any, sequences: list[Any], version: ArtifactRef, config: ScoreSlice, context: Context) -> Any:
    from hacrl_core.learning.scoring import score_sequences

    return score_sequences(
        agent,
        sequences,
        token_budget=config.score.token_budget,
        temperature=config.score.temperature,
        autocast=config.score.autocast,
        max_logits_mb=config.score.max_logits_mb,
        head_precision=config.head_precision,
    )


def _score_on_ranks(
    reader: Any, sequences: list[Any], version: ArtifactRef, config: ScoreSlice, context: Context
) -> Any:
    group = context.warm.ranks(config.ranks, context.device)
    task = ScoreOnRank(version, config, context.attention, context.warm.own_code)
    name = f"score {config.learner} iteration {config.iteration + 1}"
    return group.run(replace(task, sequences=sequences), task, name=name)


@dataclass(frozen=True)
class ScoreOnRank:
    """What every rank of a score stage does. Rank 0 has the sequences and hands them to the others."""

    version: ArtifactRef
    config: ScoreSlice
    attention: Attention
    own_code: bool
    sequences: list[Any] = field(default_factory=list)

    def __call__(self, rank: "Rank") -> Any:
        """Score this rank's rows and return the log-probs of all rows."""
        from hacrl_core.learning.sharded.policy import Numerics, agent_of, first_of
        from hacrl_core.learning.sharded.scoring import score_sharded

        config = self.config
        numerics = Numerics(config.score.autocast, self.attention, config.offload)
        load = first_of if config.is_reference else agent_of
        agent = load(rank, self.version.path, self.version.digest, numerics, own_code=self.own_code)
        return score_sharded(
            agent,
            rank.from_leader(self.sequences),
            token_budget=config.score.token_budget,
            temperature=config.score.temperature,
            max_logits_mb=config.score.max_logits_mb,
            head_precision=config.head_precision,
        )


def _rows_of(
    agent: Any, sampler: str, inputs: Mapping[str, ArtifactRef], config: ScoreSlice, context: Context
) -> list[dict[str, Any]]:
    """Return one sampler's rollouts in the learner's tokens; the learner's own are taken verbatim."""
    from hacrl_core.rendering import render_prompt

    rollouts = inputs[f"rollouts/{sampler}"]
    is_own = sampler == config.learner
    # Another party shares texts and no token ids.
    is_shared = (rollouts.path / "answers.parquet").exists()
    table = read_answers(rollouts.path) if is_shared else read_table(rollouts.path / "rollouts.parquet", ROLLOUTS)
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        row.setdefault("response_token_ids", [])
        row.update(sampler=sampler, is_own=is_own, truncated=False, token_ids=row["response_token_ids"])
    if is_own or (
        not is_shared and config.boundary == "as_written" and _reads_alike(inputs, rollouts, config, context)
    ):
        return rows
    prompts = read_table(inputs["prompts"].path / "prompts.parquet", PROMPTS)
    messages = dict(zip(prompts["prompt_id"].to_pylist(), prompts["messages"].to_pylist(), strict=True))
    rendered = {
        prompt: render_prompt(agent.tokenizer, text, config.chat_template, template_options=config.template_options)
        for prompt, text in messages.items()
    }
    settled = config.boundary == "settled"
    encoded = _settled(agent, sampler, rows, inputs, config) if settled else _as_written(agent, rows, config)
    for row, response in zip(rows, encoded, strict=True):
        row.update(
            prompt_token_ids=rendered[row["prompt_id"]],
            token_ids=list(response.token_ids),
            truncated=response.truncated,
        )
    return rows


def _reads_alike(
    inputs: Mapping[str, ArtifactRef], rollouts: ArtifactRef, config: ScoreSlice, context: Context
) -> bool:
    """Whether the sampler has the learner's tokenizer and chat template, so that ids and prompts mean the same."""
    _, fingerprint = context.warm.tokenizer(inputs["agent"].path)
    writer = json.loads((rollouts.path / "sampler.json").read_text())
    theirs = (writer["tokenizer"], writer["chat_template"], writer.get("template_options", {}))
    return bool(theirs == (fingerprint, config.chat_template, config.template_options))


def _as_written(agent: Any, rows: list[dict[str, Any]], config: ScoreSlice) -> list[Any]:
    """Encode the texts with all their white space, and the learner's first end token after those that ended."""
    from hacrl_core.rendering import encode_response

    return [
        encode_response(
            agent.tokenizer,
            row["response_text"],
            finished=row["finish_reason"] == "stop",
            stop_token_id=agent.stop_token_ids[0],
            max_tokens=config.max_tokens,
        )
        for row in rows
    ]


def _settled(
    agent: Any, sampler: str, rows: list[dict[str, Any]], inputs: Mapping[str, ArtifactRef], config: ScoreSlice
) -> list[Any]:
    """Give the responses the learner's own beginning and end; ids stay where both agents have one tokenizer."""
    from hacrl_core.agents.agent import load_tokenizer
    from hacrl_core.rendering import (
        EncodedResponse,
        boundary_of,
        settle_ids,
        settle_response,
        specials_of,
        tokenizer_fingerprint,
    )

    tokenizer, stops = agent.tokenizer, agent.stop_token_ids
    own = read_table(inputs[f"rollouts/{config.learner}"].path / "rollouts.parquet", ROLLOUTS).to_pylist()
    ours = boundary_of(tokenizer, [_written(row) for row in own], stops, config.stop_strings)
    responses = [_written(row) for row in rows]
    # Without the template: prompts are rendered anew, so that only the tokens must mean the same.
    theirs = None
    # Another party's version is not among the inputs.
    version = inputs.get(f"sampler/{sampler}")
    if version is not None and tokenizer_fingerprint(tokenizer, "") == tokenizer_fingerprint(
        load_tokenizer(version.path), ""
    ):
        theirs = boundary_of(tokenizer, responses, (*stops, *specials_of(tokenizer).texts))
    encoded = []
    for response in responses:
        ids = None if theirs is None else settle_ids(response, theirs, ours)
        if ids is None:
            encoded.append(settle_response(tokenizer, response, ours, stops, config.max_tokens))
        else:
            encoded.append(EncodedResponse(ids[: config.max_tokens], truncated=len(ids) > config.max_tokens))
    return encoded


def _written(row: Mapping[str, Any]) -> Any:
    from hacrl_core.rendering import Written

    return Written(row["response_text"], row["response_token_ids"], row["finish_reason"] == "stop")


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
    metrics |= _edges([values for row, values in zip(scorable, logprobs, strict=True) if not row["is_own"]])
    if own and config.score.own == "scored":
        differences = np.concatenate([np.abs(logprobs[i] - np.array(scorable[i]["response_logprobs"])) for i in own])
        metrics["score/sampling_mismatch_mean"] = float(differences.mean())
        metrics["score/sampling_mismatch_max"] = float(differences.max())
    return metrics


def _edges(logprobs: list[Any]) -> Metrics:
    """Return the mean log-prob of foreign responses' first and last tokens, and of those between."""
    long = [values for values in logprobs if len(values) > 2]
    if not long:
        return {}
    return {
        "score/foreign_first_logprob": float(np.mean([values[0] for values in long])),
        "score/foreign_last_logprob": float(np.mean([values[-1] for values in long])),
        "score/foreign_inner_logprob": float(np.mean(np.concatenate([values[1:-1] for values in long]))),
    }


STAGE = Stage("score", 2, ScoreSlice, run)
