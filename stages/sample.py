"""sample: problems + seed + iteration → the prompts that every agent answers in this iteration."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import IdentityUnlessDefault, NotIdentity, StrictConfig
from hacrl_core.config.exchange import WithholdConfig
from hacrl_core.config.problems import ProblemsConfig
from hacrl_core.contracts.manifest import canonical_json
from hacrl_core.contracts.tables import PROMPTS, PROMPTS_2
from hacrl_core.errors import StageError
from hacrl_core.problems import Problem, ProblemSet, load_problems, within_length
from stages.spec import Context, OutFolder, Result, Stage, required_seed


class SampleSlice(StrictConfig):
    """What sampling reads of the config."""

    problems: ProblemsConfig
    iteration: NonNegativeInt
    prompts: PositiveInt
    content_digest: str  # of the problems as they were read
    # What parties keep out; the digest above says what is left.
    withheld: Annotated[tuple[WithholdConfig, ...], NotIdentity] = ()
    max_prompt_tokens: PositiveInt | None = None  # for every agent: all must be able to answer the same prompts
    chat_templates: dict[str, str | None] = Field(default_factory=dict)
    template_options: Annotated[dict[str, dict[str, Any]], IdentityUnlessDefault] = Field(default_factory=dict)
    # Agents whose checkpoints may run Python code of their own.
    own_code: Annotated[tuple[str, ...], NotIdentity] = ()


def run(
    inputs: Mapping[str, ArtifactRef], config: SampleSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Draw the prompts of an iteration, a function of seed and iteration alone."""
    seed = required_seed("sample", seed)
    drawn = _problems(inputs, config, context).for_iteration(seed, config.iteration, config.prompts)
    columns: dict[str, list[Any]] = {
        "prompt_id": [p.problem_id for p in drawn],
        "messages": [[dict(m) for m in p.messages] for p in drawn],
        "answer": [p.answer for p in drawn],
        "source": [p.source for p in drawn],
        "tags": [canonical_json(dict(p.tags)) for p in drawn],
    }
    if any(p.columns for p in drawn):
        columns["columns"] = [canonical_json(dict(p.columns)) for p in drawn]
    out.write(PROMPTS_2 if "columns" in columns else PROMPTS, columns)
    return Result({"sample/prompts": float(len(drawn))})


def _problems(inputs: Mapping[str, ArtifactRef], config: SampleSlice, context: Context) -> ProblemSet:
    """Return the problems that fit every agent, loaded once per process."""
    known = (
        config.model_dump_json(include={"problems", "content_digest", "withheld", "max_prompt_tokens"}),
        *inputs.values(),
    )
    return context.warm.problems(known, partial(_load, inputs, config))


def _load(inputs: Mapping[str, ArtifactRef], config: SampleSlice) -> ProblemSet:
    """Load the problems, check that they are those the campaign was planned with, and drop those that do not fit."""
    found = load_problems(config.problems, config.withheld)
    if found.content_digest != config.content_digest:
        raise StageError(
            f"sample iteration {config.iteration + 1}: the problems changed on disk while the campaign ran; "
            "run the same command again"
        )
    if config.max_prompt_tokens is not None and found.generator is None:
        found = replace(found, problems=_that_fit(found, inputs, config, config.max_prompt_tokens))
    return found


def _that_fit(
    found: ProblemSet, inputs: Mapping[str, ArtifactRef], config: SampleSlice, limit: int
) -> tuple[Problem, ...]:
    from hacrl_core.agents.agent import load_tokenizer
    from hacrl_core.rendering import render_prompt

    tokenizers = {agent: load_tokenizer(ref.path, own_code=agent in config.own_code) for agent, ref in inputs.items()}
    renderers = {
        agent: partial(
            _render,
            partial(render_prompt, template_options=config.template_options.get(agent)),
            tokenizer,
            config.chat_templates.get(agent),
        )
        for agent, tokenizer in tokenizers.items()
    }
    return within_length(found.problems, renderers, limit).problems


def _render(render_prompt: Any, tokenizer: Any, template: str | None, messages: Any) -> list[int]:
    ids: list[int] = render_prompt(tokenizer, messages, template)
    return ids


STAGE = Stage("sample", 1, SampleSlice, run)
