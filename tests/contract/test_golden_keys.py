"""Literal identities and keys of all nine stages. A key that changes without need recomputes every user's campaigns.

``golden_keys.json`` holds, for some campaigns, each call's identity and key, and for each stage the settings that it
reads and the fields of its identity. Nothing runs: the artifact that a call would make has the sha256 of the call's
label as its content digest, so an identity's inputs are written as the labels of the calls they come from. Datasets
and checkpoints that are not in the repository have fixed digests.

If this fails, keys of users' artifacts are about to change. Decide what you want before anything else:

- The setting changes no result (speed, memory, display): keep it out of the identity.
- It changes results only where it is set: leave it out while it has its default, as ``ScoreConfig.own`` does.
- The same inputs give another artifact now: raise the stage's version.

Where keys are meant to change, or a setting that changes no result was added, renew the file, which shows every
difference first: ``python tests/contract/test_golden_keys.py --accept-new-keys``. It is no remedy for a refactoring
that fails here.
"""

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden_keys.json")
RENEW = "python tests/contract/test_golden_keys.py --accept-new-keys"
STAGES = {"adopt", "warmstart", "sample", "generate", "verify", "credit", "score", "update", "evaluate"}
ROLES = {"agent", "sampler", "prompts", "rollouts", "verdicts", "scores", "credit", "previous", "reference"}

# Campaigns by name: the config and what is changed in it. {folder} is a user's checkpoint (see ``foreign_files``).
CAMPAIGNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "demo": ("configs/demo.yaml", ("iterations=2",)),
    # Homes made before update.ranks: one process each, and adapters for the large agent.
    "paper pair on vLLM": (
        "configs/paper/qwen3-4b-llama3.2-3b.yaml",
        (
            "iterations=2",
            "agents={qwen3-4b-base: {checkpoint: {path: Qwen/Qwen3-4B-Base, stop_tokens: ['<|im_end|>']}}, "
            "llama3.2-3b: {checkpoint: {path: meta-llama/Llama-3.2-3B-Instruct}}}",
        ),
    ),
    "paper pair with LoRA, problems from a file": (
        "configs/paper/qwen3-4b-8b-base.yaml",
        (
            "iterations=1",
            "problems={kind: dataset, path: data/problems.jsonl}",
            "evaluate.benchmarks=[math500]",
            "agents.qwen3-4b-base.checkpoint.revision=906bfd4b",
            "agents.qwen3-4b-base.update={}",
            "agents.qwen3-8b-base.update={lora: {rank: 64, alpha: 128}, learning_rate: 1.0e-5}",
        ),
    ),
    "GGUF on vLLM, tiny agent on the built-in engine": ("configs/demo-real-vllm.yaml", ("iterations=1",)),
    "GSPO, twice the samples": ("configs/demo.yaml", ("iterations=1", "algorithm={preset: gspo_x2}")),
    "GSPO, prompts without signal again": (
        "configs/demo.yaml",
        ("iterations=1", "algorithm={preset: gspo}", "resample=1"),
    ),
    "checkpoint folder, LoRA, own verifier, what is off by default": (
        "configs/demo.yaml",
        (
            "iterations=2",
            "seed=3",
            "problems.size=64",
            "agents.ada.warmstart=null",
            "agents.ada.checkpoint={path: '{folder}', stop_tokens: [END], add_bos: true}",
            "agents.ada.chat_template='{{ messages[0].content }}'",
            "agents.ben.joins=1",
            "agents.ben.chat_template='{{ messages[0].content }}!'",
            "agents.ben.generate={engine: {dtype: bfloat16}}",
            "agents.ada.score={own: sampled}",
            "agents.ben.update={lora: {rank: 4, alpha: 8, target_modules: [q_proj, v_proj]}, warmup_updates: 5}",
            "generate.stop_strings=['###']",
            "verify={verifier: 'golden_verifier:check', format_reward: 0.1}",
            "verify.overlong={max_tokens: 48, buffer_tokens: 8}",
            "algorithm={preset: hacpo_calibrated, kl_coefficient: 0.001}",
            "divergence={on_nonfinite: skip, on_verifier_failure: skip}",
            "evaluate.benchmarks=[{name: sampled, problems: {kind: arithmetic, split: held_out, size: 8}, samples: 4, "
            "temperature: 0.7, top_p: 0.9, ks: [1, 2], max_tokens: 48, tolerance: 0.01}]",
        ),
    ),
}


