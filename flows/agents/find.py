"""Find what ``hacrl eval`` and ``hacrl export`` name: an agent's version, the benchmarks, the settings that apply.

Nothing runs here. A wrong name ends in a ConfigError that says what would be right.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from flows.home import Home
from flows.record.history import History, read_history
from flows.record.record import Entry
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.artifacts.sources import source_digest
from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.loading import read_yaml, validate
from hacrl_core.config.problems import ArithmeticConfig, ArithmeticProblems, PresetName, TaskProblems
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.errors import ArtifactError, ConfigError
from hacrl_core.problems import load_problems
from hacrl_core.tasks.loading import is_task_name
from stages.adopt import AdoptSlice
from stages.spec import StageCall

ARITHMETIC_PROBLEMS = 1000
TASK_PROBLEMS = 200
# More than the worked answers need; a campaign's own limit takes precedence.
ARITHMETIC_TOKENS = 256


@dataclass(frozen=True)
class Changes:
    """What the command line changes in a benchmark, or in how it is run; None leaves it as it is."""

    samples: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    limit: int | None = None
    engine: str | None = None
    batch_size: int | None = None
    verifier: str | None = None


@dataclass(frozen=True)
class Subject:
    """The agent that is evaluated or exported, and the settings that come with it."""

    name: str
    # An artifact of the store, or the adoption that brings a checkpoint there.
    version: ArtifactRef | StageCall
    generate: GenerateConfig = field(default_factory=lambda: GenerateConfig(max_tokens=ARITHMETIC_TOKENS))
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    chat_template: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    # Whether its checkpoint may run Python code of its own.
    own_code: bool = False
    # Those of the agent's campaign.
    benchmarks: tuple[BenchmarkConfig, ...] = ()


# -- the agent --------------------------------------------------------------------------------------------------------


def find_agent(store: Store, home: Home, name: str) -> Subject:
    """Return the agent of that name; raise ConfigError where there is none.

    The name is tried as a checkpoint's folder or GGUF file, then as ``campaign/agent`` with an optional
    ``@iterations``, ``@best`` or ``@latest``, then as a hub id with an optional ``@revision``.
    """
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
        raise ConfigError(
            f"agent {name}: neither a folder with a checkpoint (config.json), nor campaign/agent "
            f"(campaigns here: {known_campaigns(home)}), nor a hub id such as org/model"
        )
    return _checkpoint(name, CheckpointConfig(path=base, revision=version or None))


def known_campaigns(home: Home) -> str:
    """Return the names of a home's campaigns for a message."""
    return ", ".join(sorted(path.parent.name for path in home.campaigns.glob("*/config.json"))) or "none yet"


def _checkpoint(name: str, checkpoint: CheckpointConfig) -> Subject:
    config = AdoptSlice(checkpoint=checkpoint, source_digest=source_digest(checkpoint))
    return Subject(name, StageCall("adopt", config, agent=name))


def _trained(store: Store, home: Home, campaign: str, agent: str, wanted: str) -> Subject:
    """Return a version of a campaign's agent; raise ConfigError where its files are not in the store."""
    history = read_history(store, home.campaign(campaign))
    config = history.config
    if agent not in config.agents:
        raise ConfigError(f"agent {agent}: not in campaign {campaign}; its agents are {', '.join(config.agents)}")
    number, version = _find_version(history, agent, wanted)
    name = f"{campaign}/{agent}@{number}"
    return Subject(
        name=name,
        version=_complete(store, version, name),
        generate=config.generation(agent),
        verify=config.verify,
        chat_template=config.agents[agent].template_override,
        template_options=config.agents[agent].template_options,
        seed=config.seed,
        arithmetic=config.problems if isinstance(config.problems, ArithmeticConfig) else ArithmeticConfig(),
        own_code=config.agents[agent].own_code,
        benchmarks=config.evaluate.benchmarks,
    )


def version_files(history: History, agent: str, wanted: str) -> Path:
    """Return the verified checkpoint folder of a campaign's agent: ``latest``, ``best`` or a number of iterations."""
    number, version = _find_version(history, agent, wanted)
    return _complete(history.store, version, f"{history.config.name}/{agent}@{number}").path


def _find_version(history: History, agent: str, wanted: str) -> tuple[int, Entry]:
    """Return a version's number and entry; raise ConfigError where there is none, or its files are not kept."""
    versions, name = history.versions[agent], f"{history.config.name}/{agent}"
    if not versions:
        raise ConfigError(f"agent {name}: has no version yet; start its campaign with hacrl run")
    number = _version_number(history, agent, wanted)
    version, store = versions[number], history.store
    if not store.fetch(version.stage, version.key) and store.is_collected(version.stage, version.key):
        available = [str(n) for n, v in enumerate(versions) if not store.is_collected(v.stage, v.key)]
        raise ConfigError(
            f"agent {name}@{number}: its files were collected by a keep policy; versions with files: "
            f"{', '.join(available)}"
        )
    return number, version


