"""The stage graph of a campaign: the calls that ``flows.campaign`` really makes, recorded instead of run.

`record_graph` drives `run_campaign` with a runner that answers every call at once. A handle whose outcome the campaign
waits for becomes a predecessor of everything that is submitted later, so a barrier in the campaign is one in the plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flows.campaign import run_campaign
from flows.plan.rates import Workload
from flows.run.placement import Role, gpus_of, role_of, seats_of, turns_of
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.agents import AgentConfig
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.config.problems import ArithmeticProblems, PresetProblems, TaskProblems
from hacrl_core.config.warmstart import WarmstartConfig
from hacrl_core.learning.shape import KNOWN, Shape, dense
from stages.spec import Outcome, StageCall

# Problems of the presets, as their publishers count them: so that nothing is downloaded for a plan.
PROBLEMS = {
    "math500": 500,
    "gsm8k_test": 1319,
    "aime2025": 30,
    "amc2023": 40,
    "minerva_math": 272,
    "olympiadbench": 674,
    "math_test": 5000,
}
UNKNOWN_PROBLEMS = 500


@dataclass(frozen=True)
class Task:
    """One call of the graph: what it waits for, and whose process runs it ('' for the campaign's own)."""

    call: StageCall
    needs: tuple[int, ...]
    worker: str


@dataclass
class Recorder:
    """A runner that runs nothing: it writes down the calls and what each of them waits for."""

    workers: Mapping[tuple[str, Role], str]  # agent and role → the process that runs it, or the turn that it shares
    tasks: list[Task] = field(default_factory=list)
    _waited: set[int] = field(default_factory=set)

    def submit(self, call: StageCall) -> "Recorded":
        """Add a call; what the campaign has waited for so far comes before it."""
        needs = {item.number for item in call.inputs.values() if isinstance(item, Recorded)} | self._waited
        role = role_of(call.stage)
        worker = "" if role == "here" else self.workers[call.agent, role]
        self.tasks.append(Task(call, tuple(sorted(needs)), worker))
        return Recorded(call, len(self.tasks) - 1, self)

    def iteration_done(self, iteration: int) -> None:
        """Nobody has to be told."""

    def wait_for(self, number: int) -> None:
        """The campaign itself waits for a call."""
        self._waited.add(number)


@dataclass(frozen=True)
class Recorded:
    """The handle of a recorded call."""

    call: StageCall
    number: int
    recorder: Recorder

    def outcome(self) -> Outcome:
        """Return an empty outcome, and remember that the campaign waited for it."""
        self.recorder.wait_for(self.number)
        return Outcome(ArtifactRef(self.call.stage, self.call.label, "", Path()), False, 0.0, {})

    def done(self) -> bool:
        """Never: the campaign goes on to the next iteration before this call ends."""
        return False


class PlannedCalls(StageCalls):
    """The campaign's stage calls, without reading what its config names: neither datasets nor checkpoints."""

    def __init__(self, config: CampaignConfig) -> None:
        super().__init__(config, problems_digest="")

    def origin(self, agent: str) -> StageCall:
        """The agent's first version; a checkpoint is not looked at."""
        settings = self.config.agents[agent]
        if settings.checkpoint is None:
            return super().origin(agent)
        from stages.adopt import AdoptSlice

        slice_ = AdoptSlice(checkpoint=settings.checkpoint, source_digest="", chat_template=settings.chat_template)
        return StageCall("adopt", slice_, agent=agent)

    def _benchmark_digest(self, benchmark: BenchmarkConfig) -> str:
        return ""


def record_graph(config: CampaignConfig, iterations: int | None = None) -> list[Task]:
    """Return the calls of a campaign in the order of their submission, of its first ``iterations`` if given."""
    if iterations is not None and iterations < config.iterations:
        config = config.model_copy(update={"iterations": iterations})
    recorder = Recorder(workers_of(config))
    run_campaign(config, PlannedCalls(config), recorder)
    return recorder.tasks


def workers_of(config: CampaignConfig) -> dict[tuple[str, Role], str]:
    """Return the process that serves each role of each agent; those whose GPUs overlap have one name between them."""
    turns = turns_of(config)
    first: dict[int, str] = {}
    return {
        which: first.setdefault(id(turns[seat.name]), seat.name) if seat.name in turns else seat.name
        for which, seat in seats_of(config).items()
    }


def workload_of(config: CampaignConfig, device: str, gpus: int) -> Workload:
    """Return what decides the seconds of a campaign's stages on ``gpus`` devices of a kind (0: on the CPU)."""
    engines = {agent: config.generation(agent).engine for agent in config.agents}
    used = {a: len(gpus_of(settings, engines[a], gpus)) if gpus else 0 for a, settings in config.agents.items()}
    return Workload(
        device=device,
        prompts=config.prompts_per_iteration,
        samples=config.group_size,
        shapes={agent: agent_shape(settings) for agent, settings in config.agents.items()},
        gpus=used,
        problems={b.name: problem_count(b) for b in config.evaluate.benchmarks},
        limits={agent: config.generation(agent).max_tokens for agent in config.agents},
    )


def problem_count(benchmark: BenchmarkConfig) -> int:
    """Return how many problems a benchmark has: by its own setting, by its name, else a guess."""
    problems = benchmark.problems
    if isinstance(problems, ArithmeticProblems | TaskProblems):
        return problems.size or UNKNOWN_PROBLEMS
    name = problems.name if isinstance(problems, PresetProblems) else problems.source or benchmark.name
    return problems.filters.max_problems or PROBLEMS.get(name, UNKNOWN_PROBLEMS)


def agent_shape(settings: AgentConfig) -> Shape:
    """Return an agent's shape: of a warm start by its settings, of a known model by name, else by its config.json."""
    if settings.warmstart is not None:
        return warmstart_shape(settings.warmstart)
    checkpoint = settings.checkpoint
    assert checkpoint is not None, "the config requires a warm start or a checkpoint"
    if checkpoint.path in KNOWN:
        return KNOWN[checkpoint.path]
    from hacrl_core.agents.adoption import read_origin
    from hacrl_core.learning.shape import shape_of

    origin = read_origin(checkpoint, settings.chat_template)
    return shape_of(origin.config, trust_remote_code=checkpoint.trust_remote_code)


def warmstart_shape(settings: WarmstartConfig) -> Shape:
    """Return the shape of a model that will be trained from nothing."""
    model = settings.model
    return dense(
        hidden=model.hidden_size,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        mlp=model.intermediate_size,
        vocabulary=settings.tokenizer.vocab_size if settings.tokenizer.kind == "bpe" else 260,
        tied=model.tie_word_embeddings,
        context=model.max_position_embeddings,
        normed_heads=model.architecture == "qwen3",
    )
