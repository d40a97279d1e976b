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
from flows.tracking.database import VersionDraft, register_versions
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
        self._register_new(whole=True)

    def _register_new(self, *, whole: bool = False) -> None:
        """Do so; unless ``whole``, without looking again at versions whose number grows with the campaign.

        These are the ones that were collected and, where the campaign keeps all versions, the registered ones.
        """
        self._waiting = 0
        new: dict[str, list[Version]] = {}
        for agent, versions in self._versions.items():
            if versions:
                new[agent] = self._look(agent, versions, whole=whole)
        self._models.make([version for found in new.values() for version in found])
        for agent, found in new.items():
            self._register(agent, found)
            # MLflow's own @latest is the highest number, but a campaign may return to settings, and versions, that it
            # had before.
            versions, known = self._versions[agent], self._registered(self._model(agent))
            newest = versions[max(versions)]
            if newest[1] in known and known[newest[1]] < max(known.values()):
                again = [self._version(agent, max(versions), *newest)]
                self._models.make(again)
                self._register(agent, again)
            self._mark_best(agent)
        for (agent, number), measured in self._unsent.items():
            if number in self._versions[agent]:
                self._models.measure(agent, number, self._versions[agent][number][1], measured)
        self._unsent = {}

    def _look(self, agent: str, versions: Mapping[int, tuple[str, str]], *, whole: bool) -> list[Version]:
        """Return the versions that have files and are not registered yet; delete those that no longer have."""
        model, new = self._model(agent), []
        known = self._registered(model)
        settled = known if self._config.keep is None and not whole else {}
        for number, (stage, key) in sorted(versions.items()):
            if key in self._gone or key in settled:
                continue
            kept = self._is_kept(stage, key)
            if kept and key not in known:
                new.append(self._version(agent, number, stage, key))
            elif not kept:
                self._delete(model, key)
                self._gone.add(key)
        return new

    def _version(self, agent: str, number: int, stage: str, key: str) -> Version:
        manifest, folder = self._store.manifest(stage, key), self._store.folder(stage, key)
        return Version(agent, number, manifest, folder, self._tags(agent, number, manifest, folder))

    def _register(self, agent: str, versions: list[Version]) -> None:
        """Register versions whose logged models are there; MLflow's numbers begin at 1, so not the first one."""
        versions = [version for version in versions if version.number > 0]
        name = self._model(agent)
        try:
            numbers = register_versions(self._client, name, [self._draft(version) for version in versions])
        except MlflowException:
            # Some of them may be registered: MLflow is asked again.
            del self._known[name]
            raise
        keys = [version.manifest.key for version in versions]
        self._registered(name).update(zip(keys, numbers, strict=True))

    def _draft(self, version: Version) -> VersionDraft:
        name = f"{self._config.name}/{version.agent}@{version.number}"
        model: Any = self._models.find(version.manifest.key)
        return VersionDraft(
            number=version.number,
            source=self._source(self._models.folder(model), model),
            run=self._runs[version.agent],
            model_id=model.model_id,
            tags={tag: version.tags[tag] for tag in _OF_A_VERSION if tag in version.tags},
            description=f"{name}, after {version.number} iterations. Plain checkpoint: hacrl export {name} DIR",
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
