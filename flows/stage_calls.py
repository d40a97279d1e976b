"""From the campaign's config to stage calls: which slice of it each stage reads, and whose artifacts it needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hacrl_core.artifacts.sources import source_digest
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.problems import load_problems
from hacrl_core.seeding import derive_seed
from hacrl_core.verification.verifiers import verifier_source

KL_RESPONSES = 64  # enough to see a policy drift, cheap enough for every iteration


@dataclass(frozen=True)
class Planned:
    """A stage call whose inputs may still be on their way: handles instead of artifacts."""

    stage: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)  # role → handle
    seed: int | None = None
    agent: str = ""
    iteration: int | None = None
    variant: str = ""


class Calls:
    """One method per stage. Only what a stage reads goes into its call, so that a setting recomputes only what depends on it."""

    def __init__(self, config: CampaignConfig, problems_digest: str) -> None:
        self.config, self._problems_digest = config, problems_digest
        self._digests: dict[str, str] = {}
        self._verifier_source = verifier_source(config.verify.verifier)

    def origin(self, agent: str) -> Planned:
        """The agent's first version: taught from nothing, or an existing checkpoint taken in."""
        settings = self.config.agents[agent]
        if settings.warmstart is not None:
            corpus = self.config.corpus
            assert corpus is not None  # checked by the config
            slice_ = {"warmstart": _json(settings.warmstart), "corpus": _json(corpus)}
            return Planned("warmstart", slice_, seed=self._seed("warmstart", agent), agent=agent)
        assert settings.checkpoint is not None
        slice_ = {
            "checkpoint": _json(settings.checkpoint),
            "source_digest": source_digest(settings.checkpoint),
            "chat_template": settings.chat_template,
        }
        return Planned("adopt", slice_, agent=agent)

    def sample(self, origins: Mapping[str, Any], iteration: int) -> Planned:
        """Needs the agents' tokenizers only where prompts are filtered by length; first versions have them, and never change."""
        limit = self.config.generate.max_prompt_tokens if self.config.corpus is None else None
        slice_ = {
            "max_prompt_tokens": limit,
            "chat_templates": {a: self.config.agents[a].template_override for a in origins} if limit else {},
            "problems": _json(self.config.problems),
            "content_digest": self._problems_digest,
            "iteration": iteration,
            "prompts": self.config.prompts_per_iteration,
        }
        return Planned("sample", slice_, dict(origins) if limit else {}, seed=self._seed("sample"), iteration=iteration)

    def generate(self, agent: str, version: Any, prompts: Any, iteration: int) -> Planned:
        slice_ = {
            "agent_id": agent,
            "iteration": iteration,
            "samples_per_prompt": self.config.group_size,
            "generate": _json(self.config.generation(agent)),
            "chat_template": self.config.agents[agent].template_override,
        }
        inputs = {"agent": version, "prompts": prompts}
        return Planned("generate", slice_, inputs, self._seed("generate", agent, iteration), agent, iteration)

    def verify(self, agent: str, rollouts: Any, prompts: Any, iteration: int) -> Planned:
        verify = _json(self.config.verify)
        if self.config.divergence.on_verifier_failure == "skip":
            verify["max_error_share"] = 1.0  # the update decides
        slice_ = {"verify": verify, "verifier_source": self._verifier_source}
        return Planned("verify", slice_, {"rollouts": rollouts, "prompts": prompts}, None, agent, iteration)

    def credit(self, learner: str, verdicts: Mapping[str, Any], previous: Any, iteration: int) -> Planned:
        slice_ = {
            "learner": learner,
            "agents": list(verdicts),
            "iteration": iteration,
            "algorithm": _json(self.config.objective(learner)),
        }
        inputs = {f"verdicts/{agent}": handle for agent, handle in verdicts.items()}
        if previous is not None:
            inputs["previous"] = previous
        return Planned("credit", slice_, inputs, None, learner, iteration)

    def score(self, learner: str, version: Any, rollouts: Mapping[str, Any], prompts: Any, iteration: int) -> Planned:
        slice_ = self._score_slice(learner, list(rollouts), iteration)
        inputs = {"agent": version, "prompts": prompts, **{f"rollouts/{a}": handle for a, handle in rollouts.items()}}
        return Planned("score", slice_, inputs, None, learner, iteration)

    def reference(self, learner: str, origin: Any, rollouts: Any, prompts: Any, iteration: int) -> Planned | None:
        """Own responses under the learner's first version: all of them where KL is in the loss, a few where it is only watched."""
        objective = self.config.objective(learner)
        if not (
            objective.kl_coefficient > 0 or (objective.measure_kl and iteration > self.config.agents[learner].joins)
        ):
            return None
        slice_ = self._score_slice(learner, [learner], iteration)
        slice_["is_reference"] = True
        slice_["most"] = None if objective.kl_coefficient > 0 else KL_RESPONSES
        inputs = {"agent": origin, "prompts": prompts, f"rollouts/{learner}": rollouts}
        return Planned("score", slice_, inputs, None, learner, iteration, "reference")

    def _score_slice(self, learner: str, samplers: list[str], iteration: int) -> dict[str, Any]:
        return {
            "learner": learner,
            "samplers": samplers,
            "iteration": iteration,
            "score": _json(self.config.scoring(learner)),
            "max_tokens": self.config.generation(learner).max_tokens,
            "mismatch_warning": self.config.generation(learner).mismatch_warning,
            "chat_template": self.config.agents[learner].template_override,
        }

    def update(
        self, learner: str, version: Any, scores: Mapping[str, Any], credit: Any, iteration: int, reference: Any = None
    ) -> Planned:
        divergence = self.config.divergence
        slice_ = {
            "learner": learner,
            "samplers": list(scores),
            "iteration": iteration,
            "minibatch_prompts": self.config.minibatch_size(learner),
            "algorithm": _json(self.config.objective(learner)),
            "update": _json(self.config.training(learner)),
            "on_nonfinite": divergence.on_nonfinite,
            "max_error_share": self.config.verify.max_error_share if divergence.on_verifier_failure == "skip" else None,
        }
        inputs = {"agent": version, "credit": credit, **{f"scores/{a}": handle for a, handle in scores.items()}}
        if reference is not None:
            inputs["reference"] = reference
        return Planned("update", slice_, inputs, self._seed("update", learner), learner, iteration)

    def evaluate(self, agent: str, version: Any, benchmark: BenchmarkConfig, iteration: int) -> Planned:
        slice_ = {
            "benchmark": _json(benchmark),
            "content_digest": self._benchmark_digest(benchmark),
            "generate": _json(self.config.generation(agent)),
            "verify": _json(self.config.verify),
            "verifier_source": self._verifier_source,
            "chat_template": self.config.agents[agent].template_override,
        }
        return Planned("evaluate", slice_, {"agent": version}, self._seed("evaluate"), agent, iteration, benchmark.name)

    def sources(self) -> dict[str, Any]:
        """What the calls know by content and the config by name only: data, checkpoints, a verifier of the user's."""
        return {
            "problems": self._problems_digest,
            "benchmarks": {b.name: self._benchmark_digest(b) for b in self.config.evaluate.benchmarks},
            "checkpoints": {a: source_digest(s.checkpoint) for a, s in self.config.agents.items() if s.checkpoint},
            "verifier": self._verifier_source,
        }

    def _benchmark_digest(self, benchmark: BenchmarkConfig) -> str:
        if benchmark.name not in self._digests:
            self._digests[benchmark.name] = load_problems(benchmark.problems).content_digest
        return self._digests[benchmark.name]

    def _seed(self, *purpose: str | int) -> int:
        return derive_seed(self.config.seed, *purpose)


def _json(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(mode="json")
    return dumped
