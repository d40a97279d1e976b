"""Which campaign needs which artifacts, read from every campaign's record.

*Needed*: the artifact's files stay. *Known*: a record names the artifact, but no keep policy wants its files; the
manifest stays, so that the campaign is not run again. What is neither is garbage. A campaign that runs, or that this
version of hacrl cannot read, needs everything that it ever recorded.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from flows.home import Home
from flows.record.history import History, read_history
from flows.record.lines import entry_of, read_lines, report_missing, report_no_config, report_unreadable
from flows.record.record import evaluations_log, is_running
from flows.store.pins import Pin, read_pins
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.operation import KeepConfig
from hacrl_core.errors import ConfigError


@dataclass(frozen=True)
class Version:
    """One version of an agent; its number counts the iterations behind it."""

    agent: str
    number: int
    stage: str
    key: str
    # The mean over the campaign's benchmarks.
    accuracy: float | None
    pinned: bool
    # By the policy, by a pin, or for an evaluation that is still pending.
    kept: bool


@dataclass
class Campaign:
    """The artifacts that one campaign's record names."""

    name: str
    running: bool
    needed: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    # (stage, agent, key) of the last entry of each label.
    entries: list[tuple[str, str, str]] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    policy: KeepConfig | None = None
    # Lines of the record that cannot be read: what they named is not known.
    unreadable: int = 0

    @property
    def keys(self) -> set[str]:
        """The keys of the last entries."""
        return {key for _, _, key in self.entries}


def recorded_campaigns(home: Home) -> list[Path]:
    """Return the folders of all campaigns, including the cells of sweeps and those whose record is gone."""
    names = ("stages.jsonl", "config.json")
    return sorted({path.parent for name in names for path in home.campaigns.rglob(name)})


def running_sweeps(home: Home) -> list[Path]:
    """Return the folders of the sweeps that run. No campaign's record names their first artifacts yet."""
    return sorted(filter(is_running, (home.root / "sweeps").glob("*")))


def survey_campaign(home: Home, store: Store, folder: Path, override: KeepConfig | None = None) -> Campaign:
    """Return what the campaign in this folder needs; ``override`` replaces its keep policy."""
    lines, damaged = read_lines(folder / "stages.jsonl")
    if not (folder / "stages.jsonl").exists():
        # What it named would look like garbage.
        damaged += 1
        report_missing(folder / "stages.jsonl")
    running = is_running(folder)
    name = folder.relative_to(home.campaigns).as_posix()
    found = Campaign(name, running, unreadable=damaged + sum(entry_of(raw) is None for raw in lines))
    latest = {str(raw.get("label")): raw for raw in lines}
    found.entries = [(str(r.get("stage")), str(r.get("agent")), str(r["key"])) for r in latest.values()]
    pins = read_pins(folder)
    try:
        history = read_history(store, folder)
    except ConfigError:
        # The config is gone, or another version of hacrl wrote it, so all of it stays.
        if not running:
            report_no_config(folder / "config.json")
        found.needed = {str(raw["key"]) for raw in lines} | {p.key for p in pins}
        return found
    found.policy = override or history.config.keep
    found.versions = read_versions(history, found.policy, pins)
    if running or found.unreadable:
        found.needed = {str(raw["key"]) for raw in lines} | {p.key for p in pins}
        return found
    found.known = {v.key for v in found.versions if not v.kept}
    found.needed = (found.keys - found.known) | {p.key for p in pins}
    return found


def read_versions(history: History, policy: KeepConfig | None, pins: list[Pin]) -> list[Version]:
    """Return every agent's versions, and whether they keep their files."""
    pinned = {p.key for p in pins}
    evaluated = {(h.entry.agent, h.entry.variant, h.step) for h in history.finished if h.entry.stage == "evaluate"}
    found = []
    for agent, versions in history.versions.items():
        joins = history.config.agents[agent].joins
        accuracy = {step - joins: value for step, value in history.mean_accuracy(agent).items()}
        best = history.best(agent)
        for number, entry in enumerate(versions):
            kept = (
                policy is None
                or entry.key in pinned
                or policy.keeps(number, len(versions) - 1, best)
                or evaluation_pending(history.config, agent, number, evaluated)
            )
            found.append(
                Version(agent, number, entry.stage, entry.key, accuracy.get(number), entry.key in pinned, kept)
            )
    return found


def evaluation_pending(
    config: CampaignConfig, agent: str, number: int, evaluated: Container[tuple[str, str, int]]
) -> bool:
    """Return whether this version is still to be evaluated on a benchmark.

    ``evaluated`` has the agent, the benchmark and the iterations done of the evaluations that there are.
    """
    settings = config.agents[agent]
    iteration = number + settings.joins
    last = min(settings.leaves or config.iterations, config.iterations)
    due = config.evaluate.due(iteration, last, settings.joins)
    return any((agent, benchmark.name, iteration) not in evaluated for benchmark in due)


@dataclass(frozen=True)
class Survey:
    """What all campaigns of a home need together."""

    campaigns: list[Campaign]
    needed: set[str]
    known: set[str]
    # Whether every record could be read to the end: otherwise what no record names may still be somebody's.
    whole: bool


def survey(home: Home, store: Store, override: KeepConfig | None = None, only: str | None = None) -> Survey:
    """Return what all campaigns need; ``override`` replaces the policy of all, or of the one named by ``only``."""
    campaigns = []
    for folder in recorded_campaigns(home):
        name = folder.relative_to(home.campaigns).as_posix()
        campaigns.append(survey_campaign(home, store, folder, override if only in (None, name) else None))
    evaluated, adopted, unreadable = _evaluations(home)
    needed = set().union(*(c.needed for c in campaigns)) | evaluated
    known = set().union(*(c.known for c in campaigns)) | adopted
    whole = not unreadable and not any(c.unreadable for c in campaigns)
    return Survey(campaigns, needed, known - needed, whole)


def survey_evaluations(home: Home) -> tuple[set[str], set[str]]:
    """Return the keys of ``hacrl eval``'s results, and of the checkpoints that were imported for them."""
    results, adopted, _ = _evaluations(home)
    return results, adopted


def _evaluations(home: Home) -> tuple[set[str], set[str], int]:
    """Return the keys of ``hacrl eval``'s results and of the checkpoints imported for them; no campaign records these.

    The results stay. Of the checkpoints only the manifests stay, which is all that showing a result again needs. The
    third value counts the lines that cannot be read.
    """
    rows, unreadable = read_lines(evaluations_log(home))
    if unreadable:
        remedy = "delete them; hacrl eval computes a result again that is missing"
        report_unreadable(evaluations_log(home), unreadable, remedy)
    results = {str(raw["key"]) for raw in rows if raw.get("stage") == "evaluate"}
    return results, {str(raw["key"]) for raw in rows} - results, unreadable
