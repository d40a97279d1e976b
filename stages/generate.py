"""generate: agent + prompts → rollouts, each prompt answered several times by one agent."""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import IdentityUnlessDefault, StrictConfig
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.contracts.manifest import canonical_json
from hacrl_core.contracts.tables import PROMPTS, ROLLOUTS, read_table
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


def run(
    inputs: Mapping[str, ArtifactRef], config: GenerateSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Answer every prompt several times and record what was written with which log-probs."""
    from hacrl_core.generation.protocols import GenerationRequest
    from hacrl_core.rendering import render_prompt

    seed = required_seed("generate", seed)
    prompts = read_table(inputs["prompts"].path / "prompts.parquet", PROMPTS).to_pylist()
    tokenizer, fingerprint = context.warm.tokenizer(inputs["agent"].path)
    rendered = {
        p["prompt_id"]: tuple(
            render_prompt(tokenizer, p["messages"], config.chat_template, template_options=config.template_options)
        )
        for p in prompts
    }
    _check_length(rendered, config)
    wanted = [(p["prompt_id"], sample) for p in prompts for sample in range(config.samples_per_prompt)]
    seeds = [derive_seed(seed, prompt_id, sample) for prompt_id, sample in wanted]
    engine = context.warm.engine(config.generate, context.device)
    requests = [
        GenerationRequest(f"{prompt_id}/{sample:02d}", rendered[prompt_id], one)
        for (prompt_id, sample), one in zip(wanted, seeds, strict=True)
    ]
    generations = generate_resumable(engine, inputs["agent"], requests, config.generate, context)
    out.write(ROLLOUTS, _columns(config, inputs["agent"].digest, wanted, seeds, rendered, generations))
    sampler: dict[str, Any] = {
        "agent_id": config.agent_id,
        "tokenizer": fingerprint,
        "chat_template": config.chat_template,
    }
    if config.template_options:
        sampler["template_options"] = config.template_options
    (out.path / "sampler.json").write_text(canonical_json(sampler))
    return Result(_metrics(generations), {"engine": engine.name, "engine_version": engine.version})


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


def _metrics(generations: list[Any]) -> Metrics:
    lengths = np.array([len(g.token_ids) for g in generations])
    return {
        "generate/responses": float(len(generations)),
        "generate/tokens": float(lengths.sum()),
        "generate/response_length_mean": float(lengths.mean()),
        "generate/truncated_share": float(np.mean([g.finish_reason == "length" for g in generations])),
        "generate/distinct_share": len({g.token_ids for g in generations}) / len(generations),
    }


STAGE = Stage("generate", 1, GenerateSlice, run)
