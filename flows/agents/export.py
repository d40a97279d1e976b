"""``hacrl export``: write an agent as a plain checkpoint with a model card.

The folder has what transformers and vLLM need, and nothing of this project: no optimizer, no adapter beside its merged
weights, no manifest.
"""

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from flows.agents.find import find_agent, known_campaigns
from flows.agents.gguf_file import write_gguf, write_modelfile
from flows.home import Home
from flows.record.history import History, read_history
from hacrl_core.artifacts import ArtifactRef, Store, open_store
from hacrl_core.contracts.manifest import Manifest
from hacrl_core.errors import ConfigError

# Training state, and the adapter, whose weights are merged.
LEFT_OUT = ("training/", "adapter/")


@dataclass(frozen=True)
class Exported:
    """What was written; ``name`` is campaign/agent@iterations."""

    name: str
    folder: Path
    bytes: int


def export_agent(home: Home, name: str, folder: Path, gguf: str | None = None) -> Exported:
    """Export an agent into a folder that is new or empty. It is moved there when it is complete.

    With ``gguf`` (f32 or f16) the folder also gets a GGUF file and Ollama's Modelfile.
    """
    store, folder = open_store(home.store), folder.expanduser().absolute()
    subject = find_agent(store, home, name)
    if not isinstance(subject.version, ArtifactRef):
        raise ConfigError(
            f"agent {name}: not an agent of a campaign; give campaign/agent, optionally with @best or @12 "
            f"(campaigns here: {known_campaigns(home)})"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: already exists; give a folder that is new or empty")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        # The lease keeps a clean-up from collecting it meanwhile.
        with store.reading([subject.version]):
            _copy(store.manifest(subject.version.stage, subject.version.key), subject.version.path, draft)
        _stop_tokens(draft)
        _chat_template(draft, subject.chat_template)
        if gguf is not None:
            campaign, _, agent = subject.name.partition("@")[0].partition("/")
            file = f"{agent}.gguf"
            write_gguf(draft, draft / file, gguf, subject.name)
            write_modelfile(
                draft, file, read_history(store, home.campaign(campaign)).config.generation(agent).temperature
            )
        (draft / "README.md").write_text(model_card(store, home, subject.name, subject.version), encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        os.rename(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return Exported(subject.name, folder, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))


def _copy(manifest: Manifest, source: Path, target: Path) -> None:
    """Copy the contents without the modes: weights are private in the store, a checkpoint is as open as its folder."""
    for output in manifest.outputs:
        if not output.path.startswith(LEFT_OUT):
            place = target / output.path
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / output.path, place)


def _stop_tokens(folder: Path) -> None:
    """Write all end tokens, those of the config and those of the tokenizer, where both libraries look for them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    settings, model = _json(folder / "generation_config.json"), _json(folder / "config.json")
    found: list[int] = []
    for value in (settings.get("eos_token_id"), model.get("eos_token_id"), tokenizer.eos_token_id):
        found += [i for i in (value if isinstance(value, list) else [value]) if i is not None]
    settings["eos_token_id"] = list(dict.fromkeys(found))
    if tokenizer.pad_token_id is not None:
        settings.setdefault("pad_token_id", tokenizer.pad_token_id)
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _chat_template(folder: Path, own: str | None) -> None:
    """Write the template that the campaign used instead of the tokenizer's, if it did."""
    if own is None:
        return
    (folder / "chat_template.jinja").write_text(own, encoding="utf-8")
    settings = _json(folder / "tokenizer_config.json")
    if settings.pop("chat_template", None) is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


# -- the card ---------------------------------------------------------------------------------------------------------

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
{% if base %}base_model: {{ base }}
{% endif %}
tags: [hacrl, reinforcement-learning, {{ preset }}]
---

# {{ name }}

Agent **{{ agent }}** of the campaign **{{ campaign }}** after {{ iterations }} of {{ wanted }} iterations,
trained with {{ preset }} {{ together }}.
Problems: {{ problems }}.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
messages = [{"role": "user", "content": "…"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens={{ max_tokens }})[0]))
```

With vLLM: `vllm serve .`. The chat template is the one used in training;
all end tokens are in `generation_config.json`.
{% if stop_strings %}
In training a response also ended at {{ stop_strings }}; pass them as stop strings.
{% endif %}
It was sampled in training at temperature {{ temperature }}, top-p {{ top_p }}.

## Results
{% if results %}

| benchmark | accuracy | 95 % interval | at the start |
|---|---|---|---|
{% for row in results %}
| {{ row[0] }} | {{ row[1] }} | {{ row[2] }} | {{ row[3] }} |
{% endfor %}
{% else %}

This version was not evaluated.
{% endif %}

## Lineage

| | |
|---|---|
{% for key, value in lineage %}
| {{ key }} | {{ value }} |
{% endfor %}
"""


def model_card(store: Store, home: Home, name: str, version: ArtifactRef) -> str:
    """Return the README of an exported agent: how to use it, its results, its lineage."""
    base, _, number = name.partition("@")
    campaign, _, agent = base.partition("/")
    history = read_history(store, home.campaign(campaign))
    config, manifest = history.config, store.manifest(version.stage, version.key)
    others = [other for other in config.agents if other != agent]
    checkpoint = config.agents[agent].checkpoint
    hub = checkpoint.path if checkpoint and not checkpoint.path.startswith(("/", ".", "~")) else ""
    problems = config.problems.model_dump(mode="json", exclude_none=True)
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).from_string(_CARD)
    return template.render(
        name=name,
        agent=agent,
        campaign=campaign,
        iterations=number,
        wanted=config.iterations,
        preset=config.preset,
        together=f"together with {', '.join(others)}" if others else "alone",
        base=hub,
        problems=", ".join(f"{k} {v}" for k, v in problems.items() if k in ("kind", "preset", "path", "name")),
        max_tokens=config.generate.max_tokens,
        temperature=config.generate.temperature,
        top_p=config.generate.top_p,
        stop_strings=", ".join(repr(s) for s in config.generate.stop_strings),
        results=_results(history, agent, int(number)),
        lineage=_lineage(history, agent, int(number), manifest),
    )


def _results(history: History, agent: str, number: int) -> list[tuple[str, str, str, str]]:
    step, rows = number + history.config.agents[agent].joins, []
    for benchmark in history.benchmarks:
        points = dict(history.accuracy(agent, benchmark))
        if step in points:
            low, high = (dict(history.accuracy(agent, benchmark, f"accuracy_{s}")).get(step) for s in ("low", "high"))
            interval = f"{low:.1%} to {high:.1%}" if low is not None and high is not None else ""
            rows.append((benchmark, f"{points[step]:.1%}", interval, f"{points[min(points)]:.1%}"))
    return rows


def _lineage(history: History, agent: str, number: int, manifest: Manifest) -> list[tuple[str, str]]:
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.provenance.finished))
    packages = ", ".join(f"{name} {version}" for name, version in manifest.provenance.packages.items())
    found = [
        ("campaign", history.config.name),
        ("seed", str(history.config.seed)),
        ("stage and key", f"{manifest.stage} `{manifest.key}`"),
        ("content", f"`{manifest.content_digest}`"),
        ("made from", f"`{manifest.identity.inputs['agent']}`" if "agent" in manifest.identity.inputs else "nothing"),
        ("made", made),
        ("commit", manifest.provenance.commit),
        ("packages", packages),
    ]
    source = history.config.agents[agent].checkpoint
    if source is not None:
        found.insert(2, ("first version", source.path + (f"@{source.revision}" if source.revision else "")))
    return [(key, value) for key, value in found if value]
