"""MLflow as a projection of the manifests: what a stage measured is in its manifest, and this replays it.

Replaying is idempotent: a point's timestamp is the manifest's, so MLflow merges it with the one it has. The tracker in
``feed.py`` does it from a thread, so that a slow or dead server never holds up training. The next replay sends what a
server missed.
"""

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from flows.home import Home
from flows.record.feedback import read_labels
from flows.record.history import ANSWERING, History
from flows.record.record import Entry, read_entries
from flows.record.trace import MLFLOW
from flows.servers.state import running_mlflow_url
from flows.tracking.exhibits import EXPERIMENT_TAGS, Gallery, run_tags
from flows.tracking.links import note_place
from flows.tracking.points import clean_name, distinct, send_points
from flows.tracking.sent import Sent
from flows.tracking.system import SystemLog
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.files import sync
from hacrl_core.artifacts.locks import exclusive
from hacrl_core.config.addresses import is_http, userinfo, without_userinfo
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.training import UpdateConfig
from hacrl_core.contracts.manifest import Manifest, digest_of
from hacrl_core.errors import ArtifactError, ConfigError
from hacrl_core.spans import span

# Raise it when the projection shows more than before, so that the next replay sends it.
_PROJECTION_VERSION = 4
PARENT = ""


def campaign_digest(config: CampaignConfig) -> str:
    """Return a digest that tells two campaigns of one name apart.

    A campaign stays the same when it runs for longer, on other devices or with an agent that joins later.
    """
    whole = config.model_dump(mode="json", include={"seed", "problems", "prompts_per_iteration", "algorithm", "verify"})
    founders = {name: agent for name, agent in config.agents.items() if agent.joins == 0}
    return digest_of(
        {
            **whole,
            "samples": config.group_size,
            **({"resample": config.resample} if config.resample else {}),
            "generate": config.generate.identity(),
            "update": _without_speed(config.update),
            "agents": {
                name: {
                    **agent.model_dump(mode="json", include={"warmstart", "checkpoint", "algorithm", "chat_template"}),
                    **({"generate": config.generation(name).identity()} if agent.generate else {}),
                    **({"update": _without_speed(config.training(name))} if agent.update else {}),
                }
                for name, agent in founders.items()
            },
        }
    )[:16]


def _without_speed(update: UpdateConfig) -> dict[str, Any]:
    """Return the settings without those that change the speed only."""
    return update.model_dump(mode="json", exclude={"token_budget", "max_logits_mb", "gradient_checkpointing"})


def content_of(entries: list[Entry]) -> str:
    """Return a digest of all that the projection shows of these entries."""
    return digest_of([_PROJECTION_VERSION, sorted((entry.label, entry.key) for entry in entries)])


