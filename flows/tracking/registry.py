"""Agents in MLflow's model registry: every version that the store keeps, without a copy of its weights.

A registered model is named ``campaign.agent`` (a slash is not allowed there). Its version n is the agent's version n:
``models:/demo.ada/40`` is ``demo/ada@40``. Every kept version, the first one included, is also a logged model, and the
registered version's source is that model's folder (``models.py``). ``models:/campaign.agent@latest`` is MLflow's own
alias for the highest number, ``@best`` is set here. Versions are found by their key, so replaying creates no
duplicates.
"""

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException

from flows.record.history import History
from flows.record.record import ORIGINS, Entry
from flows.tracking.models import LoggedModels, Version
from flows.tracking.store_scheme import SCHEME
from hacrl_core.artifacts.manifests import MANIFEST
from hacrl_core.contracts.manifest import Manifest
from hacrl_core.errors import ArtifactError

# Accuracy, milliseconds since the epoch, digest of the problems.
Measured = tuple[float, int, str]
# Iterations without an evaluation after which versions are registered all the same.
PATIENCE = 10
_PAGE = 1000
# The logged model has all tags; a version's page has room for few.
_OF_A_VERSION = ("hacrl.version", "hacrl.key", "hacrl.content", "hacrl.parent")


class Registry:
    """Registers the versions of a campaign's agents.

    It is fed with the campaign's entries in their order. Versions are registered after an evaluation or every ten
    iterations, so those that a keep policy collects in between are never registered.
    """

    def __init__(self, client: Any, history: History, uri: str, runs: dict[str, str], models: LoggedModels) -> None:
        self._client = client
        self._models = models
        self._runs = runs
        self._config = history.config
        self._store = history.store
        self._through_server = uri.startswith(("http://", "https://"))
        # Model → key of the artifact → MLflow's number.
        self._known: dict[str, dict[str, int]] = {}
        # Model → number of the version with the alias.
        self._best: dict[str, int | None] = {}
        # Agent → iterations behind the version → (stage, key).
        self._versions = {a: {n: (e.stage, e.key) for n, e in enumerate(history.versions[a])} for a in history.agents}
        # Agent and iterations → benchmark → accuracy, when it was measured, and the digest of the problems.
        self._accuracy: dict[tuple[str, int], dict[str, Measured]] = {}
        # Evaluations that the logged models do not have yet.
        self._unsent: dict[tuple[str, int], dict[str, Measured]] = {}
        for finished in history.finished:
            if finished.entry.stage == "evaluate" and finished.entry.agent in self._config.agents:
                self._take(finished.entry, finished.manifest)
        self._waiting = 0
        # Keys of versions whose files were collected, and of which MLflow has nothing any more.
        self._gone: set[str] = set()

    def log(self, entries: Iterable[Entry]) -> None:
        """Take in new entries, and register versions when an evaluation is among them or many are waiting."""
        evaluated = False
        for entry in entries:
            if entry.agent not in self._config.agents:
                continue
            if entry.stage in (*ORIGINS, "update"):
                number = 0 if entry.stage in ORIGINS else self._number(entry) + 1
                self._versions[entry.agent][number] = (entry.stage, entry.key)
                self._waiting = max(self._waiting, 1) + 1
            elif entry.stage == "evaluate" and (manifest := self._manifest(entry)) is not None:
                self._take(entry, manifest)
                evaluated = True
        if evaluated or self._waiting > PATIENCE * len(self._config.agents):
            self._register_new()

    def flush(self) -> None:
        """Register new versions that have files, delete those that no longer have, and set the alias."""
        # A version that was collected may have been made again.
        self._gone.clear()
        self._register_new()

    def _register_new(self) -> None:
        """Do so without looking again at versions that were collected: their number grows with the campaign."""
        self._waiting = 0
        self._models.make(self._new_versions())
        for agent, versions in self._versions.items():
            if not versions:
                continue
            model = self._model(agent)
            known = self._registered(model)
            for number, (stage, key) in sorted(self._present(versions).items()):
                kept = self._is_kept(stage, key)
                if kept and key not in known:
                    self._create(agent, number, stage, key)
                elif not kept:
                    self._delete(model, key)
                    self._gone.add(key)
            newest = versions[max(versions)]
            # MLflow's own @latest is the highest number, but a campaign may return to settings, and versions, that it
            # had before.
            if newest[1] in known and known[newest[1]] < max(known.values()):
                self._create(agent, max(versions), *newest)
            self._mark_best(agent)
        for (agent, number), found in self._unsent.items():
            if number in self._versions[agent]:
                self._models.measure(agent, number, self._versions[agent][number][1], found)
        self._unsent = {}

    def _new_versions(self) -> list[Version]:
        """Return the versions of all agents that have files and are not registered yet."""
        return [
            self._version(agent, number, stage, key)
            for agent, versions in self._versions.items()
            if versions
            for known in [self._registered(self._model(agent))]
            for number, (stage, key) in sorted(self._present(versions).items())
            if key not in known and self._is_kept(stage, key)
        ]

    def _present(self, versions: Mapping[int, tuple[str, str]]) -> dict[int, tuple[str, str]]:
        return {number: version for number, version in versions.items() if version[1] not in self._gone}

    def _version(self, agent: str, number: int, stage: str, key: str) -> Version:
        manifest, folder = self._store.manifest(stage, key), self._store.folder(stage, key)
        return Version(agent, number, manifest, folder, self._tags(agent, number, manifest, folder))

    def _create(self, agent: str, number: int, stage: str, key: str) -> None:
        """Create the logged model of a version, and register it; MLflow's numbers begin at 1, so not the first one."""
        version, name = self._version(agent, number, stage, key), self._model(agent)
        [model] = self._models.make([version])
        if number == 0:
            return
        tags = version.tags
        # Numbers of versions that are not kept are left out, so that number and iteration agree.
        leave_out_numbers(self._client, name, number)
        done = self._register(agent, number, model, tags)
        while int(done.version) < number:
            self._client.delete_model_version(name, done.version)
            done = self._register(agent, number, model, tags)
        self._known[name][key] = int(done.version)

    def _register(self, agent: str, number: int, model: Any, tags: Mapping[str, str]) -> Any:
        version = f"{self._config.name}/{agent}@{number}"
        return self._client.create_model_version(
            self._model(agent),
            source=self._source(self._models.folder(model), model),
            run_id=self._runs[agent],
            tags={name: tags[name] for name in _OF_A_VERSION if name in tags},
            description=f"{version}, after {number} iterations. Plain checkpoint: hacrl export {version} DIR",
            await_creation_for=0,
            model_id=model.model_id,
        )

    def _source(self, folder: Path, model: Any) -> str:
        """Return an address that MLflow accepts: its servers take a plain path only inside the model's own folder."""
        if not self._through_server or folder.as_uri() == model.artifact_location:
            return folder.as_uri()
        return f"{SCHEME}://{folder}"

    def _delete(self, model: str, key: str) -> None:
        known = self._registered(model)
        if key in known:
            self._client.delete_model_version(model, str(known.pop(key)))
        self._models.forget(key)

    def _tags(self, agent: str, number: int, manifest: Manifest, folder: Path) -> dict[str, str]:
        found = {
            "hacrl.campaign": self._config.name,
            "hacrl.agent": agent,
            "hacrl.iteration": str(number + self._config.agents[agent].joins),
            "hacrl.version": str(number),
            "hacrl.key": manifest.key,
            "hacrl.content": manifest.content_digest,
            # The content of the version that it was made from.
            "hacrl.parent": manifest.identity.inputs.get("agent", ""),
            "hacrl.algorithm": self._config.preset,
            "hacrl.folder": str(folder),
            "hacrl.commit": manifest.provenance.commit,
        }
        return {name: value for name, value in found.items() if value}

    def _mark_best(self, agent: str) -> None:
        """Set the alias and the accuracy of the best version; of equals the later, as ``hacrl export`` chooses."""
        wanted = {benchmark.name for benchmark in self._config.evaluate.benchmarks}
        means = {
            number: statistics.fmean(value for value, _, _ in found.values())
            for (who, number), found in self._accuracy.items()
            if who == agent and found.keys() == wanted and number in self._versions[agent]
        }
        if not means:
            return
        model, best = self._model(agent), max(means, key=lambda number: (means[number], number))
        # None where the best has no files; then no other version gets the alias.
        version = self._known[model].get(self._versions[agent][best][1])
        if version is not None and self._best.get(model) != version:
            self._client.set_registered_model_alias(model, "best", str(version))
            self._client.set_model_version_tag(model, str(version), "hacrl.accuracy", f"{means[best]:.4f}")
        self._best[model] = version

    def _registered(self, model: str) -> dict[str, int]:
        """Return MLflow's numbers by key. They are asked for once: a campaign has one writer, which keeps them."""
        if model not in self._known:
            self._known[model] = self._find(model)
        return self._known[model]

    def _find(self, model: str) -> dict[str, int]:
        try:
            about = (
                f"Versions of an agent of the campaign {self._config.name}; sources are folders of the artifact store."
            )
            self._client.create_registered_model(model, {"hacrl.campaign": self._config.name}, about)
            return {}
        except MlflowException as problem:
            if problem.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found: dict[str, int] = {}
        token = None
        while True:
            page = self._client.search_model_versions(f"name='{model}'", max_results=_PAGE, page_token=token)
            for version in page:
                if key := version.tags.get("hacrl.key"):
                    found[key] = max(int(version.version), found.get(key, 0))
            token = page.token
            if not token:
                return found

    def _take(self, entry: Entry, manifest: Manifest) -> None:
        """Note the accuracy of an evaluation."""
        value = manifest.metrics.get(f"evaluate/{entry.variant}/accuracy")
        if value is None:
            return
        digest = str(manifest.identity.config.get("content_digest", ""))
        measured = (value, int(manifest.provenance.finished * 1000), digest)
        for found in (self._accuracy, self._unsent):
            found.setdefault((entry.agent, self._number(entry)), {})[entry.variant] = measured

    def _manifest(self, entry: Entry) -> Manifest | None:
        try:
            return self._store.manifest(entry.stage, entry.key)
        except ArtifactError:
            return None

    def _is_kept(self, stage: str, key: str) -> bool:
        folder = self._store.folder(stage, key)
        return (folder / MANIFEST).exists() and not self._store.is_collected(stage, key)

    def _model(self, agent: str) -> str:
        return f"{self._config.name}.{agent}"

    def _number(self, entry: Entry) -> int:
        return (entry.iteration or 0) - self._config.agents[entry.agent].joins


def leave_out_numbers(client: Any, name: str, number: int) -> None:
    """Have the next version of a registered model get this number, where MLflow's database is opened from here.

    MLflow counts up from the highest number, deleted versions included. So one row stands for all that are left out; a
    server offers no such call, and each of them has to be created and deleted there.
    """
    from mlflow.entities.model_registry.model_version_stages import STAGE_DELETED_INTERNAL
    from mlflow.store.model_registry.dbmodels.models import SqlModelVersion
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

    found = client._get_registry_client().store
    if not isinstance(found, SqlAlchemyStore):
        return
    store: Any = found
    model: Any = SqlModelVersion
    with store.ManagedSessionMaker(read_only=False) as session:
        rows = session.query(model.version).filter(model.name == name, *store._get_workspace_clauses(model))
        highest = rows.order_by(model.version.desc()).limit(1).scalar() or 0
        if highest < number - 1:
            row = model(name=name, version=number - 1, current_stage=STAGE_DELETED_INTERNAL, source="")
            session.add(store._with_workspace_field(row))
