"""What judges need inside a stage: the folder of kept answers, and the agents of the campaign that judge."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import Field

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import StrictConfig
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.verification.judge import Failure, JudgeAgent, Judging
from stages.spec import Context

ROLE = "judge/"


class JudgeSlice(StrictConfig):
    """How an agent of the campaign answers when it judges."""

    generate: GenerateConfig
    chat_template: str | None = None
    template_options: dict[str, Any] = Field(default_factory=dict)


def judging_of(
    inputs: Mapping[str, ArtifactRef], judges: Mapping[str, JudgeSlice], verify: VerifyConfig, context: Context
) -> Judging:
    """Return where the judges' answers are kept and the agents among them, by name."""
    lengths = {judge.agent: judge.max_tokens for judge in verify.judges if judge.agent is not None}
    agents = {
        name: JudgeAgent(
            partial(_ask, inputs[f"{ROLE}{name}"], settings, lengths[name], context), inputs[f"{ROLE}{name}"].digest
        )
        for name, settings in judges.items()
    }
    return Judging(context.judgements, agents)


def _ask(
    agent: ArtifactRef, settings: JudgeSlice, max_tokens: int, context: Context, prompts: Sequence[str]
) -> list[str | Failure]:
    """Have an agent answer prompts greedily, with its own weights kept beside those of the agent at work."""
    from hacrl_core.generation import sampling_params
    from hacrl_core.generation.protocols import GenerationRequest
    from hacrl_core.rendering import render_prompt

    warm = context.warm.for_agent(f"judge {agent.digest}")
    tokenizer, _ = warm.tokenizer(agent.path)
    requests = []
    for number, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}]
        ids = render_prompt(tokenizer, messages, settings.chat_template, template_options=settings.template_options)
        requests.append(GenerationRequest(str(number), tuple(ids), number))
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": max_tokens, "max_prompt_tokens": None}
    engine = warm.engine(settings.generate, context.device)
    params = sampling_params(settings.generate.model_copy(update=greedy))
    answers: list[str | Failure] = [
        row.text for row in engine.generate(agent.path, agent.digest, requests, params, lambda done, tokens: None)
    ]
    return answers
