"""Versions of agents as MLflow's logged models, which ``mlflow.transformers.load_model`` loads.

A logged model's folder has MLflow's layout: the file ``MLmodel``, the checkpoint below ``model/`` and the tokenizer
below ``components/tokenizer/``. Files that are larger than a megabyte are links into the store, so the weights are not
copied. Small files that versions of an agent have in common are hard links: who edits one in place edits all. MLflow
chooses a logged model's id; ours are found again by the artifact's key, which is a tag.
"""

import json
import os
import shutil
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flows.tracking.database import ModelDraft, create_models, mark_ready
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.manifest import Manifest

# Training state, and an adapter, whose weights are merged.
LEFT_OUT = ("training/", "adapter/")
_COPIED_BYTES = 1_000_000
_TOKENIZER = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template", "spiece")
_GENERATION = "generation_config.json"
# What decides which tokens end a response.
_OF_ITS_END = (_GENERATION, "config.json", "tokenizer_config.json", "tokenizer.json")
_PAGE = 100


@dataclass(frozen=True)
class Version:
    """A version of an agent that becomes a logged model."""

    agent: str
    number: int
    manifest: Manifest
    # The artifact's folder.
    source: Path
    tags: Mapping[str, str]


class LoggedModels:
    """The logged models of one campaign, by the key of the artifact."""

    def __init__(self, client: Any, experiment: str, config: CampaignConfig, runs: Mapping[str, str], place: Path):
        """``place`` gets the folders of models whose own place cannot be written to from here."""
        self._client = client
        self._experiment = experiment
        self._config = config
        self._runs = runs
        self._place = place
        self._known: dict[str, Any] | None = None
        self._shared = SharedFiles()

    def find(self, key: str) -> Any | None:
        """Return the logged model of an artifact; None if there is none. They are asked for once."""
        if self._known is None:
            self._known = {}
            query = f"tags.`hacrl.campaign` = '{self._config.name}'"
            token = None
            while True:
                page = self._client.search_logged_models([self._experiment], query, max_results=_PAGE, page_token=token)
                for model in page:
                    self._known[model.tags.get("hacrl.key", "")] = model
                token = page.token
                if not token:
                    break
        return self._known.get(key)

    def make(self, versions: Sequence[Version]) -> list[Any]:
        """Create the logged models of versions with their files, and link them to the runs of agent and campaign.

        They are marked ready last; one that a killed process left unready is made again.
        """
        from mlflow.entities import LoggedModelOutput

        found: dict[str, Any] = {v.manifest.key: self.find(v.manifest.key) for v in versions}
        new = [v for v in versions if found[v.manifest.key] is None or str(found[v.manifest.key].status) != "READY"]
        for version in new:
            self.forget(version.manifest.key)
        models = create_models(self._client, self._experiment, [self._draft(version) for version in new])
        links: dict[str, list[Any]] = {}
        for version, model in zip(new, models, strict=True):
            self._write(version, model)
            for run in dict.fromkeys((self._runs[version.agent], self._runs[""])):
                links.setdefault(run, []).append(LoggedModelOutput(model.model_id, self._step(version)))
        # One call for all of them: each costs a transaction.
        for run, outputs in links.items():
            self._client.log_outputs(run, outputs)
        mark_ready(self._client, models)
        made = {version.manifest.key: model for version, model in zip(new, models, strict=True)}
        if self._known is not None:
            self._known.update(made)
        return [(found | made)[version.manifest.key] for version in versions]

    def _draft(self, version: Version) -> ModelDraft:
        return ModelDraft(
            # These names take neither a dot nor a slash.
            name=f"{self._config.name}-{version.agent}@{version.number}".replace(".", "_"),
            run=self._runs[version.agent],
            tags=version.tags,
            params={"algorithm": self._config.preset, "iteration": str(self._step(version))},
        )

    def _write(self, version: Version, model: Any) -> None:
        run, template = self._runs[version.agent], self._config.agents[version.agent].template_override
        folder = self.folder(model)
        write_flavour(folder, version.source, version.manifest, model.model_id, run, template, self._shared)

    def _step(self, version: Version) -> int:
        return version.number + self._config.agents[version.agent].joins

    def measure(self, agent: str, number: int, key: str, accuracy: Mapping[str, tuple[float, int, str]]) -> None:
        """Send a version's accuracy on each benchmark: the value, when it was measured, and the problems' digest."""
        from mlflow.entities import Metric

        model = self.find(key)
        if model is None or not accuracy:
            return
        step = number + self._config.agents[agent].joins
        metrics = [
            Metric(
                key=f"accuracy/{benchmark}",
                value=value,
                timestamp=at,
                step=step,
                model_id=model.model_id,
                # A dataset is given by name and digest together.
                dataset_name=benchmark if digest else None,
                dataset_digest=digest[:32] or None,
                run_id=self._runs[agent],
            )
            for benchmark, (value, at, digest) in accuracy.items()
        ]
        self._client.log_batch(self._runs[agent], metrics=metrics)

    def forget(self, key: str) -> None:
        """Delete the logged model of an artifact, with its folder."""
        model = self.find(key)
        if model is None:
            return
        self._client.delete_logged_model(model.model_id)
        for folder in self._folders(model):
            shutil.rmtree(folder, ignore_errors=True)
        if self._known is not None:
            self._known.pop(key, None)

    def folder(self, model: Any) -> Path:
        """Return the folder of a logged model: MLflow's own where it is on this machine, else one in the home."""
        for folder in self._folders(model):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if os.access(folder, os.W_OK):
                    return folder
            except OSError:
                continue
        raise OSError(f"{self._place}: cannot be written to")

    def _folders(self, model: Any) -> list[Path]:
        address = urllib.parse.urlsplit(model.artifact_location)
        own = [Path(urllib.parse.unquote(address.path))] if address.scheme == "file" else []
        return [*own, self._place / model.model_id]


