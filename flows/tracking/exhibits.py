"""What MLflow shows of a campaign beside its metrics: datasets, a table of sample rollouts, figures and the report.

Files replace those of the same name, and inputs merge by their digest, so replaying leaves no duplicates.
"""

import getpass
import json
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from flows.record.history import History
from flows.record.record import Entry
from flows.report.charts import current_learning_curves
from flows.report.examples import examples
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.manifest import Manifest
from hacrl_core.errors import ArtifactError

TABLE = "rollouts.json"
PARENT = ""
# With this tag MLflow opens the experiment as training, not as chat.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
# What generate counts, as metrics of its manifest.
WRITTEN = ("responses", "tokens")
# In the table of sample rollouts.
_PROMPTS = 12


def run_tags(config: CampaignConfig, agent: str) -> dict[str, str]:
    """Return the tags that MLflow shows at the head of a run: a description, the user and the source."""
    settings = config.agents.get(agent)
    if settings is None:
        agents = ", ".join(config.agents)
        about = (
            f"Campaign **{config.name}**: {agents} learn together with {config.preset}, {config.iterations} iterations."
        )
    else:
        origin = "a warm start" if settings.checkpoint is None else settings.checkpoint.path
        model = f"{config.name}.{agent}"
        about = f"Agent **{agent}** of the campaign **{config.name}**, from {origin}. Its versions: model `{model}`."
    report = f"`report.html` among the artifacts of the campaign's run, or `hacrl report {config.name}`"
    return {
        "mlflow.note.content": f"{about}\n\nCharts and examples: {report}.",
        "mlflow.source.name": "hacrl run",
        "mlflow.user": getpass.getuser(),
        "hacrl.algorithm": config.preset,
    }


