"""``hacrl eval``: any agent on any benchmark, in this process, through the same stages and the same store as a campaign.

The agent is a version that a campaign made, or a checkpoint from elsewhere, which the adopt stage takes in first. A result that is in the store
is shown, not computed; also one that the campaign itself computed.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from flows.home import Home
from flows.record.record import Entry, read_campaign, read_entries
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.artifacts.sources import source_digest
from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.config.arithmetic import ArithmeticConfig
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.loading import read_yaml, validate
from hacrl_core.config.problems import ArithmeticProblems, PresetName
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.errors import ArtifactError, ConfigError, InputGoneError
from hacrl_core.problems import load_problems
from hacrl_core.seeding import derive_seed
from hacrl_core.verification.verifiers import verifier_source
from stages.runner import Outcome, lookup, run_stage
from stages.spec import Context, StageCall

ORIGINS = ("warmstart", "adopt")
ARITHMETIC_PROBLEMS = 1000
ARITHMETIC_TOKENS = 256  # more than its worked answers need; a campaign's own limit goes before


@dataclass(frozen=True)
class Changes:
    """What the command line changes in a benchmark, or in how it is run; None leaves it as it is."""

    samples: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    limit: int | None = None
    engine: str | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class Subject:
    """Who is evaluated, and the settings that come with it."""

    name: str
    version: ArtifactRef | StageCall  # of the store, or the adoption that brings it there
    generate: GenerateConfig = field(default_factory=lambda: GenerateConfig(max_tokens=ARITHMETIC_TOKENS))
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    chat_template: str | None = None
    seed: int = 0
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    benchmarks: tuple[BenchmarkConfig, ...] = ()  # of the agent's campaign


@dataclass(frozen=True)
class Evaluation:
    """One benchmark's result."""

    benchmark: BenchmarkConfig
    outcome: Outcome

    @property
    def table(self) -> Path:
        return self.outcome.ref.path / "evaluation.parquet"


def evaluate_agent(
    agent: str, benchmarks: Sequence[str], changes: Changes, home: Home, console: Console
) -> tuple[str, list[Evaluation]]:
    """The agent's full name and its results, one for each benchmark; everything is checked before anything runs."""
    store = Store(home.store, on_problem=lambda message: console.print(Text(f"! {message}", style="yellow")))
    subject = find_agent(store, home, agent)
    chosen = [change(found, changes) for found in find_benchmarks(subject, benchmarks)]
    generate = _generate(subject.generate, changes)
    digests = [_digest(benchmark) for benchmark in chosen]
    with _runner(store, console) as run:
        version = (
            subject.version if isinstance(subject.version, ArtifactRef) else run(subject.version, subject.name).ref
        )
        _note(home, subject.name, version)
        results = []
        for benchmark, digest in zip(chosen, digests, strict=True):
            slice_ = {
                "benchmark": benchmark.model_dump(mode="json"),
                "content_digest": digest,
                "generate": generate.model_dump(mode="json"),
                "verify": subject.verify.model_dump(mode="json"),
                "verifier_source": verifier_source(subject.verify.verifier),
                "chat_template": subject.chat_template,
            }
            seed = derive_seed(subject.seed, "evaluate")
            call = StageCall("evaluate", slice_, {"agent": version}, seed, subject.name, None, benchmark.name)
            try:
                outcome = run(call, benchmark.name)
            except InputGoneError:
                if isinstance(subject.version, ArtifactRef):
                    raise
                run(replace(subject.version, restore=True), subject.name)  # taken in before, and cleaned away since
                outcome = run(call, benchmark.name)
            _note(home, subject.name, outcome.ref)
            results.append(Evaluation(benchmark, outcome))
    return subject.name, results


def evaluations_log(home: Home) -> Path:
    """Which artifacts ``hacrl eval`` made: no campaign records them, and clean-up must not take them for garbage."""
    return home.root / "evaluations.jsonl"


def _note(home: Home, agent: str, ref: ArtifactRef) -> None:
    if ref.stage == "update" or ref.stage == "warmstart":
        return  # a campaign's own
    with evaluations_log(home).open("a") as log:
        log.write(json.dumps({"agent": agent, "stage": ref.stage, "key": ref.key, "at": time.time()}) + "\n")


# -- who -----------------------------------------------------------------------------------------------------------------


