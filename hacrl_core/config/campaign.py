"""A campaign: which agents learn what together, how, and for how long."""

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from hacrl_core.config.agents import AgentConfig, AlgorithmSettings
from hacrl_core.config.algorithm import CampaignOverrides, HacpoConfig, campaign_overrides, preset
from hacrl_core.config.base import IdentityUnlessDefault, StrictConfig
from hacrl_core.config.evaluation import EvaluateConfig
from hacrl_core.config.exchange import ExchangeConfig, OwnPartyConfig, PartyConfig, WithholdConfig, overlap
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.loading import explain, merge
from hacrl_core.config.operation import (
    DivergenceConfig,
    KeepConfig,
    Name,
    NotifyConfig,
    RuntimeConfig,
    ScheduleConfig,
    StoreConfig,
    TrackingConfig,
)
from hacrl_core.config.problems import ArithmeticConfig, ArithmeticProblems, ProblemsConfig, TaskProblems, is_task
from hacrl_core.config.training import ScoreConfig, UpdateConfig
from hacrl_core.config.verification import TASK, VerifyConfig
from hacrl_core.errors import ConfigError

Part = TypeVar("Part", bound=StrictConfig)


class CampaignConfig(StrictConfig):
    """Everything that a campaign's YAML file says."""

    name: Name = Field(
        description="Names the campaign in status, MLflow and Prefect; the same name and settings resume it."
    )
    seed: int = Field(0, ge=0, description="Every random number of the campaign follows from it.")
    iterations: PositiveInt = Field(description="How often all agents answer, are verified and learn.")
    agents: dict[Name, AgentConfig] = Field(
        min_length=1, description="The agents by name; any number, one is plain GSPO."
    )
    problems: ProblemsConfig = Field(description="What they learn: the built-in arithmetic, a dataset, or a preset.")
    prompts_per_iteration: PositiveInt = Field(description="Prompts that every agent answers in one iteration.")
    samples_per_prompt: PositiveInt = Field(description="Answers of each agent to each prompt (the paper's G).")
    resample: Annotated[NonNegativeInt, IdentityUnlessDefault] = Field(
        0,
        description="How often an agent answers a prompt again while its own answers to it all have one reward; the "
        "newest answers count, all of them cost.",
    )
    generate: GenerateConfig
    verify: VerifyConfig = VerifyConfig()
    algorithm: AlgorithmSettings = Field(
        default_factory=lambda: {"preset": "hacpo"},
        description="A preset (hacpo, gspo, gspo_x2, grpo, naive, …) and single settings over it.",
    )
    score: ScoreConfig = ScoreConfig()
    update: UpdateConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    divergence: DivergenceConfig = DivergenceConfig()
    keep: KeepConfig | None = Field(
        None, description="Which versions keep their files, e.g. {last: 2, best: true, every: 10}; empty: all of them."
    )
    store: StoreConfig | None = Field(
        None, description="A bucket that other machines share, e.g. {bucket: s3://team/hacrl}; empty: HACRL_BUCKET."
    )
    parties: Annotated[dict[Name, PartyConfig], IdentityUnlessDefault] = Field(
        default_factory=dict,
        description="Owners of agents that share answers and never weights; empty: one owner has all agents.",
    )
    exchange: Annotated[ExchangeConfig, IdentityUnlessDefault] = ExchangeConfig()
    party: Annotated[OwnPartyConfig | None, IdentityUnlessDefault] = Field(
        None, description="Which party this process is, e.g. {name: north, key: north.key}; empty: it runs all agents."
    )
    notify: NotifyConfig | None = Field(
        None, description="Who is told when the campaign fails, collapses, has a new best version or is complete."
    )
    runtime: RuntimeConfig = RuntimeConfig()
    tracking: TrackingConfig = TrackingConfig()
    schedule: tuple[ScheduleConfig, ...] = Field(
        (), description="When hacrl deploy runs it by itself: one schedule or a list of them. Changes no result."
    )

    @model_validator(mode="before")
    @classmethod
    def _a_task_brings_its_verifier(cls, raw: Any) -> Any:
        """``problems: my_task.py`` alone means the task's own ``verify`` too."""
        if not isinstance(raw, dict) or not is_task(raw.get("problems")):
            return raw
        verify = raw.get("verify", {})
        if not isinstance(verify, dict) or "verifier" in verify or verify.get("rewards"):
            return raw
        return {**raw, "verify": {"verifier": TASK, **verify}}

    @model_serializer(mode="wrap")
    def _as_before_resampling(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave ``resample`` out where it is 0: campaigns without it are written down, and digested, as they were."""
        dumped: dict[str, Any] = dump(self)
        if not self.resample:
            dumped.pop("resample", None)
        return dumped

    @field_validator("schedule", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, dict | ScheduleConfig) else value

    @model_validator(mode="before")
    @classmethod
    def _small_iterations_are_one_minibatch(cls, raw: Any) -> Any:
        """Lower the default of update.minibatch_prompts where an iteration has fewer prompts than that."""
        if not isinstance(raw, dict) or not isinstance(raw.get("update"), dict):
            return raw
        prompts = raw.get("prompts_per_iteration")
        default = UpdateConfig.model_fields["minibatch_prompts"].default
        if "minibatch_prompts" in raw["update"] or not isinstance(prompts, int) or not 0 < prompts < default:
            return raw
        preset = raw["algorithm"].get("preset") if isinstance(raw.get("algorithm"), dict) else None
        # These two presets have a factor on it, and say themselves where it is too large.
        if preset in ("gspo_x2", "gspo_xn"):
            return raw
        return {**raw, "update": {**raw["update"], "minibatch_prompts": prompts}}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for agent in self.agents:
            if self.group_size * (len(self.agents) if self.objective(agent).share_rollouts else 1) == 1:
                raise ValueError(
                    f"samples_per_prompt 1: agent {agent} has no other response to compare its one response with, so "
                    "nothing teaches it; set samples_per_prompt to 2 or more"
                )
        if self.resample and self.group_size == 1:
            raise ValueError(
                f"resample {self.resample}: with samples_per_prompt 1 an agent has no two answers to compare, so all "
                "prompts would be answered again; set samples_per_prompt to 2 or more, or resample to 0"
            )
        alone = next((i for i in range(self.iterations) if not self.present(i)), None)
        if alone is not None:
            raise ValueError(
                f"agents: no agent takes part in iteration {alone + 1}; let one join earlier or leave later"
            )
        for settings in self.agents.values():
            if settings.warmstart is None:
                continue
            if self.corpus is None:
                raise ValueError(
                    "agents with warmstart learn their first steps from arithmetic or from a task's solutions; set "
                    "problems.kind to arithmetic or task"
                )
            if isinstance(self.corpus, ArithmeticConfig):
                settings.warmstart.check_arithmetic()
        for name, settings in self.agents.items():
            own_preset = str(settings.algorithm.get("preset", "hacpo"))
            if campaign_overrides(own_preset, len(self.agents)) != CampaignOverrides():
                raise ValueError(
                    f"agents.{name}.algorithm.preset {own_preset} changes the whole campaign; set it under algorithm"
                )
        for judge in self.verify.judges:
            if judge.agent is not None and judge.agent not in self.agents:
                raise ValueError(f"judge.agent {judge.agent}: the campaign's agents are {', '.join(self.agents)}")
        self._check_parties()
        for agent in self.agents:
            self._check_training(agent)
        for benchmark in self.evaluate.benchmarks:
            if isinstance(benchmark.problems, ArithmeticProblems) and benchmark.problems.size is None:
                raise ValueError(
                    f"benchmark {benchmark.name}: arithmetic without a size is endless; give problems.size"
                )
        if self.keep is not None and self.keep.best and not self.evaluate.benchmarks:
            raise ValueError(
                "keep.best: the campaign has no benchmark to be best on; add one under evaluate.benchmarks"
            )
        return self

    def _check_parties(self) -> None:
        if not self.parties:
            if self.party is not None:
                raise ValueError(f"party.name {self.party.name}: the campaign has no parties; list them under parties")
            return
        owned = [agent for party in self.parties.values() for agent in party.agents]
        if sorted(owned) != sorted(self.agents):
            odd = ", ".join(sorted(a for a in {*owned, *self.agents} if owned.count(a) != 1 or a not in self.agents))
            raise ValueError(f"parties: {odd}: every agent of the campaign belongs to exactly one party")
        holders: dict[str, str] = {}
        for name, party in self.parties.items():
            if (other := holders.setdefault(party.public_key, name)) != name:
                raise ValueError(
                    f"parties.{name}.public_key {party.public_key}: it is also that of {other}, so each could speak "
                    "for the other; every party makes a key of its own with hacrl exchange keygen"
                )
            if party.withhold is not None and isinstance(self.problems, ArithmeticProblems | TaskProblems):
                raise ValueError(
                    f"parties.{name}.withhold: problems.kind {self.problems.kind} makes problems by code that all "
                    "parties have, so none of them is a secret; give the problems as a dataset or leave withhold out"
                )
        if any(judge.agent is not None for judge in self.verify.judges):
            raise ValueError("verify: an agent that judges cannot be asked by other parties; use another verifier")
        if self.resample:
            raise ValueError(f"resample {self.resample}: parties answer each prompt of a round once; set it to 0")
        replays = next((a for a in self.agents if self.objective(a).replay_iterations), None)
        if replays is not None:
            raise ValueError(
                f"algorithm.replay_iterations ({replays}): parties share a round's answers for that round alone; set "
                "it to 0"
            )
        if self.party is not None:
            self._check_own_party(self.party)

    def _check_own_party(self, party: OwnPartyConfig) -> None:
        if party.name not in self.parties:
            raise ValueError(f"party.name {party.name}: the parties are {', '.join(self.parties)}")
        known = self.parties[party.name].agents
        if party.agents and set(party.agents) != set(known):
            raise ValueError(
                f"party.agents {', '.join(party.agents)}: parties.{party.name} has {', '.join(known)}; make them equal "
                "or leave party.agents out"
            )
        if self.exchange.bucket is None:
            raise ValueError("party: exchange.bucket is missing; give the bucket in which the parties meet")
        if self.store is not None and overlap(self.store.bucket, self.exchange.bucket.bucket):
            raise ValueError(
                f"exchange.bucket {self.exchange.bucket.bucket} is the bucket of the store, {self.store.bucket}, which "
                "holds weights, or one lies inside the other; give the exchange a bucket or folder of its own"
            )

    @property
    def withheld(self) -> tuple[WithholdConfig, ...]:
        """What parties keep out of every round. All parties leave out what any of them withholds."""
        return tuple(party.withhold for party in self.parties.values() if party.withhold is not None)

    def party_of(self, agent: str) -> str:
        """Return the party that has an agent's weights; all agents of a campaign without parties have one owner."""
        return next((name for name, party in self.parties.items() if agent in party.agents), "")

    def has_weights_of(self, agent: str) -> bool:
        """Whether this process has an agent's weights: always, except for agents of other parties."""
        return self.party is None or self.party_of(agent) == self.party.name

    def _check_training(self, agent: str) -> None:
        generate = self.generation(agent)
        score = self.scoring(agent)
        update = self.training(agent)
        if self.minibatch_size(agent) > self.prompts_per_iteration:
            raise ValueError(
                f"update.minibatch_prompts {self.minibatch_size(agent)} exceeds prompts_per_iteration "
                f"{self.prompts_per_iteration}; lower it"
            )
        if generate.temperature != score.temperature:
            raise ValueError(
                f"generate.temperature {generate.temperature:g} differs from score.temperature {score.temperature:g}: "
                "the policy that learns would not be the one that sampled; set generate, score and update to one "
                "temperature"
            )
        whole = generate.temperature == 1 or (generate.top_p == 1 and generate.top_k == 0)
        exact = generate.engine.kind == "builtin" and generate.engine.dtype == "float32" and score.autocast == "none"
        if score.own == "sampled" and not (exact and whole):
            raise ValueError(
                "score.own sampled: only the built-in engine in float32 samples with the trainer's own numbers, and "
                "only an uncut "
                "distribution (temperature 1, or top_p 1 and top_k 0) is the policy; set score.own to scored"
            )
        gpus = self.agents[agent].gpus
        if gpus and self.agents[agent].device != "cpu" and update.ranks > len(gpus):
            raise ValueError(
                f"update.ranks {update.ranks} is more than the {len(gpus)} gpus of {agent}; give it one GPU per rank"
            )
        if generate.engine.kind == "builtin" and generate.engine.replicas > 1 and self.runtime.executor != "ray":
            raise ValueError(
                f"engine.replicas {generate.engine.replicas}: copies of the built-in engine run on a Ray cluster only; "
                "set runtime.executor: ray, or replicas: 1"
            )
        if update.ranks > 1 and ":" in self.agents[agent].device:
            raise ValueError(
                f"agents.{agent}.device {self.agents[agent].device} names one GPU, and update.ranks {update.ranks} "
                "need one each; set device: cuda and list them under gpus"
            )
        for name in ("temperature", "autocast"):
            scored, updated = getattr(score, name), getattr(update, name)
            if scored != updated:
                raise ValueError(
                    f"score.{name} {scored} differs from update.{name} {updated}: ratios would compare two policies; "
                    "make them equal"
                )

    def present(self, iteration: int) -> list[str]:
        """Return the agents that take part in an iteration."""
        return [name for name, agent in self.agents.items() if agent.takes_part(iteration)]

    def objective(self, learner: str) -> HacpoConfig:
        """Return the learner's algorithm: the preset, then the campaign's settings, then its own."""
        settings = {**self.algorithm, **self.agents[learner].algorithm}
        chosen = str(settings.pop("preset", "hacpo"))
        try:
            return preset(chosen, **settings)
        except ConfigError as problem:
            raise ValueError(f"algorithm.preset: {problem}") from None
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(["algorithm", *map(str, first["loc"])])
            raise ValueError(explain(first, HacpoConfig, f"{where} ({learner})")) from None

    @property
    def preset(self) -> str:
        """The name of the campaign's method."""
        return str(self.algorithm.get("preset", "hacpo"))

    @property
    def _overrides(self) -> CampaignOverrides:
        return campaign_overrides(self.preset, len(self.agents))

    @property
    def group_size(self) -> int:
        """Responses of each agent to each prompt, the preset's factor applied."""
        return round(self.samples_per_prompt * self._overrides.samples_per_prompt)

    @property
    def attempts(self) -> tuple[str, ...]:
        """The variants of an agent's generate and verify calls in one iteration; the last one counts and has none."""
        return (*(f"attempt-{number}" for number in range(1, self.resample + 1)), "")

    def minibatch_size(self, learner: str) -> int:
        """Return the prompts per optimizer step of this learner, the preset's factor applied."""
        own = self.training(learner).minibatch_prompts
        return max(1, round(own * self._overrides.minibatch_prompts))

    def generation(self, agent: str) -> GenerateConfig:
        """Return how this agent samples: the campaign's settings, then its own."""
        own = self.agents[agent].generate
        base = self.generate.model_dump(mode="json")
        kind = own["engine"].get("kind") if isinstance(own.get("engine"), dict) else None
        if kind is not None and kind != self.generate.engine.kind:
            base.pop("engine")
        return self._own(agent, "generate", base, GenerateConfig)

    def scoring(self, agent: str) -> ScoreConfig:
        """Return how this agent scores: the campaign's settings, then its own."""
        return self._own(agent, "score", self.score.model_dump(mode="json"), ScoreConfig)

    def boundary(self, learner: str, samplers: Collection[str]) -> Literal["as_written", "settled"]:
        """Return how the learner reads other agents' responses at their beginning and end.

        Warm starts without stop strings begin and end alike; left as they are, they keep the keys of earlier campaigns.
        """
        asked = self.scoring(learner).boundary
        if set(samplers) == {learner}:
            return "as_written"
        if asked != "auto":
            return asked
        differ = any(self.agents[a].checkpoint is not None or self.generation(a).stop_strings for a in samplers)
        return "settled" if differ else "as_written"

    def training(self, agent: str) -> UpdateConfig:
        """Return how this agent is updated: the campaign's settings, then its own."""
        return self._own(agent, "update", self.update.model_dump(mode="json"), UpdateConfig)

    def _own(self, agent: str, section: str, base: dict[str, Any], kind: type[Part]) -> Part:
        own = getattr(self.agents[agent], section)
        try:
            return kind.model_validate(merge(base, own))
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(["agents", agent, section, *map(str, first["loc"])])
            raise ValueError(explain(first, kind, where)) from None

    @property
    def corpus(self) -> ArithmeticConfig | TaskProblems | None:
        """What warm starts are taught: the arithmetic of the campaign's own problems, or its task's solutions."""
        if isinstance(self.problems, TaskProblems):
            return self.problems
        if not isinstance(self.problems, ArithmeticConfig):
            return None
        return ArithmeticConfig(kinds=self.problems.kinds, levels=self.problems.levels)