class Gallery:
    """The exhibits of one campaign. It starts with the campaign's history and is fed with new entries."""

    def __init__(self, client: Any, history: History, runs: dict[str, str], folder: Path) -> None:
        """``folder`` is the campaign's own, where its picture is."""
        self._client = client
        self._folder = folder
        self._runs = runs
        self._config = history.config
        self._store = history.store
        self._entries = {finished.entry.label: finished.entry for finished in history.finished}
        self._inputs: set[tuple[str, str]] = set()
        # Iteration → agent and attempt → when it was generated, responses, tokens.
        self._wrote: dict[int, dict[tuple[str, str], tuple[float, ...]]] = {}

    def log(self, entries: Sequence[Entry]) -> None:
        """Send new datasets, and the table of rollouts after an evaluation."""
        self._entries.update({entry.label: entry for entry in entries})
        self._log_inputs(entries)
        if any(entry.stage == "evaluate" and entry.iteration for entry in entries):
            self._log_table(self._history())

    def finish(self, history: History | None = None) -> None:
        """Send everything: datasets, table, figures and report. ``history`` is that of all entries, if it is known."""
        history = history or self._history()
        self._log_inputs(self._entries.values())
        self._log_table(history)
        self._log_figures(history)

    # -- datasets --------------------------------------------------------------------------------------------------

    def _log_inputs(self, entries: Iterable[Entry]) -> None:
        """Send the problems of training and of each benchmark, by the digests that the stages recorded."""
        fresh = []
        for entry in entries:
            if entry.stage not in ("sample", "evaluate"):
                continue
            manifest = self._manifest(entry)
            if manifest is None:
                continue
            digest = str(manifest.identity.config.get("content_digest", ""))
            name = entry.variant if entry.stage == "evaluate" else "training problems"
            if digest and (name, digest) not in self._inputs:
                self._inputs.add((name, digest))
                fresh.append(self._dataset(name, digest, entry.stage, manifest.metrics))
        for run in self._runs.values() if fresh else ():
            self._client.log_inputs(run, datasets=fresh)

    def _dataset(self, name: str, digest: str, stage: str, metrics: dict[str, float]) -> Any:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if stage == "sample":
            problems: Any = self._config.problems
        else:
            problems = next((b.problems for b in self._config.evaluate.benchmarks if b.name == name), None)
        settings = {} if problems is None else problems.model_dump(mode="json", exclude_none=True)
        rows = metrics.get(f"evaluate/{name}/problems")
        dataset = Dataset(
            name=name,
            # MLflow takes no more than 36 characters.
            digest=digest[:32],
            source_type="hacrl",
            source=json.dumps(settings),
            profile=json.dumps({"num_rows": int(rows)}) if rows else None,
        )
        context = "training" if stage == "sample" else "evaluation"
        return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])

    # -- cost ------------------------------------------------------------------------------------------------------

    def costs(self, entries: Sequence[Entry]) -> Iterable[tuple[str, Any]]:
        """Yield responses and tokens up to an iteration, of each agent and of all, to plot accuracy against."""
        from mlflow.entities import Metric

        self._entries.update({entry.label: entry for entry in entries})
        fresh = {entry.iteration for entry in entries if entry.stage == "generate" and entry.iteration is not None}
        if not fresh:
            return
        for entry in entries if self._wrote else self._entries.values():
            if entry.stage == "generate" and entry.iteration is not None and (manifest := self._manifest(entry)):
                wrote = tuple(manifest.metrics.get(f"generate/{name}", 0.0) for name in WRITTEN)
                at = int(manifest.provenance.finished * 1000)
                self._wrote.setdefault(entry.iteration, {})[entry.agent, entry.variant] = (at, *wrote)
        total: dict[tuple[str, str], float] = {}
        for iteration in sorted(self._wrote):
            for (agent, _), (_, *counts) in self._wrote[iteration].items():
                for who, (name, value) in product((PARENT, agent), zip(WRITTEN, counts, strict=True)):
                    total[who, name] = total.get((who, name), 0.0) + value
            # One that lacks an agent comes with that agent: each point is sent once.
            whole = set(product(self._config.present(iteration), self._config.attempts))
            if iteration in fresh and self._wrote[iteration].keys() >= whole:
                latest = int(max(at for at, *_ in self._wrote[iteration].values()))
                for (who, name), value in total.items():
                    yield who, Metric(f"cost/{name}", value, latest, iteration + 1)

    # -- table, figures, report ------------------------------------------------------------------------------------

    def _log_table(self, history: History) -> None:
        iteration, shown = examples(history, _PROMPTS)
        if not shown or iteration is None:
            return
        columns = ["prompt", "right answer", "agent", "verdict", "response", "times", "advantages", "tags", "iteration"]
        rows = [
            [
                example.question,
                example.answer,
                answers.agent,
                reply.verdict,
                reply.text,
                reply.times,
                ", ".join(f"{who} {advantage:+.2f}" for who, _, advantage in reply.advantages),
                example.tags,
                iteration + 1,
            ]
            for example in shown
            for answers in example.answers
            for reply in answers.responses
        ]
        for agent, run in self._runs.items():
            own = rows if agent == PARENT else [row for row in rows if row[2] == agent]
            self._client.log_text(run, json.dumps({"columns": columns, "data": own}), TABLE)
            # MLflow's own log_table appends, so a replay would double the rows. The tag makes the file a table.
            self._client.set_tag(run, "mlflow.loggedArtifacts", json.dumps([{"path": TABLE, "type": "table"}]))

    def _log_figures(self, history: History) -> None:
        """Send the learning curves as a picture, and the report, which MLflow shows as a page."""
        # Imports jinja2, which a cached run does without.
        from flows.report.page import PAGE, render

        parent = self._runs[PARENT]
        if (path := current_learning_curves(history, self._folder)) is not None:
            self._client.log_artifact(parent, str(path), "figures")
        self._client.log_text(parent, render(history, "complete" if history.complete else "running"), PAGE)

    def _history(self) -> History:
        return History(self._config, self._store, list(self._entries.values()))

    def _manifest(self, entry: Entry) -> Manifest | None:
        try:
            return self._store.manifest(entry.stage, entry.key)
        except ArtifactError:
            # Deleted since.
            return None