def find_agent(store: Store, home: Home, name: str) -> Subject:
    """A folder, ``campaign/agent`` with ``@iterations``, ``@best`` or ``@latest``, or a hub id with ``@revision``; in this order."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _checkpoint(name, CheckpointConfig(path=str(path.parent), gguf_file=path.name))
    if (path / "config.json").is_file():
        return _checkpoint(name, CheckpointConfig(path=str(path)))
    base, _, version = name.partition("@")
    campaign, slash, agent = base.partition("/")
    if campaign and slash and (home.campaign(campaign) / "config.json").is_file():
        return _trained(store, home, campaign, agent, version)
    if base.count("/") != 1 or not campaign or not agent or path.is_dir():
        known = ", ".join(sorted(p.parent.name for p in home.campaigns.glob("*/config.json"))) or "none yet"
        raise ConfigError(
            f"agent {name}: neither a folder with a checkpoint (config.json), nor campaign/agent (campaigns here: {known}), nor a hub id such as org/model"
        )
    return _checkpoint(name, CheckpointConfig(path=base, revision=version or None))


def _checkpoint(name: str, checkpoint: CheckpointConfig) -> Subject:
    slice_ = {"checkpoint": checkpoint.model_dump(mode="json"), "source_digest": source_digest(checkpoint)}
    return Subject(name, StageCall("adopt", slice_, agent=name))


def _trained(store: Store, home: Home, campaign: str, agent: str, wanted: str) -> Subject:
    folder = home.campaign(campaign)
    config = read_campaign(folder)
    if agent not in config.agents:
        raise ConfigError(f"agent {agent}: not in campaign {campaign}; its agents are {', '.join(config.agents)}")
    versions = versions_of(store, read_entries(folder), agent, config)
    if not versions:
        raise ConfigError(f"agent {campaign}/{agent}: has no version yet; start its campaign with hacrl run")
    iterations = _version(store, config, folder, agent, wanted, len(versions))
    if store.is_collected(versions[iterations].stage, versions[iterations].key):
        there = [str(n) for n, v in enumerate(versions) if not store.is_collected(v.stage, v.key)]
        raise ConfigError(
            f"agent {campaign}/{agent}@{iterations}: its files were collected by a keep policy; versions with files: {', '.join(there)}"
        )
    corpus = config.problems if isinstance(config.problems, ArithmeticConfig) else ArithmeticConfig()
    return Subject(
        f"{campaign}/{agent}@{iterations}",
        _whole(store, versions[iterations], f"{campaign}/{agent}@{iterations}"),
        config.generation(agent),
        config.verify,
        config.agents[agent].template_override,
        config.seed,
        corpus,
        config.evaluate.benchmarks,
    )


def _version(store: Store, config: CampaignConfig, folder: Path, agent: str, wanted: str, known: int) -> int:
    """Which of the agent's versions: the latest, the best on the campaign's benchmarks, or that after so many iterations."""
    if wanted in ("", "latest"):
        return known - 1
    if wanted == "best":
        from flows.record.history import History

        best = History(config, store, read_entries(folder)).best(agent)
        if best is None:
            raise ConfigError(
                f"agent {config.name}/{agent}@best: none of its versions was evaluated; take @latest, or give the campaign a benchmark"
            )
        return best
    if not (wanted.isdecimal() and int(wanted) < known):
        raise ConfigError(
            f"agent {config.name}/{agent}@{wanted}: no such version; give latest, best, or the iterations it has behind it, 0 to {known - 1}"
        )
    return int(wanted)


def versions_of(store: Store, entries: Sequence[Entry], agent: str, config: CampaignConfig) -> list[Entry]:
    """The agent's versions in order, the first one before any iteration.

    A campaign that was changed and not yet run to its end has records of the old settings behind the new ones; a version that was not
    made from the one before it ends the list.
    """
    own = [entry for entry in entries if entry.agent == agent]
    versions = [entry for entry in own if entry.stage in ORIGINS][-1:]
    updates = {entry.iteration: entry for entry in own if entry.stage == "update"}
    settings = config.agents[agent]
    for iteration in range(settings.joins, min(settings.leaves or config.iterations, config.iterations)):
        update = updates.get(iteration)
        if not versions or update is None or not _follows(store, versions[-1], update):
            break
        versions.append(update)
    return versions


def _follows(store: Store, before: Entry, update: Entry) -> bool:
    try:
        digest = store.manifest(before.stage, before.key).content_digest
        return store.manifest(update.stage, update.key).identity.inputs["agent"] == digest
    except ArtifactError:
        return True  # one of them was cleaned away: nothing speaks against it


def _whole(store: Store, entry: Entry, name: str) -> ArtifactRef:
    try:
        found = store.lookup(store.manifest(entry.stage, entry.key).identity)
    except ArtifactError:
        found = None
    if found is None:
        raise ConfigError(f"agent {name}: its files are gone or damaged; run its campaign again to restore them")
    return found


# -- on what -------------------------------------------------------------------------------------------------------------


def find_benchmarks(subject: Subject, names: Sequence[str]) -> list[BenchmarkConfig]:
    if not names and not subject.benchmarks:
        raise ConfigError(f"agent {subject.name}: say on what with --benchmark: {_choices(subject)}")
    return [_find_benchmark(subject, name) for name in names] if names else list(subject.benchmarks)


def _find_benchmark(subject: Subject, name: str) -> BenchmarkConfig:
    for own in subject.benchmarks:
        if own.name == name:
            return own
    if name in get_args(PresetName):
        return BenchmarkConfig.model_validate(name)
    if name == "arithmetic":
        task = subject.arithmetic
        problems = ArithmeticProblems(kinds=task.kinds, levels=task.levels, split="held_out", size=ARITHMETIC_PROBLEMS)
        return BenchmarkConfig(name=name, problems=problems, max_tokens=subject.generate.max_tokens)
    if Path(name).suffix in (".yaml", ".yml"):
        return validate({"name": Path(name).stem, **read_yaml(Path(name))}, BenchmarkConfig, name)
    raise ConfigError(f"--benchmark {name}: not known; choose from {_choices(subject)}")


def _choices(subject: Subject) -> str:
    own = [benchmark.name for benchmark in subject.benchmarks]
    return f"{', '.join([*own, *get_args(PresetName), 'arithmetic'])}, or a YAML file with a benchmark's settings"


def change(benchmark: BenchmarkConfig, changes: Changes) -> BenchmarkConfig:
    """The benchmark with the command line's values; its own checks run again."""
    given = {"samples": changes.samples, "temperature": changes.temperature, "max_tokens": changes.max_tokens}
    raw = benchmark.model_dump() | {name: value for name, value in given.items() if value is not None}
    if changes.samples is not None:
        raw["ks"] = [k for k in benchmark.ks if k <= changes.samples]
    if changes.limit is not None:
        problems = raw["problems"]
        place, key = (
            (problems, "size")
            if isinstance(benchmark.problems, ArithmeticProblems)
            else (problems["filters"], "max_problems")
        )
        place[key] = min(changes.limit, place[key] or changes.limit)
    return validate(raw, BenchmarkConfig, "hacrl eval")


