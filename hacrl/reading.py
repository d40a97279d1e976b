"""What a home holds, as pandas and Arrow tables and as transformers models: the read API of ``import hacrl``.

Everything is read from the store and its manifests. Neither Prefect nor MLflow is imported, and torch only by
:meth:`Agent.load`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.agents.find import version_files
from flows.home import Home as HomeFolder
from flows.record.history import History, last, read_history, state_of
from flows.record.record import campaign_folders, find_campaign
from hacrl_core.artifacts import open_store
from hacrl_core.contracts.tables import NEWEST, SCHEMAS, TableSchema, read_table
from hacrl_core.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from hacrl_core.config.campaign import CampaignConfig

# The stage that makes each table.
_STAGE_OF = {
    "prompts": "sample",
    "rollouts": "generate",
    "verdicts": "verify",
    "timings": "verify",
    "capability": "credit",
    "credit": "credit",
    "scores": "score",
    "evaluation": "evaluate",
}


def open_home(home: str | Path | None = None) -> "Home":
    """Open a home folder: the given one, else ``HACRL_HOME``, else ``.hacrl`` in the current folder."""
    folder = HomeFolder.find(None if home is None else Path(home))
    if not folder.root.is_dir():
        raise ConfigError(f"home {folder.root}: no such folder; run a campaign first, or give another home")
    return Home(folder)


@dataclass(frozen=True)
class Home:
    """Everything that campaigns and sweeps left in one folder."""

    folder: HomeFolder

    @property
    def campaigns(self) -> dict[str, "Campaign"]:
        """The campaigns by name, the one with the newest activity first."""
        return {path.name: self[path.name] for path in campaign_folders(self.folder)}

    @property
    def sweeps(self) -> dict[str, Path]:
        """The folders of finished and unfinished sweeps by name, with their tables as CSV files."""
        return {path.name: path for path in sorted((self.folder.root / "sweeps").glob("*")) if path.is_dir()}

    def __getitem__(self, name: str) -> "Campaign":
        path = find_campaign(self.folder, name)
        return Campaign(path, read_history(open_store(self.folder.store), path))

    def __repr__(self) -> str:
        names = ", ".join(path.name for path in campaign_folders(self.folder)) or "none"
        return f"<hacrl home {self.folder.root}; campaigns: {names}; sweeps: {', '.join(self.sweeps) or 'none'}>"

    def _repr_html_(self) -> str:
        rows = [
            (name, c.state, f"{c.iterations} of {c.config.iterations}", ", ".join(c.agents))
            for name, c in self.campaigns.items()
        ]
        return _html(("campaign", "state", "iterations", "agents"), rows)


@dataclass(frozen=True)
class Campaign:
    """One campaign: its settings, tables, metrics and agents. Iterations count from 0, as in ``hacrl rollouts``."""

    folder: Path
    history: History

    @property
    def name(self) -> str:
        """The campaign's name."""
        return self.folder.name

    @property
    def config(self) -> "CampaignConfig":
        """The settings of its last run."""
        return self.history.config

    @property
    def state(self) -> str:
        """``running``, ``complete``, ``idle`` (until its next scheduled run), ``failed`` or ``stopped``."""
        return state_of(self.history, self.folder)

    @property
    def iterations(self) -> int:
        """The number of complete iterations."""
        return self.history.done

    @property
    def agents(self) -> dict[str, "Agent"]:
        """The agents by name."""
        return {name: Agent(self, name) for name in self.history.agents}

    def prompts(self, iteration: int | None = None) -> "pd.DataFrame":
        """Return the prompts of an iteration, or of all."""
        return self._frame("prompts", iteration, "")

    def rollouts(self, iteration: int | None = None, agent: str | None = None) -> "pd.DataFrame":
        """Return the responses of an iteration, or of all; with verdict and reward beside each response."""
        responses = self._frame("rollouts", iteration, agent)
        verdicts = self._frame("verdicts", iteration, agent)
        added = ["rollout_id", *(column for column in verdicts.columns if column not in responses.columns)]
        return responses.merge(verdicts[added], on="rollout_id", how="left", validate="one_to_one")

    def verdicts(self, iteration: int | None = None, agent: str | None = None) -> "pd.DataFrame":
        """Return what the verifier said of the responses of an iteration, or of all."""
        return self._frame("verdicts", iteration, agent)

    def credit(self, iteration: int | None = None, learner: str | None = None) -> "pd.DataFrame":
        """Return the advantages that a learner, or each one, gave to everybody's responses."""
        return self._frame("credit", iteration, learner)

    def scores(self, iteration: int | None = None, learner: str | None = None) -> "pd.DataFrame":
        """Return the log-probs that a learner, or each one, gave to everybody's responses."""
        return self._frame("scores", iteration, learner)

    def evaluations(self, agent: str | None = None) -> "pd.DataFrame":
        """Return the answers to all benchmarks; ``iteration`` counts the iterations before the evaluation."""
        return self._frame("evaluation", None, agent)

    def metrics(self, agent: str | None = None) -> "pd.DataFrame":
        """Return every metric of every stage: a row for each step, agent, stage and metric.

        ``step`` counts the iterations that were done, so the first iteration's metrics have step 1.
        """
        import pandas as pd

        rows = [
            (f.step, f.entry.agent, f.entry.stage, f.entry.variant, name, value)
            for f in self.history.finished
            if agent in (None, f.entry.agent)
            for name, value in f.manifest.metrics.items()
        ]
        columns = ["step", "agent", "stage", "benchmark", "metric", "value"]
        return pd.DataFrame(rows, columns=columns).sort_values(["step", "agent", "metric"], ignore_index=True)

    def accuracy(self) -> "pd.DataFrame":
        """Return the accuracy on each benchmark with its 95 % interval: a row for each step, agent and benchmark."""
        import pandas as pd

        rows = []
        for agent in self.history.agents:
            for benchmark in self.history.benchmarks:
                ends = [dict(self.history.accuracy(agent, benchmark, f"accuracy_{end}")) for end in ("low", "high")]
                for step, value in self.history.accuracy(agent, benchmark):
                    rows.append((int(step), agent, benchmark, value, *(end.get(step) for end in ends)))
        return pd.DataFrame(rows, columns=["step", "agent", "benchmark", "accuracy", "low", "high"])

    def table(self, name: str, iteration: int, agent: str = "", benchmark: str = "") -> "pa.Table":
        """Return one stage's table as Arrow: ``table("scores", 7, "ada")`` is of the seventh iteration.

        Prompts belong to no agent. An evaluation's iteration is the last one before it. With ``resample`` an
        earlier attempt is named in the place of a benchmark, as ``attempt-1``. The table is as it is stored: a
        column ``iteration`` of its own counts from 0.
        """
        if name not in _STAGE_OF:
            raise ConfigError(f"table {name!r}: there is none of that name; choose one of {', '.join(_STAGE_OF)}")
        for found in self.history.stages(_STAGE_OF[name], agent, benchmark):
            if found.step == iteration:
                return read_table(self._folder(found.entry.stage, found.entry.key) / f"{name}.parquet", _schema(name))
        raise ConfigError(
            f"table {name} of {agent or 'the campaign'} in iteration {iteration}: not in campaign {self.name}, which "
            f"has {self.iterations} complete iterations, counted from 1"
        )

    def _folder(self, stage: str, key: str) -> Path:
        return self.history.store.folder(stage, key)

    def _frame(self, name: str, iteration: int | None, agent: str | None) -> "pd.DataFrame":
        """Read the tables of one kind, with their iteration and whose they are, as one data frame."""
        import pandas as pd

        if agent and agent not in self.history.agents:
            raise ConfigError(f"agent {agent!r}: not in campaign {self.name}; choose one of {', '.join(self.agents)}")
        if iteration is not None and not 1 <= iteration <= self.iterations:
            raise ConfigError(f"iteration {iteration}: campaign {self.name} has 1 to {self.iterations}")
        frames = [
            self._labelled(read_table(self._folder(e.stage, e.key) / f"{name}.parquet", _schema(name)), name, e, f.step)
            for f in self.history.finished
            if (e := f.entry).stage == _STAGE_OF[name]
            and agent in (None, e.agent)
            and iteration in (None, f.step)
            # Answers that were given again count, and not those before; scores are the learner's, not its reference's.
            and (not e.variant or e.stage == "evaluate")
        ]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=_schema(name).fields.names)

    def _labelled(self, table: "pa.Table", name: str, entry: Any, iteration: int) -> "pd.DataFrame":
        frame: pd.DataFrame = table.to_pandas()
        # Stored tables count iterations from 0.
        if "iteration" in frame.columns:
            frame["iteration"] += 1
        owner = {"credit": "learner", "scores": "learner", "capability": "learner", "prompts": ""}.get(name, "agent")
        labels = {"iteration": iteration, owner: entry.agent, "benchmark": entry.variant}
        for place, (label, value) in enumerate((k, v) for k, v in labels.items() if k and v not in (None, "")):
            if label not in frame.columns:
                frame.insert(place, label, value)
        return frame

    def __repr__(self) -> str:
        done = f"{self.iterations} of {self.config.iterations} iterations"
        return f"<campaign {self.name}: {self.state}, {done}, agents {', '.join(self.agents)}>"

    def _repr_html_(self) -> str:
        rows = [(a.name, str(len(a)), _percent(a.reward), _percent(a.last_accuracy)) for a in self.agents.values()]
        title = f"<b>{escape(self.name)}</b>: {self.state}, {self.iterations} of {self.config.iterations} iterations"
        return title + _html(("agent", "versions", "last reward", "last accuracy"), rows)


