"""evaluate: agent + benchmark → per-problem results, with accuracy and its interval."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import IdentityUnlessDefault, StrictConfig
from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.contracts.manifest import canonical_json
from hacrl_core.contracts.tables import EVALUATION
from hacrl_core.evaluation import Outcomes, by_tag, summarise
from hacrl_core.problems import Problem, load_problems
from hacrl_core.seeding import derive_seed
from hacrl_core.verification import Verdict, VerdictKind
from hacrl_core.verification.normalise import text_key
from stages.judging import JudgeSlice, judging_of
from stages.partial import generate_resumable, verify_resumable
from stages.spec import Context, Metrics, OutFolder, Result, Stage, required_seed

MOST_TAG_VALUES = 30
MOST_ANSWER_CHARS = 600


class EvaluateSlice(StrictConfig):
    """What an evaluation reads of the config."""

    benchmark: BenchmarkConfig
    content_digest: str  # of the benchmark's problems
    generate: GenerateConfig
    verify: VerifyConfig
    chat_template: str | None = None
    template_options: Annotated[dict[str, Any], IdentityUnlessDefault] = Field(default_factory=dict)
    verifier_source: str = ""  # digest of the user's own verifier
    judges: dict[str, JudgeSlice] = Field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """Return what changes a result: neither the benchmark's schedule nor the sampling limits of training do."""
        return {
            "benchmark": self.benchmark.model_dump(
                mode="json", include={"samples", "temperature", "top_p", "max_tokens", "ks"}
            )
            | {"problems": self.benchmark.problems.identity()},
            "content_digest": self.content_digest,
            # Metrics carry the benchmark's name.
            "name": self.benchmark.name,
            "engine": self.generate.engine.identity(),
            "stop_strings": list(self.generate.stop_strings),
            "verify": self.verification.identity(),
            "chat_template": self.chat_template,
            "verifier_source": self.verifier_source,
            **({"judges": {name: judge.identity() for name, judge in self.judges.items()}} if self.judges else {}),
            **({"template_options": self.template_options} if self.template_options else {}),
        }

    @property
    def sampling(self) -> GenerateConfig:
        """How answers are sampled: the campaign's engine, the benchmark's own temperature and lengths."""
        own = {name: getattr(self.benchmark, name) for name in ("temperature", "top_p", "max_tokens")}
        return self.generate.model_copy(update={**own, "top_k": 0, "max_prompt_tokens": None})

    @property
    def verification(self) -> VerifyConfig:
        """How answers are checked: as in the campaign, with the benchmark's tolerance where it has one.

        Shaped rewards are for training only.
        """
        own = {} if self.benchmark.tolerance is None else {"tolerance": self.benchmark.tolerance}
        return self.verify.model_copy(update={**own, "format_reward": 0.0, "overlong": None})


def run(
    inputs: Mapping[str, ArtifactRef], config: EvaluateSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Answer every problem of the benchmark, verify the answers and sum them up."""
    problems = load_problems(config.benchmark.problems).problems
    generations = _answers(inputs["agent"], problems, config, required_seed("evaluate", seed), context)
    repeated = [problem for problem in problems for _ in range(config.benchmark.samples)]
    verdicts = verify_resumable(
        [g.text for g in generations],
        [p.answer for p in repeated],
        config.verification,
        context,
        problems=repeated,
        judging=judging_of(inputs, config.judges, config.verification, context),
        truncated=[g.finish_reason == "length" for g in generations],
    )
    columns = _columns(repeated, generations, verdicts, config.benchmark.samples)
    out.write(EVALUATION, columns)
    return Result(_metrics(config.benchmark, outcomes_of(columns, config.benchmark.samples)))


def _answers(
    agent: ArtifactRef, problems: tuple[Problem, ...], config: EvaluateSlice, seed: int, context: Context
) -> list[Any]:
    from hacrl_core.generation.protocols import GenerationRequest
    from hacrl_core.rendering import render_prompt

    tokenizer, _ = context.warm.tokenizer(agent.path)
    requests = []
    for problem in problems:
        prompt = tuple(
            render_prompt(tokenizer, problem.messages, config.chat_template, template_options=config.template_options)
        )
        for sample in range(config.benchmark.samples):
            name = f"{problem.problem_id}/{sample:02d}"
            requests.append(GenerationRequest(name, prompt, derive_seed(seed, config.benchmark.name, name)))
    # The engine is that of the generate stage: temperature and length are arguments of a call, not of the engine.
    engine = context.warm.engine(config.generate, context.device)
    return generate_resumable(engine, agent, requests, config.sampling, context, keep_all=True)


def _columns(
    problems: list[Problem], generations: list[Any], verdicts: list[Verdict], samples: int
) -> dict[str, list[Any]]:
    return {
        "problem_id": [p.problem_id for p in problems],
        "sample_index": [i % samples for i in range(len(problems))],
        "response_text": [g.text for g in generations],
        "verdict": [v.verdict.value for v in verdicts],
        "reward": [v.reward for v in verdicts],
        "extracted_answer": [v.extracted_answer or "" for v in verdicts],
        "answer": [p.answer for p in problems],
        "tokens": [len(g.token_ids) for g in generations],
        "truncated": [g.finish_reason == "length" for g in generations],
        "tags": [canonical_json(dict(p.tags)) for p in problems],
    }


def outcomes_of(columns: Mapping[str, Sequence[Any]], samples: int) -> Outcomes:
    """Return the table of results as problems × samples."""
    # What the verifier failed on is neither right nor wrong.
    known = {VerdictKind.CORRECT.value: 1.0, VerdictKind.ERROR.value: np.nan}
    # One vote for all spellings of an answer; what is too long for an answer keeps its own.
    answers = [text_key(a) if len(a) <= MOST_ANSWER_CHARS else a for a in columns["extracted_answer"]]
    return Outcomes(
        rewards_PS=np.array([known.get(verdict, 0.0) for verdict in columns["verdict"]]).reshape(-1, samples),
        answers_PS=tuple(tuple(answers[start : start + samples]) for start in range(0, len(answers), samples)),
        tokens_PS=np.array(columns["tokens"]).reshape(-1, samples),
        truncated_PS=np.array(columns["truncated"]).reshape(-1, samples),
        tags_P=tuple(json.loads(tags) for tags in columns["tags"][::samples]),
    )


def _metrics(benchmark: BenchmarkConfig, outcomes: Outcomes) -> Metrics:
    """Return all metrics of the benchmark, and its accuracy by tag.

    A tag whose value differs from problem to problem says nothing and is left out.
    """
    found = summarise(outcomes, benchmark.reported_ks)
    average = f"avg@{benchmark.samples}"
    for short, name in (
        ("accuracy", average),
        ("accuracy_low", f"{average}/low"),
        ("accuracy_high", f"{average}/high"),
    ):
        if name in found:
            found[short] = found[name]
    for tag, values in by_tag(outcomes, (1,)).items():
        if len(values) <= MOST_TAG_VALUES:
            found |= {f"{tag}/{value}": part[average] for value, part in values.items() if average in part}
    return {f"evaluate/{benchmark.name}/{name}": value for name, value in found.items()}


STAGE = Stage("evaluate", 2, EvaluateSlice, run)