def _digest(benchmark: BenchmarkConfig) -> str:
    found = load_problems(benchmark.problems)
    if not found.problems:
        raise ConfigError(f"benchmark {benchmark.name}: has no fixed problems; give its problems a size")
    return found.content_digest


def _generate(settings: GenerateConfig, changes: Changes) -> GenerateConfig:
    raw = settings.model_dump()
    if changes.batch_size is not None:
        raw["batch_size"] = changes.batch_size
    if changes.engine not in (None, "builtin", "vllm"):
        raise ConfigError(f"--engine {changes.engine}: not known; choose builtin or vllm")
    if changes.engine is not None and changes.engine != settings.engine.kind:
        raw["engine"] = {"kind": changes.engine}
    return validate(raw, GenerateConfig, "hacrl eval")


# -- running -------------------------------------------------------------------------------------------------------------


@contextmanager
def _runner(store: Store, console: Console) -> Iterator[Callable[[StageCall, str], Outcome]]:
    """Runs stage calls here, with a bar; what is in the store is returned before torch is imported."""
    context = Context(warn=lambda message: console.print(Text(f"! {message}", style="yellow")))
    used = False

    def run(call: StageCall, title: str) -> Outcome:
        nonlocal used
        if found := lookup(store, call):
            return found
        used = True
        _prepare_torch()
        doing = f"{'taking in' if call.stage == 'adopt' else 'evaluating on'} {title}"
        with _progress(console, doing) as progress:
            waiting = f"{call.label}: {{}} is computing the same artifact; waiting for it"
            return run_stage(
                store, call, replace(context, progress=progress), lambda holder: context.warn(waiting.format(holder))
            )

    try:
        yield run
    finally:
        if used:
            from hacrl_core.verification import close_pool

            context.warm.close()
            close_pool()


@contextmanager
def _progress(console: Console, doing: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar in a terminal; elsewhere a line for each quarter."""
    if not console.is_terminal:
        told: set[int] = set()

        def say(done: int, total: int, note: str) -> None:
            quarter = 4 * done // max(total, 1)
            if quarter not in told:
                told.add(quarter)
                console.print(f"{doing}: {done}/{total} responses, {note}", highlight=False)

        console.print(doing, highlight=False)
        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        bar = bars.add_task(doing, total=None, note="")
        yield lambda done, total, note: bars.update(bar, completed=done, total=total, note=note)


def _prepare_torch() -> None:
    """Nothing else computes here, so torch gets every core, unless the user says how many."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars; ours says what goes on
    import torch
    import transformers

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