# -- the calls of a campaign as plain data -------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One stage call: all settings that the stage gets, its identity and its key."""

    settings: dict[str, Any]
    identity: dict[str, Any]  # as hashed, but inputs by label instead of digest
    key: str


def build_calls(path: Path, overrides: list[str]) -> dict[str, Call]:
    """Every stage call of the campaign by label.

    THE ADAPTER: the only code here that knows how the project builds calls and keys. Whoever changes how calls are
    built changes this function and nothing else in this file.
    """
    import flows.stage_calls
    from flows.campaign import run_campaign
    from flows.run.runner import Done
    from hacrl_core.artifacts import ArtifactRef
    from hacrl_core.artifacts.sources import PACKAGE, source_digest
    from hacrl_core.config.campaign import CampaignConfig
    from hacrl_core.config.loading import load_config
    from hacrl_core.config.problems import ArithmeticProblems
    from hacrl_core.problems import ProblemSet, load_problems
    from stages.spec import Outcome, find_stage

    found: dict[str, Call] = {}
    labels: dict[str, str] = {}  # by content digest

    class Recorder:
        def submit(self, planned: Any) -> Any:
            call = planned.bound()
            stage = find_stage(call.stage)
            identity = stage.identity(call)
            raw = identity.model_dump()
            raw["inputs"] = {role: labels[digest] for role, digest in raw["inputs"].items()}
            assert call.label not in found, f"two calls have the label {call.label}"
            settings = call.config.model_dump(mode="json")
            found[call.label] = Call(settings, _json_of(raw), identity.key)
            digest = sha256(call.label)
            labels[digest] = call.label
            ref = ArtifactRef(call.stage, identity.key, digest, Path("nowhere"))
            return Done(planned, Outcome(ref, True, 0.0, {}))

        def iteration_done(self, iteration: int) -> None:
            pass

    def problems(config: Any) -> Any:
        """Arithmetic is made by code; a dataset would have to be downloaded."""
        if isinstance(config, ArithmeticProblems):
            return load_problems(config)
        return ProblemSet((), sha256(getattr(config, "name", None) or config.hub or str(config.path)))

    def source(checkpoint: Any) -> str:
        """A hub id is not looked up, a folder is read; a package need not be installed."""
        return sha256(checkpoint.path) if checkpoint.path.startswith(PACKAGE) else source_digest(checkpoint)

    config = load_config(path, CampaignConfig, overrides)
    with (
        mock.patch.object(flows.stage_calls, "load_problems", problems),
        mock.patch.object(flows.stage_calls, "source_digest", source),
    ):
        calls = flows.stage_calls.StageCalls(config, problems(config.problems).content_digest)
        run_campaign(config, calls, Recorder())
    return found


# -- what they are compared with -----------------------------------------------------------------------------


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def canonical(value: Any) -> str:
    """Written here once more, so that nobody changes the text that is hashed without noticing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def key_of(identity: Mapping[str, Any]) -> str:
    """The key of a stored identity, by nothing but the standard library."""
    digests = {role: sha256(label) for role, label in identity["inputs"].items()}
    return sha256(canonical({**identity, "inputs": digests}))


@contextmanager
def foreign_files() -> Iterator[Path]:
    """What a user brings: a checkpoint's folder, and a module with a verifier that Python finds."""
    with TemporaryDirectory() as name:
        folder, modules = Path(name) / "checkpoint", Path(name) / "modules"
        folder.mkdir()
        modules.mkdir()
        (folder / "config.json").write_text("{}\n")
        (folder / "model.safetensors").write_bytes(bytes(range(16)))
        (modules / "golden_verifier.py").write_text("def check(response, gold):\n    return gold in response\n")
        sys.path.insert(0, str(modules))
        importlib.invalidate_caches()
        try:
            yield folder
        finally:
            sys.path.remove(str(modules))