def write_flavour(
    folder: Path,
    source: Path,
    manifest: Manifest,
    model: str,
    run: str,
    chat_template: str | None,
    shared: "SharedFiles | None" = None,
) -> None:
    """Write a version as a model of MLflow's transformers flavour; ``MLmodel`` comes last."""
    weights, tokenizer = folder / "model", folder / "components" / "tokenizer"
    for place in (weights, tokenizer):
        place.mkdir(parents=True, exist_ok=True)
    taken = [output for output in manifest.outputs if not output.path.startswith(LEFT_OUT) and "/" not in output.path]
    # What is made of a version whose files are just being collected is right for no other.
    whole = all((source / output.path).exists() for output in taken)
    shared = shared if shared is not None and whole else SharedFiles()
    for output in taken:
        file, place = source / output.path, (tokenizer if output.path.startswith(_TOKENIZER) else weights) / output.path
        if output.bytes > _COPIED_BYTES or file.suffix == ".safetensors" or not file.exists():
            place.unlink(missing_ok=True)
            place.symlink_to(file.absolute())
        elif output.path != _GENERATION:
            shared.put(place, ("copy of", output.sha256), file.read_bytes)
    if chat_template is not None:
        shared.put(tokenizer / "chat_template.jinja", ("template", chat_template), chat_template.encode)
    settled = ("made of", *(f"{output.path} {output.sha256}" for output in taken if output.path in _OF_ITS_END))
    shared.put(weights / _GENERATION, settled, lambda: _generation(source))
    settings = shared.once(settled, lambda: _json(source / "config.json"))
    description = _yaml(_description(folder, settings, manifest, model, run))
    (folder / "MLmodel").unlink(missing_ok=True)
    (folder / "MLmodel").write_text(description, encoding="utf-8")


class SharedFiles:
    """Small files that versions of an agent have in common: hard links to the first of them, or copies."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, ...], Path] = {}
        self._values: dict[tuple[str, ...], dict[str, Any]] = {}

    def put(self, place: Path, content: tuple[str, ...], read: Callable[[], bytes]) -> None:
        """Put a file there. ``content`` names its bytes, which are read where no file has them yet."""
        place.unlink(missing_ok=True)
        try:
            os.link(self._places[content], place)
        except (KeyError, OSError):  # the first of them, the file was removed, or there are no links here
            place.write_bytes(read())
            self._places[content] = place

    def once(self, content: tuple[str, ...], read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what was read before for the same content."""
        if content not in self._values:
            self._values[content] = read()
        return self._values[content]


def _generation(source: Path) -> bytes:
    """Return a checkpoint's generation config with every token that ends a response."""
    return (json.dumps(_json(source / _GENERATION) | {"eos_token_id": end_tokens(source)}, indent=2) + "\n").encode()


def _description(folder: Path, settings: dict[str, Any], manifest: Manifest, model: str, run: str) -> dict[str, Any]:
    from mlflow.version import VERSION

    dtype = settings.get("dtype") or settings.get("torch_dtype")
    flavour = {
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        # Never the checkpoint's own code: only the campaign's config may allow it.
        "pipeline_model_type": "AutoModelForCausalLM",
        "source_model_name": "",
        "model_binary": "model",
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        "transformers_version": manifest.provenance.packages.get("transformers", ""),
        "code": None,
    }
    if dtype:
        flavour["torch_dtype"] = f"torch.{dtype}"
    return {
        "artifact_path": str(folder),
        "flavors": {"transformers": flavour},
        "mlflow_version": VERSION,
        "model_id": model,
        "model_uuid": model,
        "run_id": run,
    }


def _yaml(content: dict[str, Any]) -> str:
    """Return it as YAML; libyaml, where it is there, is many times as fast."""
    return str(yaml.dump(content, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False))


def end_tokens(folder: Path) -> list[int]:
    """Return every token that ends a response: those of the checkpoint's configs and the tokenizer's own."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        found += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
    text = _json(folder / "tokenizer_config.json").get("eos_token")
    text = text.get("content") if isinstance(text, dict) else text
    if text:
        tokens = _json(folder / "tokenizer.json")
        found += [added["id"] for added in tokens.get("added_tokens", []) if added.get("content") == text]
    return list(dict.fromkeys(found))


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found
