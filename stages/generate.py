"""generate: agent + prompts → rollouts, each prompt answered several times by one agent.

A further attempt also has the rollouts and verdicts of the one before. It answers again where all verdicts agree, and
takes the other prompts' rollouts over.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import IdentityUnlessDefault, StrictConfig
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.contracts.manifest import canonical_json
from hacrl_core.contracts.tables import PROMPTS, ROLLOUTS, VERDICTS, read_table
from hacrl_core.errors import EngineError
from hacrl_core.seeding import derive_seed
from stages.partial import generate_resumable
from stages.spec import Context, Metrics, OutFolder, Result, Stage, required_seed


class GenerateSlice(StrictConfig):
    """What generation reads of the config."""

    agent_id: str
    iteration: NonNegativeInt
    samples_per_prompt: PositiveInt
    generate: GenerateConfig
    chat_template: str | None = None
    template_options: Annotated[dict[str, Any], IdentityUnlessDefault] = Field(default_factory=dict)
    attempt: Annotated[NonNegativeInt, IdentityUnlessDefault] = 0  # above 0: has the attempt before as input


def run(
    inputs: Mapping[str, ArtifactRef], config: GenerateSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Answer every prompt several times and record what was written with which log-probs."""
    from hacrl_core.generation.protocols import GenerationRequest
    from hacrl_core.rendering import render_prompt

    seed = required_seed("generate", seed)
    prompts = read_table(inputs["prompts"].path / "prompts.parquet", PROMPTS).to_pylist()
    kept = rollouts_with_signal(inputs["rollouts"], inputs["verdicts"]) if config.attempt else {}
    tokenizer, fingerprint = context.warm.tokenizer(inputs["agent"].path)
    rendered = {
        p["prompt_id"]: tuple(
            render_prompt(tokenizer, p["messages"], config.chat_template, template_options=config.template_options)
        )
        for p in prompts
    }
    _check_length(rendered, config)
    # Samples count on from one attempt to the next: seeds and ids of a group are its own.
    samples = range(config.attempt * config.samples_per_prompt, (config.attempt + 1) * config.samples_per_prompt)
    wanted = [(p["prompt_id"], sample) for p in prompts if p["prompt_id"] not in kept for sample in samples]
    seeds = [derive_seed(seed, prompt_id, sample) for prompt_id, sample in wanted]
    engine = context.warm.engine(config.generate, context.device)
    requests = [
        GenerationRequest(f"{prompt_id}/{sample:02d}", rendered[prompt_id], one)
        for (prompt_id, sample), one in zip(wanted, seeds, strict=True)
    ]
    generations = generate_resumable(engine, inputs["agent"], requests, config.generate, context) if requests else []
    written = _columns(config, inputs["agent"].digest, wanted, seeds, rendered, generations)
    columns = _beside(kept, written, list(rendered)) if config.attempt else written
    out.write(ROLLOUTS, columns)
    sampler: dict[str, Any] = {
        "agent_id": config.agent_id,
        "tokenizer": fingerprint,
        "chat_template": config.chat_template,
    }
    if config.template_options:
        sampler["template_options"] = config.template_options
    (out.path / "sampler.json").write_text(canonical_json(sampler))
    metrics = _metrics(written, columns)
    if config.attempt:
        metrics["generate/resampled_share"] = 1 - len(kept) / len(prompts)
    return Result(metrics, {"engine": engine.name, "engine_version": engine.version})


def rollouts_with_signal(rollouts: ArtifactRef, verdicts: ArtifactRef) -> dict[str, list[dict[str, Any]]]:
    """Return the rollouts of the prompts whose judged responses have more than one reward, by prompt."""
    rewards: dict[str, set[float]] = {}
    for row in read_table(verdicts.path / "verdicts.parquet", VERDICTS).to_pylist():
        if row["verdict"] != "error":
            rewards.setdefault(row["prompt_id"], set()).add(row["reward"])
    kept: dict[str, list[dict[str, Any]]] = {}
    for row in read_table(rollouts.path / "rollouts.parquet", ROLLOUTS).to_pylist():
        if len(rewards.get(row["prompt_id"], ())) > 1:
            kept.setdefault(row["prompt_id"], []).append(row)
    return kept


def _beside(
    kept: Mapping[str, list[dict[str, Any]]], written: Mapping[str, list[Any]], prompts: list[str]
) -> dict[str, list[Any]]:
    """The rollouts that were kept and those that were written now, in the order of the prompts."""
    groups = dict(kept)
    for values in zip(*written.values(), strict=True):
        row = dict(zip(written, values, strict=True))
        groups.setdefault(row["prompt_id"], []).append(row)
    rows = [row for prompt in prompts for row in groups[prompt]]
    return {name: [row[name] for row in rows] for name in written}


def _check_length(rendered: Mapping[str, tuple[int, ...]], config: GenerateSlice) -> None:
    limit = config.generate.max_prompt_tokens
    for prompt_id, ids in rendered.items():
        if limit is not None and len(ids) > limit:
            raise EngineError(
                f"generate {config.agent_id} iteration {config.iteration + 1}: prompt {prompt_id} has {len(ids)} "
                f"tokens, more than max_prompt_tokens {limit}; raise generate.max_prompt_tokens or filter the problems"
            )


def _columns(
    config: GenerateSlice, policy: str, wanted: Any, seeds: Any, rendered: Any, generations: list[Any]
) -> dict[str, list[Any]]:
    return {
        "rollout_id": [f"{config.iteration:06d}/{config.agent_id}/{prompt}/{sample:02d}" for prompt, sample in wanted],
        "iteration": [config.iteration] * len(wanted),
        "agent_id": [config.agent_id] * len(wanted),
        "policy_digest": [policy] * len(wanted),
        "prompt_id": [prompt for prompt, _ in wanted],
        "sample_index": [sample for _, sample in wanted],
        "prompt_token_ids": [rendered[prompt] for prompt, _ in wanted],
        "response_text": [g.text for g in generations],
        "response_token_ids": [g.token_ids for g in generations],
        # What the score stage computes again: at a temperature other than 1 that is the tempered distribution.
        "response_logprobs": [
            g.policy_logprobs if config.generate.temperature == 1 else g.sampling_logprobs for g in generations
        ],
        "finish_reason": [g.finish_reason for g in generations],
        "seed": seeds,
    }


def _metrics(written: Mapping[str, list[Any]], columns: Mapping[str, list[Any]]) -> Metrics:
    """What was written now is counted; how the responses are is said of all that the table holds."""
    tokens, ends = columns["response_token_ids"], columns["finish_reason"]
    return {
        "generate/responses": float(len(written["response_token_ids"])),
        "generate/tokens": float(sum(map(len, written["response_token_ids"]))),
        "generate/response_length_mean": float(np.array([len(ids) for ids in tokens]).mean()),
        "generate/truncated_share": float(np.mean([reason == "length" for reason in ends])),
        "generate/distinct_share": len({tuple(ids) for ids in tokens}) / len(tokens),
    }


STAGE = Stage("generate", 1, GenerateSlice, run)