class Projection:
    """The campaign's runs in one MLflow server: a parent, and a child per agent."""

    def __init__(
        self,
        config: CampaignConfig,
        store: Store,
        uri: str,
        home: Home,
        parent: str | None = None,
        so_far: History | None = None,
    ) -> None:
        """``parent`` is the run of the sweep that the campaign is a cell of; ``so_far`` its history, if it is known."""
        from mlflow import MlflowClient

        from flows.tracking.models import LoggedModels
        from flows.tracking.registry import Registry
        from flows.tracking.traces import Traces

        self._config = config
        self._store = store
        self._above = parent
        if uri == home.tracking_uri:
            ensure_database(home)
        self._client = MlflowClient(tracking_uri=uri)
        self._digest = campaign_digest(config)
        # Two processes at once would each create the runs that they miss.
        with exclusive(home.campaign(config.name) / "tracking.lock"):
            self._experiment = find_experiment(self._client, config.tracking.experiment, uri, home)
            self._runs = self._find_runs()
        folder = home.campaign(config.name)
        note_place(folder, uri, self._experiment)
        so_far = so_far or History(config, store, read_entries(folder))
        models = LoggedModels(self._client, self._experiment, config, self._runs, home.root / "mlartifacts" / "links")
        self._registry = Registry(self._client, so_far, uri, self._runs, models)
        self._gallery = Gallery(self._client, so_far, self._runs, folder)
        self._system = SystemLog(folder)
        # Name and step → agent → value and when it was measured.
        self._headlines: dict[tuple[str, int], dict[str, tuple[float, int]]] = {}
        for finished in so_far.finished:
            self._note_headline(finished.entry, finished.manifest)
        self._traces: Traces | None = None
        self._sent: Sent | None = None
        # What MLflow has of finished iterations; those of one under way are sent again, with what they lacked.
        self._has: set[tuple[str, str]] = set()
        # A sweep compares campaigns; its cells have no traces, and each is sent once, when it is complete.
        if parent is None:
            sent = self._sent = Sent(self._client, self._runs[PARENT], folder, _PROJECTION_VERSION)
            self._has = {(f.entry.label, f.entry.key) for f in so_far.finished if sent.has(f.entry)}
            self._traces = Traces(uri, so_far, self._experiment, self._runs, self._digest, read_labels(folder))

    def log(self, entries: Iterable[Entry]) -> None:
        """Send the entries' metrics in one batch, then what is shown beside them; leave out what MLflow has."""
        entries = [entry for entry in entries if (entry.label, entry.key) not in self._has]
        with span(f"send {len(entries)} stages", MLFLOW):
            self._log(entries)

    def _log(self, entries: list[Entry]) -> None:
        with span("metrics", MLFLOW):
            self._log_metrics(entries)
        self._beside("versions", lambda: self._registry.log(entries))
        self._beside("datasets and tables", lambda: self._gallery.log(entries))
        if (traces := self._traces) is not None:
            self._beside("traces", lambda: traces.log(entries))
        if self._sent is not None:
            self._sent.add(entries)

    def _log_metrics(self, entries: list[Entry]) -> None:
        points: dict[str, list[Any]] = defaultdict(list)
        for entry in entries:
            for run, metric in self._points(entry):
                points[run].append(metric)
        for run, metric in self._gallery.costs(entries):
            points[run].append(metric)
        points[PARENT] += self._system_points()
        send_points(self._client, {self._runs[run]: metrics for run, metrics in points.items()})

    def replay(self, entries: list[Entry]) -> bool:
        """Send what MLflow lacks, unless the parent run's tag says that it has all; return whether that was needed."""
        tags = self._client.get_run(self._runs[PARENT]).data.tags
        if tags.get("hacrl.complete") == content_of(entries):
            return False
        self.log(entries)
        self.mark_complete(entries)
        return True

    def mark_complete(self, entries: list[Entry], history: History | None = None) -> None:
        """Send the versions, tables and figures, and tag the parent run as complete.

        ``history`` is that of these entries, if it is known.
        """
        self._beside("versions", self._registry.flush)
        self._beside("tables, pictures and report", lambda: self._gallery.finish(history))
        self._client.set_tag(self._runs[PARENT], "hacrl.complete", content_of(entries))

    def _beside(self, what: str, show: Callable[[], None]) -> None:
        """Show something beside the metrics; a server that refuses it (one without a registry) still gets the metrics.

        An outage is raised, so that it is retried.
        """
        from mlflow.exceptions import MlflowException

        try:
            with span(what, MLFLOW):
                show()
        except MlflowException as problem:
            error: Any = problem
            if error.get_http_status_code() >= 500:
                raise

    def finish(self, status: str = "FINISHED") -> None:
        """End the campaign's runs with this status."""
        with span("end the runs", MLFLOW):
            for run in self._runs.values():
                self._client.set_terminated(run, status)

    def _points(self, entry: Entry) -> Iterable[tuple[str, Any]]:
        from mlflow.entities import Metric

        try:
            manifest = self._store.manifest(entry.stage, entry.key)
        except ArtifactError:
            # Deleted by hand, or damaged and not computed again yet.
            return
        at = int(manifest.provenance.finished * 1000)
        # Evaluations are labelled by iterations done, all other stages by the iteration they belong to.
        step = (entry.iteration or 0) + (0 if entry.stage == "evaluate" else 1)
        clock = "_".join(part for part in ("time/" + entry.stage, entry.variant, "seconds") if part)
        superseded = bool(entry.variant) and entry.stage in ANSWERING
        values = {**({} if superseded else distinct(manifest.metrics)), clock: manifest.provenance.seconds}
        for name, value in values.items():
            yield entry.agent if entry.agent in self._runs else PARENT, Metric(clean_name(name), value, at, step)
        headline = None if superseded else self._note_headline(entry, manifest)
        if headline is not None:
            value, _ = self._headlines[headline, step][entry.agent]
            yield entry.agent, Metric(clean_name(headline), value, at, step)
            yield from self._mean(headline, step)

    def _note_headline(self, entry: Entry, manifest: Manifest) -> str | None:
        """Remember a reward or accuracy; return the name under which MLflow shows it, None for other stages."""
        metric = {"verify": "verify/reward_mean", "evaluate": f"evaluate/{entry.variant}/accuracy"}.get(entry.stage, "")
        if metric not in manifest.metrics or entry.agent not in self._runs:
            return None
        name = "reward" if entry.stage == "verify" else f"accuracy/{entry.variant}"
        step = (entry.iteration or 0) + (0 if entry.stage == "evaluate" else 1)
        found = self._headlines.setdefault((name, step), {})
        found[entry.agent] = (manifest.metrics[metric], int(manifest.provenance.finished * 1000))
        return name

    def _mean(self, name: str, step: int) -> Iterable[tuple[str, Any]]:
        """Yield the mean over the agents for the campaign's run, when the last of them is known.

        It has the name that the agents' runs use: MLflow draws all of them in one chart.
        """
        from mlflow.entities import Metric

        found = self._headlines[name, step]
        # An evaluation after iteration n is of the agents that took part in it, the first one of those that begin.
        present = self._config.present(max(0, step - 1))
        if found.keys() >= set(present):
            values = [found[agent][0] for agent in present]
            latest = max(found[agent][1] for agent in present)
            yield PARENT, Metric(clean_name(name), statistics.fmean(values), latest, step)

    def _system_points(self) -> list[Any]:
        from mlflow.entities import Metric

        return [Metric(clean_name(name), value, at, step) for name, value, at, step in self._system.points()]

    @staticmethod
    def find(config: CampaignConfig, uri: str, home: Home) -> tuple[dict[str, str], str]:
        """Return the campaign's runs by agent, and the experiment's id; both empty where there is none."""
        from mlflow import MlflowClient

        if uri == home.tracking_uri and not home.database.exists():
            return {}, ""
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(config.tracking.experiment)
        if experiment is None:
            return {}, ""
        found = _runs_of(client, config, experiment.experiment_id)
        return {run.data.tags["hacrl.agent"]: run.info.run_id for run in found}, str(experiment.experiment_id)

    def _find_runs(self) -> dict[str, str]:
        """Return the campaign's runs by agent; create those that are missing and reopen those that ended."""
        found = _runs_of(self._client, self._config, self._experiment)
        runs = {run.data.tags["hacrl.agent"]: run.info.run_id for run in found}
        for run in found:
            # A process was killed between creating the run and describing it.
            if not run.data.params:
                self._describe(run.info.run_id, run.data.tags["hacrl.agent"])
        for agent in (PARENT, *self._config.agents):
            if agent in runs:
                self._client.update_run(runs[agent], status="RUNNING")
            else:
                runs[agent] = self._create(agent, runs.get(PARENT, self._above))
        return runs

    def _create(self, agent: str, parent: str | None) -> str:
        tags = {"hacrl.campaign": self._config.name, "hacrl.campaign_digest": self._digest, "hacrl.agent": agent}
        if parent is not None:
            tags["mlflow.parentRunId"] = parent
        tags |= run_tags(self._config, agent)
        name = f"{self._config.name}/{agent}" if agent else self._config.name
        run = str(self._client.create_run(self._experiment, run_name=name, tags=tags).info.run_id)
        self._describe(run, agent)
        return run

    def _describe(self, run: str, agent: str) -> None:
        """Send the config's file, then the parameters: where the parameters are, both are."""
        if not agent:
            self._client.log_dict(run, self._config.model_dump(mode="json"), "config.json")
        self._client.log_batch(run, params=list(_params(self._config, agent)))