def current() -> dict[str, dict[str, Call]]:
    with foreign_files() as folder:
        return {
            name: build_calls(ROOT / path, [text.replace("{folder}", str(folder)) for text in overrides])
            for name, (path, overrides) in CAMPAIGNS.items()
        }


def as_golden(campaigns: Mapping[str, Mapping[str, Call]]) -> dict[str, Any]:
    """What belongs into the file."""
    return {
        "calls": {
            name: {label: {"key": call.key, "identity": call.identity} for label, call in calls.items()}
            for name, calls in campaigns.items()
        },
        "identity_fields": _fields(campaigns, lambda call: call.identity),
        "settings": _fields(campaigns, lambda call: call.settings),
    }


def _fields(campaigns: Mapping[str, Mapping[str, Call]], part: Any) -> dict[str, list[str]]:
    """The dotted paths of each stage, over all of its calls in all campaigns."""
    found: dict[str, set[str]] = {stage: set() for stage in sorted(STAGES)}
    for calls in campaigns.values():
        for call in calls.values():
            found[call.identity["stage"]] |= {_without_names(path) for path in flatten(part(call))}
    return {stage: sorted(paths) for stage, paths in found.items()}


def _without_names(path: str) -> str:
    """Keys that a user chooses are one field, ``problems.kinds.*``; so are inputs by agent, ``inputs.rollouts/*``."""
    parts = path.split(".")
    for place, part in enumerate(parts[:-1]):
        if part in {"kinds", "levels", "mixture", "chat_templates", "tags"}:
            return ".".join([*parts[: place + 1], "*"])
    if path.startswith("inputs."):
        role, slash, _ = path.removeprefix("inputs.").partition("/")
        # The sample stage's inputs are agents by name, without a role.
        return f"inputs.{role}{slash and '/*'}" if role in ROLES else "inputs.*"
    return path


def flatten(value: Any, path: str = "") -> dict[str, str]:
    """Dotted path → JSON text: 1, 1.0 and true are three values here, as they are in a key."""
    if isinstance(value, dict) and value:
        return {
            where: text
            for name, item in value.items()
            for where, text in flatten(item, f"{path}.{name}" if path else str(name)).items()
        }
    return {path: canonical(value)}


