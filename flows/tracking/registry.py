"""Agents in MLflow's model registry: every version that the store keeps, without a copy of its weights.

A registered model is named ``campaign.agent`` (a slash is not allowed there). A version's source is the artifact's folder in the store; its tags say
which campaign, iteration and version it comes from. ``models:/campaign.agent@latest`` is MLflow's own alias for the highest number, ``@best`` is set
here. Known versions are found by their key, so that replaying makes no second one.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from flows.record.history import History
from flows.record.record import ORIGINS, Entry
from hacrl_core.artifacts.store import MANIFEST
from hacrl_core.contracts.manifest import Manifest
from hacrl_core.errors import ArtifactError

SCHEME = "hacrl-store"
PATIENCE = 10  # iterations without an evaluation before versions are registered all the same
_PAGE = 1000


class StoreRepository(LocalArtifactRepository):  # type: ignore[misc]
    """A folder of the store under a name that MLflow's servers accept: they refuse plain paths. Where the store is not mounted, it is not found."""

    def __init__(self, artifact_uri: str, *args: Any, **more: Any) -> None:
        super().__init__(artifact_uri.removeprefix(f"{SCHEME}://"), *args, **more)


class Registry:
    """Fed with a campaign's entries in their order. Versions are registered when something new is known of them, an evaluation, or every
    ten iterations: what a keep policy collects in between never gets there."""

    def __init__(self, client: Any, history: History, uri: str, runs: dict[str, str]) -> None:
        self._client, self._runs, self._config, self._store = client, runs, history.config, history.store
        self._through_server = uri.startswith(("http://", "https://"))
        self._known: dict[str, dict[str, int]] = {}  # model → key of the artifact → MLflow's number
        self._best: dict[str, int | None] = {}  # model → number that has the alias
        # agent → iterations behind it → (stage, key); agent, iterations → benchmark → accuracy
        self._versions = {a: {n: (e.stage, e.key) for n, e in enumerate(history.versions[a])} for a in history.agents}
        self._accuracy: dict[tuple[str, int], dict[str, float]] = {}
        for agent in history.agents:
            for benchmark in history.benchmarks:
                for step, value in history.accuracy(agent, benchmark):
                    number = int(step) - self._config.agents[agent].joins
                    self._accuracy.setdefault((agent, number), {})[benchmark] = value
        self._waiting = 0

    def log(self, entries: Iterable[Entry]) -> None:
        evaluated = False
        for entry in entries:
            if entry.agent not in self._config.agents:
                continue
            if entry.stage in (*ORIGINS, "update"):
                number = 0 if entry.stage in ORIGINS else self._number(entry) + 1
                self._versions[entry.agent][number] = (entry.stage, entry.key)
                self._waiting = max(self._waiting, 1) + 1
            elif entry.stage == "evaluate" and (value := self._measured(entry)) is not None:
                self._accuracy.setdefault((entry.agent, self._number(entry)), {})[entry.variant] = value
                evaluated = True
        if evaluated or self._waiting > PATIENCE * len(self._config.agents):
            self.flush()

    def flush(self) -> None:
        """Register what is kept and not there yet, take out what is no longer kept, set the alias."""
        self._waiting = 0
        for agent, versions in self._versions.items():
            if not versions:
                continue
            model = self._model(agent)
            known = self._registered(model)
            for number, (stage, key) in sorted(versions.items()):
                kept = self._is_kept(stage, key)
                if kept and key not in known:
                    self._create(agent, number, stage, key)
                elif not kept and key in known:
                    self._client.delete_model_version(model, str(known.pop(key)))
            newest = versions[max(versions)]
            # MLflow's own @latest is the highest number; a campaign may come back to settings, and versions, it had before.
            if newest[1] in known and known[newest[1]] < max(known.values()):
                self._create(agent, max(versions), *newest)
            self._mark_best(agent)

    def _create(self, agent: str, number: int, stage: str, key: str) -> None:
        manifest, model = self._store.manifest(stage, key), self._model(agent)
        folder = self._store.folder(stage, key)
        done = self._client.create_model_version(
            model,
            source=f"{SCHEME}://{folder}" if self._through_server else folder.as_uri(),
            run_id=self._runs[agent],
            tags=self._tags(agent, number, manifest, folder),
            description=f"{self._config.name}/{agent} after {number} iterations. "
            f"Plain checkpoint: hacrl export {self._config.name}/{agent}@{number} DIR",
            await_creation_for=0,
        )
        self._known[model][key] = int(done.version)

    def _tags(self, agent: str, number: int, manifest: Manifest, folder: Path) -> dict[str, str]:
        found = {
            "hacrl.campaign": self._config.name,
            "hacrl.agent": agent,
            "hacrl.iteration": str(number + self._config.agents[agent].joins),
            "hacrl.version": str(number),
            "hacrl.key": manifest.key,
            "hacrl.content": manifest.content_digest,
            "hacrl.parent": manifest.identity.inputs.get("agent", ""),  # content of the version it was made from
            "hacrl.algorithm": self._config.preset,
            "hacrl.folder": str(folder),
            "hacrl.commit": manifest.provenance.commit,
        }
        return {name: value for name, value in found.items() if value}

    def _mark_best(self, agent: str) -> None:
        """The alias, and the accuracy beside the version; the later of equals, as ``hacrl export`` chooses."""
        wanted = {benchmark.name for benchmark in self._config.evaluate.benchmarks}
        means = {
            number: statistics.fmean(found.values())
            for (who, number), found in self._accuracy.items()
            if who == agent and found.keys() == wanted and number in self._versions[agent]
        }
        if not means:
            return
        model, best = self._model(agent), max(means, key=lambda number: (means[number], number))
        version = self._known[model].get(self._versions[agent][best][1])  # None: not kept, and nobody else is the best
        if version is not None and self._best.get(model) != version:
            self._client.set_registered_model_alias(model, "best", str(version))
            self._client.set_model_version_tag(model, str(version), "hacrl.accuracy", f"{means[best]:.4f}")
        self._best[model] = version

    def _registered(self, model: str) -> dict[str, int]:
        """By key; asked for once, then kept up to date by us: a campaign has one writer."""
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

    def _measured(self, entry: Entry) -> float | None:
        try:
            return self._store.manifest(entry.stage, entry.key).metrics.get(f"evaluate/{entry.variant}/accuracy")
        except ArtifactError:
            return None

    def _is_kept(self, stage: str, key: str) -> bool:
        folder = self._store.folder(stage, key)
        return (folder / MANIFEST).exists() and not self._store.is_collected(stage, key)

    def _model(self, agent: str) -> str:
        return f"{self._config.name}.{agent}"

    def _number(self, entry: Entry) -> int:
        return (entry.iteration or 0) - self._config.agents[entry.agent].joins