def _runs_of(client: Any, config: CampaignConfig, experiment: str) -> list[Any]:
    query = f"tags.`hacrl.campaign_digest` = '{campaign_digest(config)}' and tags.`hacrl.campaign` = '{config.name}'"
    return list(client.search_runs([experiment], query, max_results=1000))


def ensure_database(home: Home) -> None:
    """Create MLflow's database in the home folder, completely or not at all.

    MLflow creates its tables in dozens of steps over several seconds. Killed between two of them, it leaves a database
    that it cannot open again. So it creates them in a draft, which is renamed when it is complete.
    """
    path = home.database
    if path.exists():
        return
    with exclusive(path.with_suffix(".lock")):
        if path.exists():
            return
        for left in path.parent.glob(f"{path.name}.draft*"):
            left.unlink()
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        draft = path.with_name(f"{path.name}.draft")
        make_store: Any = SqlAlchemyStore
        make_store(f"sqlite:///{draft}", (home.root / "mlartifacts").as_uri()).engine.dispose()
        os.replace(draft, path)
        sync(path.parent)


def find_experiment(client: Any, name: str, uri: str, home: Home) -> str:
    """Return the experiment's id, and create it where it does not exist.

    Without a server MLflow would put files into the current folder, so they get a place in the home folder.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    files = (home.root / "mlartifacts").as_uri() if uri == home.tracking_uri else None
    try:
        return str(client.create_experiment(name, artifact_location=files, tags=EXPERIMENT_TAGS))
    except MlflowException:
        # Another process may have created it just now.
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return str(found.experiment_id)


def quiet_environment() -> None:
    """Set MLflow's environment before it is imported: no telemetry, and a dead server is given up after seconds."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(name, value)