@dataclass(frozen=True)
class Agent:
    """One agent of a campaign: its versions, and what it learned."""

    campaign: Campaign
    name: str

    def __len__(self) -> int:
        return len(self.campaign.history.versions[self.name])

    @property
    def reward(self) -> float | None:
        """The mean reward of its responses in the last iteration."""
        return last(self.campaign.history.rewards(self.name))

    @property
    def last_accuracy(self) -> float | None:
        """Its mean accuracy over the benchmarks, after the last evaluation."""
        found = self.campaign.history.mean_accuracy(self.name)
        return found[max(found)] if found else None

    def path(self, version: int | str = "latest") -> Path:
        """Return the checkpoint folder of a version: ``latest``, ``best``, or a number of iterations."""
        return version_files(self.campaign.history, self.name, str(version))

    def load(self, version: int | str = "latest") -> tuple[Any, Any]:
        """Return the transformers model and tokenizer of a version, on the CPU in float32."""
        from hacrl_core.agents.agent import load_agent

        own_code = self.campaign.config.agents[self.name].own_code
        loaded = load_agent(self.path(version), own_code=own_code)
        return loaded.model, loaded.tokenizer

    def __repr__(self) -> str:
        return f"<agent {self.campaign.name}/{self.name}: {len(self)} versions, last reward {_percent(self.reward)}>"