def differences(golden: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Field by field; a change that several calls have in common is one line."""
    lines = [f"{label}: is no longer called" for label in golden.keys() - now.keys()]
    lines += [f"{label}: is a new call" for label in now.keys() - golden.keys()]
    changes: dict[str, list[str]] = {}
    for label in [label for label in golden if label in now]:
        before, after = flatten(golden[label]["identity"]), flatten(now[label]["identity"])
        for field in sorted(before.keys() | after.keys()):
            old, new = before.get(field, "absent"), after.get(field, "absent")
            if old != new:
                stage = now[label]["identity"]["stage"]
                changes.setdefault(f"{stage}: {field}: {old} → {new}", []).append(label)
        if before == after and golden[label]["key"] != now[label]["key"]:
            changes.setdefault("the same identity is hashed into another key", []).append(label)
    for change, labels in changes.items():
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        lines.append(f"{change}   ({', '.join(labels[:3])}{more})")
    return sorted(lines)


def _json_of(value: Any) -> Any:
    """As a file would give it back: no tuples."""
    return json.loads(canonical(value))


# -- the tests -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return as_golden(current())


def test_every_stage_every_engine_and_both_scores_are_pinned(golden: dict[str, Any]) -> None:
    calls = [call["identity"] for campaign in golden["calls"].values() for call in campaign.values()]
    assert set(golden["calls"]) == set(CAMPAIGNS)
    assert {call["stage"] for call in calls} == STAGES
    engines = {call["config"]["generate"]["engine"]["kind"] for call in calls if call["stage"] == "generate"}
    assert engines == {"builtin", "vllm"}
    assert {call["config"]["is_reference"] for call in calls if call["stage"] == "score"} == {True, False}


def test_pinned_keys_follow_from_pinned_identities(golden: dict[str, Any]) -> None:
    for name, calls in golden["calls"].items():
        for label, call in calls.items():
            assert key_of(call["identity"]) == call["key"], f"{name}: {label}: {GOLDEN.name} was edited by hand"


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_identities_and_keys_are_the_pinned_ones(golden: dict[str, Any], now: dict[str, Any], name: str) -> None:
    found = differences(golden["calls"][name], now["calls"][name])
    assert not found, (
        f"\n{name}: {len(found)} differences from the pinned identities; users' campaigns would be computed again:\n  "
        + "\n  ".join(found)
        + f"\nThe docstring of {Path(__file__).name} says what to do."
    )


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_no_field_enters_or_leaves_an_identity_unnoticed(
    golden: dict[str, Any], now: dict[str, Any], stage: str
) -> None:
    before, after = set(golden["identity_fields"][stage]), set(now["identity_fields"][stage])
    assert after == before, (
        f"\nthe identity of stage {stage} has other fields than pinned: "
        f"new {sorted(after - before)}, gone {sorted(before - after)}.\n"
        "Every key of the stage changes with that, and every campaign of every user is computed again.\n"
        "- If the setting changes no result, keep it out of the identity: mark the field NotIdentity, or leave it out "
        "in the stage's identity().\n"
        "- If it changes results only where it is set, leave it out while it has its default.\n"
        "- If the same inputs give another artifact now, raise the stage's version.\n"
        f"Only if new keys are what you want: {RENEW}"
    )


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_no_setting_reaches_a_stage_unnoticed(golden: dict[str, Any], now: dict[str, Any], stage: str) -> None:
    """The opposite danger: two values of a setting that is not in the identity share one artifact."""
    before, after = set(golden["settings"][stage]), set(now["settings"][stage])
    fields = {field.removeprefix("config.") for field in now["identity_fields"][stage]}
    beside = sorted(path for path in after - before if path not in fields)
    assert after == before, (
        f"\nstage {stage} is given other settings than pinned: "
        f"new {sorted(after - before)}, gone {sorted(before - after)}; new and not in the identity: {beside}.\n"
        "A setting that is not in the identity must change no result: all of its values share one key.\n"
        f"If that is so, and the tests of the identities pass: {RENEW}"
    )


# -- renewing ------------------------------------------------------------------------------------------------


def written(found: Mapping[str, Any]) -> str:
    """A line for each call and each field: what changes shows in a diff."""

    def block(value: Any, depth: int) -> str:
        if depth == 0 or not isinstance(value, dict | list):
            return json.dumps(value, ensure_ascii=False)
        lines = (
            [f"{json.dumps(name, ensure_ascii=False)}: {block(item, depth - 1)}" for name, item in value.items()]
            if isinstance(value, dict)
            else [block(item, depth - 1) for item in value]
        )
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        inside = ",\n".join(" " + line.replace("\n", "\n ") for line in lines)
        return f"{opening}\n{inside}\n{closing}"

    return block(found, 3) + "\n"


def main() -> None:
    found = as_golden(current())
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"calls": {}}
    for name in {**known["calls"], **found["calls"]}:
        for line in differences(known["calls"].get(name, {}), found["calls"].get(name, {})):
            print(f"{name}: {line}")
    if sys.argv[1:] != ["--accept-new-keys"]:
        raise SystemExit(f"nothing was written; if these keys are meant to change: {RENEW}")
    GOLDEN.write_text(written(found))
    print(f"pinned {sum(len(calls) for calls in found['calls'].values())} calls of {len(found['calls'])} campaigns")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