def tracking_uri(config: CampaignConfig, home: Home) -> str:
    """Return the config's server, else MLFLOW_TRACKING_URI, the server of ``hacrl up``, or the home's sqlite file.

    The server of ``hacrl up`` uses the same file by default.
    """
    _move_userinfo()
    return config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or running_mlflow_url(home) or home.tracking_uri


def _move_userinfo() -> None:
    """Move user and password out of a server's address to where MLflow's client reads them.

    The address is shown and logged. A database's address keeps them, because its driver reads them there.
    """
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    try:
        found = userinfo(given)
    except ValueError:
        raise ConfigError(
            f"MLFLOW_TRACKING_URI: {without_userinfo(given)} is not an address; give e.g. http://host:5000"
        ) from None
    if found is None or not is_http(given):
        return
    os.environ["MLFLOW_TRACKING_URI"] = without_userinfo(given)
    os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"] = found


def _params(config: CampaignConfig, agent: str) -> Iterable[Any]:
    from mlflow.entities import Param

    whole = config.model_dump(mode="json", exclude={"agents", "tracking", "runtime", "schedule"})
    if agent:
        whole = {
            "agent": config.agents[agent].model_dump(mode="json"),
            "objective": config.objective(agent).model_dump(mode="json"),
        }
    for name, value in sorted(_flat(whole)):
        yield Param(clean_name(name), str(value)[:6000])


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else str(name))
    elif value is not None:
        yield prefix, value