def _schema(name: str) -> TableSchema:
    return NEWEST.get(name, SCHEMAS[name])


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _html(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def run(
    config: "CampaignConfig | Mapping[str, Any] | str | Path", *, home: str | Path | None = None, **settings: Any
) -> Campaign:
    """Run or resume a campaign, as ``hacrl run`` does, and return it when it is complete.

    ``config`` is a YAML file, a mapping of settings or a CampaignConfig. Further settings override it, with a dot
    written as two underscores: ``run("demo.yaml", update__learning_rate=1e-4)``.
    """
    from rich.console import Console

    from flows.run.launch import launch
    from hacrl_core.config.campaign import CampaignConfig
    from hacrl_core.config.loading import merge, read_yaml, validate
    from hacrl_core.config.sweep import nested

    changes = nested({key.replace("__", "."): value for key, value in settings.items()})
    if isinstance(config, CampaignConfig):
        config = config.model_dump(mode="json")
    source = "hacrl.run" if isinstance(config, Mapping) else str(config)
    raw = config if isinstance(config, Mapping) else read_yaml(Path(config))
    chosen = validate(merge(raw, changes), CampaignConfig, source)
    launch(chosen, HomeFolder.find(None if home is None else Path(home)), Console())
    return open_home(home)[chosen.name]
