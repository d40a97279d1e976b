"""From the campaign's config to stage calls: the slice of config each stage reads, and the artifacts it needs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hacrl_core.artifacts.sources import source_digest
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.config.problems import ArithmeticConfig, TaskProblems
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.problems import load_problems
from hacrl_core.seeding import derive_seed
from hacrl_core.verification.verifiers import resolve_verifier, reward_sources, verifier_source
from stages.adopt import AdoptSlice
from stages.credit import CreditSlice
from stages.evaluate import EvaluateSlice
from stages.generate import GenerateSlice
from stages.judging import ROLE, JudgeSlice
from stages.sample import SampleSlice
from stages.score import ScoreSlice
from stages.share import SOURCES, SharedKind, ShareSlice
from stages.spec import Handle, StageCall
from stages.update import REPLAY, UpdateSlice
from stages.verify import VerifySlice
from stages.warmstart import WarmstartSlice

# Enough responses to see a policy drift, cheap enough for every iteration.
KL_RESPONSES = 64


class StageCalls:
    """Builds the calls of one campaign, one method per stage.

    Only what a stage reads goes into its call, so that changing a setting recomputes only what depends on it.
    """

    def __init__(self, config: CampaignConfig, problems_digest: str | None = None) -> None:
        """``problems_digest``: the content of the campaign's problems, where the caller has read them already."""
        self.config = config
        self._problems_digest = (
            load_problems(config.problems, config.withheld).content_digest
            if problems_digest is None
            else problems_digest
        )
        self._benchmark_digests: dict[str, str] = {}
        self._verify = resolve_verifier(config.verify, config.problems).for_training()
        self._verifier_source = verifier_source(self._verify.verifier)
        self._reward_sources = reward_sources(self._verify)

    def origin(self, agent: str) -> StageCall:
        """The agent's first version: trained from nothing, or imported from an existing checkpoint."""
        settings = self.config.agents[agent]
        if settings.warmstart is not None:
            corpus = self.config.corpus
            assert corpus is not None, "the config requires arithmetic or a task for warm starts"
            digest = self._problems_digest if isinstance(corpus, TaskProblems) else ""
            warmstart = WarmstartSlice(warmstart=settings.warmstart, corpus=corpus, content_digest=digest)
            return StageCall("warmstart", warmstart, seed=self._seed("warmstart", agent), agent=agent)
        assert settings.checkpoint is not None, "the config requires a warm start or a checkpoint"
        adopt = AdoptSlice(
            checkpoint=settings.checkpoint,
            # Another party's checkpoint is not on this machine, and nothing here reads it.
            source_digest=source_digest(settings.checkpoint) if self.config.has_weights_of(agent) else "elsewhere",
            chat_template=settings.chat_template,
        )
        return StageCall("adopt", adopt, agent=agent)

    def sample(self, origins: Mapping[str, Handle], iteration: int) -> StageCall:
        """The prompts of an iteration. First versions are inputs only if prompts are filtered by length in tokens."""
        made = isinstance(self.config.corpus, ArithmeticConfig)
        # Parties have no tokenizers of one another.
        limit = None if made or self.config.parties else self.config.generate.max_prompt_tokens
        config = SampleSlice(
            problems=self.config.problems,
            iteration=iteration,
            prompts=self.config.prompts_per_iteration,
            content_digest=self._problems_digest,
            withheld=self.config.withheld,
            max_prompt_tokens=limit,
            chat_templates={a: self.config.agents[a].template_override for a in origins} if limit else {},
            template_options=_options({a: self.config.agents[a].template_options for a in origins}) if limit else {},
            own_code=tuple(a for a in origins if self.config.agents[a].own_code) if limit else (),
        )
        inputs = dict(origins) if limit else {}
        return StageCall("sample", config, inputs, seed=self._seed("sample"), iteration=iteration)

    def generate(
        self,
        agent: str,
        version: Handle,
        prompts: Handle,
        iteration: int,
        attempt: int = 0,
        before: Mapping[str, Handle] | None = None,
    ) -> StageCall:
        """The agent's responses to the prompts, several to each.

        A further attempt needs the rollouts and verdicts ``before`` it, and writes anew where they have no signal.
        """
        config = GenerateSlice(
            agent_id=agent,
            iteration=iteration,
            samples_per_prompt=self.config.group_size,
            generate=self.config.generation(agent),
            chat_template=self.config.agents[agent].template_override,
            template_options=self.config.agents[agent].template_options,
            attempt=attempt,
        )
        inputs = {"agent": version, "prompts": prompts, **(before or {})}
        seed, variant = self._seed("generate", agent, iteration), self.config.attempts[attempt]
        return StageCall("generate", config, inputs, seed, agent, iteration, variant)

    def verify(
        self,
        agent: str,
        rollouts: Handle,
        prompts: Handle,
        iteration: int,
        origins: Mapping[str, Handle],
        attempt: int = 0,
        before: Mapping[str, Handle] | None = None,
    ) -> StageCall:
        """A verdict and a reward for each of the agent's responses; agents that judge do so in their first version.

        In a further attempt responses that are not new keep their verdict of ``before``.
        """
        verify = self._verify
        if self.config.divergence.on_verifier_failure == "skip":
            # The stage accepts any number of verifier errors; the update then decides whether to skip.
            verify = verify.model_copy(update={"max_error_share": 1.0})
        judges = self._judges(verify)
        config = VerifySlice(
            judges=judges, verify=verify, verifier_source=self._verifier_source, reward_sources=self._reward_sources
        )
        inputs = {"rollouts": rollouts, "prompts": prompts, **{f"{ROLE}{name}": origins[name] for name in judges}}
        if before:
            inputs["verdicts"] = before["verdicts"]
        return StageCall("verify", config, inputs, None, agent, iteration, self.config.attempts[attempt])

    def share(self, kind: SharedKind, agent: str, source: Handle, iteration: int) -> StageCall:
        """What other parties may see of an agent's rollouts (``answers``) or of its scores (``claims``)."""
        config = ShareSlice(agent_id=agent, iteration=iteration, kind=kind)
        return StageCall("share", config, {SOURCES[kind]: source}, None, agent, iteration, kind)

    def credit(
        self, learner: str, verdicts: Mapping[str, Handle], previous: Handle | None, iteration: int
    ) -> StageCall:
        """The learner's advantages over everyone's verdicts, and the capability of each sampler."""
        config = CreditSlice(
            learner=learner,
            agents=tuple(verdicts),
            iteration=iteration,
            algorithm=self.config.objective(learner).credit,
            limits=self._limits(learner, verdicts),
        )
        inputs = {f"verdicts/{agent}": handle for agent, handle in verdicts.items()}
        if previous is not None:
            inputs["previous"] = previous
        return StageCall("credit", config, inputs, None, learner, iteration)

    def score(
        self,
        learner: str,
        versions: Mapping[str, Handle],
        rollouts: Mapping[str, Handle],
        prompts: Handle,
        iteration: int,
    ) -> StageCall:
        """Log-probs of everyone's responses under the learner; ``versions`` are those that wrote them."""
        config = self._score_slice(learner, tuple(rollouts), iteration)
        inputs = {"agent": versions[learner], "prompts": prompts}
        inputs |= {f"rollouts/{a}": handle for a, handle in rollouts.items()}
        if config.boundary == "settled":
            # Their tokenizers tell whether ids mean the same.
            here = self.config.party_of(learner)
            inputs |= {
                f"sampler/{a}": versions[a] for a in rollouts if a != learner and self.config.party_of(a) == here
            }
        return StageCall("score", config, inputs, None, learner, iteration)

    def reference(
        self, learner: str, origin: Handle, rollouts: Handle, prompts: Handle, iteration: int
    ) -> StageCall | None:
        """Log-probs of the learner's own responses under its first version, or None where no KL is wanted.

        All responses are scored where KL is in the loss, a few where it is only watched.
        """
        objective = self.config.objective(learner)
        in_loss = objective.kl_coefficient > 0
        if not in_loss and not (objective.measure_kl and iteration > self.config.agents[learner].joins):
            return None
        config = self._score_slice(learner, (learner,), iteration).model_copy(
            update={"is_reference": True, "most": None if in_loss else KL_RESPONSES}
        )
        inputs = {"agent": origin, "prompts": prompts, f"rollouts/{learner}": rollouts}
        return StageCall("score", config, inputs, None, learner, iteration, "reference")

    def update(
        self,
        learner: str,
        version: Handle,
        scores: Mapping[str, Handle],
        credit: Handle,
        iteration: int,
        reference: Handle | None = None,
        samplers: Sequence[str] = (),
        past: Sequence[Mapping[str, Handle]] = (),
    ) -> StageCall:
        """The learner's next version; ``samplers`` where some of them claim no log-probs.

        ``past``: credit and scores of the iterations whose successes are replayed, the newest first.
        """
        divergence = self.config.divergence
        skips = divergence.on_verifier_failure == "skip"
        config = UpdateSlice(
            learner=learner,
            samplers=tuple(samplers or scores),
            iteration=iteration,
            minibatch_prompts=self.config.minibatch_size(learner),
            algorithm=self.config.objective(learner),
            update=self.config.training(learner).at(iteration),
            on_nonfinite=divergence.on_nonfinite,
            max_error_share=self.config.verify.max_error_share if skips else None,
        )
        inputs = {"agent": version, "credit": credit, **{f"scores/{a}": handle for a, handle in scores.items()}}
        if reference is not None:
            inputs["reference"] = reference
        for back, before in enumerate(past, start=1):
            inputs |= {f"{REPLAY}{back}/{name}": handle for name, handle in before.items()}
        return StageCall("update", config, inputs, self._seed("update", learner), learner, iteration)

    def evaluate(
        self, agent: str, version: Handle, benchmark: BenchmarkConfig, iteration: int, origins: Mapping[str, Handle]
    ) -> StageCall:
        """A version's results on a benchmark, after ``iteration`` iterations."""
        verify = resolve_verifier(self.config.verify, benchmark.problems, benchmark=True)
        config = EvaluateSlice(
            benchmark=benchmark,
            content_digest=self._benchmark_digest(benchmark),
            generate=self.config.generation(agent),
            verify=verify,
            verifier_source=verifier_source(verify.verifier),
            judges=self._judges(verify),
            chat_template=self.config.agents[agent].template_override,
            template_options=self.config.agents[agent].template_options,
        )
        inputs = {"agent": version, **{f"{ROLE}{name}": origins[name] for name in self._judges(verify)}}
        return StageCall("evaluate", config, inputs, self._seed("evaluate"), agent, iteration, benchmark.name)

    def _judges(self, verify: VerifyConfig) -> dict[str, JudgeSlice]:
        """How the agents answer that judge."""
        names = [judge.agent for judge in verify.judges if judge.agent is not None]
        return {
            name: JudgeSlice(
                generate=self.config.generation(name),
                chat_template=self.config.agents[name].template_override,
                template_options=self.config.agents[name].template_options,
            )
            for name in names
        }

    def _limits(self, learner: str, samplers: Iterable[str]) -> dict[str, float]:
        """How much the samplers of other parties may weigh, those that have a limit."""
        limits = {}
        for sampler in samplers:
            party = self.config.party_of(sampler)
            if party != self.config.party_of(learner) and (limit := self.config.parties[party].weight_limit):
                limits[sampler] = limit
        return limits

    def sources(self) -> dict[str, Any]:
        """Digests of what the config names but does not contain: data, checkpoints, a verifier of the user's own."""
        return {
            "problems": self._problems_digest,
            "benchmarks": {b.name: self._benchmark_digest(b) for b in self.config.evaluate.benchmarks},
            "checkpoints": {
                a: source_digest(s.checkpoint)
                for a, s in self.config.agents.items()
                if s.checkpoint and self.config.has_weights_of(a)
            },
            "verifier": self._verifier_source,
            **({"rewards": self._reward_sources} if self._reward_sources else {}),
        }

    def _score_slice(self, learner: str, samplers: tuple[str, ...], iteration: int) -> ScoreSlice:
        boundary = self.config.boundary(learner, samplers)
        update = self.config.training(learner).at(iteration)
        return ScoreSlice(
            learner=learner,
            samplers=samplers,
            iteration=iteration,
            score=self.config.scoring(learner),
            max_tokens=self.config.generation(learner).max_tokens,
            mismatch_warning=self.config.generation(learner).mismatch_warning,
            chat_template=self.config.agents[learner].template_override,
            template_options=self.config.agents[learner].template_options,
            boundary=boundary,
            stop_strings=self.config.generation(learner).stop_strings if boundary == "settled" else (),
            head_precision=update.head_precision,
            ranks=update.ranks,
            offload=update.offload == "optimizer",
        )

    def _benchmark_digest(self, benchmark: BenchmarkConfig) -> str:
        if benchmark.name not in self._benchmark_digests:
            self._benchmark_digests[benchmark.name] = load_problems(benchmark.problems).content_digest
        return self._benchmark_digests[benchmark.name]

    def _seed(self, *purpose: str | int) -> int:
        return derive_seed(self.config.seed, *purpose)


def _options(by_agent: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the template options of the agents that have any."""
    return {agent: options for agent, options in by_agent.items() if options}