def _version_number(history: History, agent: str, wanted: str) -> int:
    """Resolve ``latest``, ``best`` or a number of iterations to an index into the agent's versions."""
    name, newest = f"agent {history.config.name}/{agent}@{wanted}", len(history.versions[agent]) - 1
    if wanted in ("", "latest"):
        return newest
    if wanted == "best":
        best = history.best(agent)
        if best is None:
            raise ConfigError(
                f"{name}: none of its versions was evaluated; take @latest, or give the campaign a benchmark"
            )
        return best
    if not (wanted.isdecimal() and int(wanted) <= newest):
        raise ConfigError(f"{name}: no such version; give latest, best, or a number of iterations from 0 to {newest}")
    return int(wanted)


def _complete(store: Store, entry: Entry, name: str) -> ArtifactRef:
    """Return the version's artifact, verified; raise ConfigError where it is missing or damaged."""
    try:
        found = store.lookup(store.manifest(entry.stage, entry.key).identity)
    except ArtifactError:
        found = None
    if found is None:
        raise ConfigError(f"agent {name}: its files are missing or damaged; run its campaign again to restore them")
    return found


# -- the benchmarks and settings --------------------------------------------------------------------------------------


def find_benchmarks(subject: Subject, names: Sequence[str | BenchmarkConfig]) -> list[BenchmarkConfig]:
    """Return the named benchmarks, or all of the agent's campaign where no name is given."""
    if not names and not subject.benchmarks:
        raise ConfigError(f"agent {subject.name}: choose a benchmark with --benchmark: {_choices(subject)}")
    if not names:
        return list(subject.benchmarks)
    return [name if isinstance(name, BenchmarkConfig) else _find_benchmark(subject, name) for name in names]


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
    if is_task_name(name):
        return task_benchmark(name, {}, TASK_PROBLEMS, subject.generate.max_tokens)
    raise ConfigError(f"--benchmark {name}: not known; choose from {_choices(subject)}")


def task_benchmark(
    task: str, options: dict[str, Any], size: int, max_tokens: int, split: Literal["all", "held_out"] = "held_out"
) -> BenchmarkConfig:
    """Return a benchmark of problems of a task, judged by the task."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(task).stem if task.endswith(".py") else task).strip("-")[-60:]
    problems = TaskProblems(task=task, split=split, size=size, options=options)
    return BenchmarkConfig(name=name, problems=problems, max_tokens=max_tokens)


def _choices(subject: Subject) -> str:
    own = [benchmark.name for benchmark in subject.benchmarks]
    return (
        f"{', '.join([*own, *get_args(PresetName), 'arithmetic'])}, a task (my_task.py), or a YAML file with a "
        "benchmark's settings"
    )


def change_benchmark(benchmark: BenchmarkConfig, changes: Changes) -> BenchmarkConfig:
    """Return the benchmark with the command line's values, validated again."""
    given = {"samples": changes.samples, "temperature": changes.temperature, "max_tokens": changes.max_tokens}
    raw = benchmark.model_dump() | {name: value for name, value in given.items() if value is not None}
    if changes.samples is not None:
        raw["ks"] = [k for k in benchmark.ks if k <= changes.samples]
    if changes.limit is not None:
        if isinstance(benchmark.problems, ArithmeticProblems | TaskProblems):
            settings, key = raw["problems"], "size"
        else:
            settings, key = raw["problems"]["filters"], "max_problems"
        settings[key] = min(changes.limit, settings[key] or changes.limit)
    return validate(raw, BenchmarkConfig, "hacrl eval")


def change_generation(settings: GenerateConfig, changes: Changes) -> GenerateConfig:
    """Return the settings of generation with the command line's values, validated again."""
    raw = settings.model_dump()
    if changes.batch_size is not None:
        raw["batch_size"] = changes.batch_size
    if changes.engine not in (None, "builtin", "vllm"):
        raise ConfigError(f"--engine {changes.engine}: not known; choose builtin or vllm")
    if changes.engine is not None and changes.engine != settings.engine.kind:
        raw["engine"] = {"kind": changes.engine}
    return validate(raw, GenerateConfig, "hacrl eval")


def change_verification(settings: VerifyConfig, changes: Changes) -> VerifyConfig:
    """Return the settings of verification with the command line's verifier, validated again."""
    if changes.verifier is None:
        return settings
    return validate(settings.model_dump() | {"verifier": changes.verifier}, VerifyConfig, "hacrl eval")


def problems_digest(benchmark: BenchmarkConfig) -> str:
    """Return the digest of the benchmark's problems; raise ConfigError where they are not a fixed set."""
    found = load_problems(benchmark.problems)
    if not found.problems:
        raise ConfigError(f"benchmark {benchmark.name}: has no fixed problems; give its problems a size")
    return found.content_digest
