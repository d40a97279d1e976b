"""Load a frozen config from YAML and ``--set key=value``; an error is one line that names key, value and remedy."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from hacrl_core.errors import ConfigError

C = TypeVar("C", bound=BaseModel)

# Names of campaigns, agents, variants and benchmarks.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
_YAML_NAMES = {list: "list", str: "text", int: "number", float: "number", bool: "truth value"}


def load_config(path: Path, model: type[C], overrides: Sequence[str] = ()) -> C:
    """Read ``path`` (and the file it ``extends``), apply ``key.path=value`` overrides, validate."""
    raw = read_yaml(path)
    if "variants" in raw and "variants" not in model.model_fields:
        raise ConfigError(f"{path}: this is a sweep; run it with: hacrl sweep {path}")
    for text in overrides:
        apply_override(raw, text)
    return validate(raw, model, str(path))


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read one YAML mapping; ``extends: other.yaml`` (relative to this file) is read first and merged under it."""
    path = path.resolve() if seen else path
    if path in seen:
        raise ConfigError(f"{path}: extends itself through {' → '.join(p.name for p in seen)}; break the circle")
    try:
        raw = yaml.load(path.read_text(), _UniqueKeys)
    except OSError as problem:
        raise ConfigError(f"{path}: {problem.strerror or problem}; give the path of a campaign's YAML file") from None
    except yaml.YAMLError as problem:
        raise ConfigError(f"{path}: not valid YAML: {_yaml_fault(problem)}") from None
    if raw is None:
        raise ConfigError(f"{path}: the file is empty; `hacrl config schema` lists the settings")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a {_YAML_NAMES.get(type(raw), 'value')}, not settings of the form key: value")
    base = raw.pop("extends", None)
    if base is None:
        return raw
    return merge(read_yaml(path.parent / str(base), (*seen, path.resolve())), raw)


def _yaml_fault(problem: yaml.YAMLError) -> str:
    """Return the fault in one line; the text has no file name of its own, and ours is named before."""
    return " ".join(str(problem).split()).replace('in "<unicode string>", ', "in ")


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings key by key; any other value is replaced, and null removes the key."""
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def apply_override(raw: dict[str, Any], text: str) -> None:
    """Apply ``update.learning_rate=1e-4``: the value is read as YAML, and missing mappings are created."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: not of the form key=value, e.g. --set update.learning_rate=1e-4")
    place: Any = raw
    *parents, last = key.strip().split(".")
    for parent in parents:
        place = place.setdefault(parent, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise ConfigError(f"--set {text}: {parent} is not a group of settings")
    try:
        place[last] = yaml.load(value, _UniqueKeys)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text}: the value {value!r} is not valid YAML; quote it") from None


def validate(raw: Mapping[str, Any], model: type[C], source: str) -> C:
    """Validate settings; ``source`` names the file in the error message."""
    try:
        return model.model_validate(raw)
    except ValidationError as problem:
        # A misspelt key also makes the right one missing: name the cause first.
        errors = sorted(problem.errors(), key=lambda error: error["type"] != "extra_forbidden")
        first, *more = [explain(error, model) for error in errors]
        shown = "; ".join(more[:3]) + ("; …" if len(more) > 3 else "")
        raise ConfigError(f"{source}: {first}{f' (and {len(more)} more: {shown})' if more else ''}") from None


def explain(error: Any, model: type[BaseModel], where: str | None = None) -> str:
    """Put one error of pydantic's into a line that names the key, the value and the remedy.

    ``where`` is what the user calls the place, if that is not the path below ``model``.
    """
    where = _path(model, error["loc"]) if where is None else where
    if error["type"] == "extra_forbidden":
        known = list(_keys_beside(model, error["loc"]))
        close = difflib.get_close_matches(str(error["loc"][-1]), known, 1)
        if close:
            return f"{where}: unknown key; did you mean {close[0]}?"
        return f"{where}: unknown key; allowed: {', '.join(known)}" if known else f"{where}: unknown key"
    if error["type"] == "missing":
        return f"{where}: missing; it has no default"
    if error["type"] == "too_short" and not error["input"]:
        return f"{where}: is empty; give at least one"
    if error["type"] in ("model_type", "model_attributes_type"):
        return (
            f"{where}: {_short(error['input'])} is not a group of settings; {_keys_below(model, error['loc'], where)}"
        )
    if error["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return f"{where}: {_short(error['input'])} names no kind that exists; {_keys_below(model, error['loc'], where)}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}: {message}" if where else message
    if error["type"] == "string_pattern_mismatch" and error["ctx"]["pattern"] == NAME_PATTERN:
        message = "use letters, digits, _ . and -, and begin with a letter or a digit"
    return f"{where}: {_short(error['input'])} is not allowed: {message[0].lower()}{message[1:]}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def _path(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Return a place as the user writes it: without the kind that pydantic adds where there are several."""
    parts = [
        str(part)
        for depth, part in enumerate(location)
        if part != "[key]" and not _of_kind(_models_at(model, location[:depth]), part)
    ]
    return ".".join(parts)


def _keys_beside(model: type[BaseModel], location: tuple[int | str, ...]) -> Iterator[str]:
    """Yield the keys that the model allows beside an unknown one."""
    for candidate in _models_at(model, location[:-1]):
        yield from candidate.model_fields


def _keys_below(model: type[BaseModel], location: tuple[int | str, ...], where: str) -> str:
    """Say what to write where a group of settings belongs: its kinds if it has several, else its keys."""
    candidates = _models_at(model, location)
    kinds = [kind for found in candidates for kind in _kinds_of(found)]
    if kinds:
        return f"set {where}.kind to {' or '.join(kinds)}"
    return f"set the keys below it: {', '.join(key for found in candidates for key in found.model_fields)}"


def _kinds_of(model: type[BaseModel]) -> list[str]:
    """Return what ``kind`` says where this model is meant; nothing for a model without it."""
    return (
        [str(kind) for kind in get_args(model.model_fields["kind"].annotation)] if "kind" in model.model_fields else []
    )


def _models_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[type[BaseModel]]:
    """Return the models that a place may hold, found by walking down the annotations."""
    candidates: list[type[BaseModel]] = [model]
    for part in location:
        if of_kind := _of_kind(candidates, part):
            candidates = of_kind
            continue
        below: list[type[BaseModel]] = []
        for candidate in candidates:
            field = candidate.model_fields.get(str(part))
            # A dict's key does not go deeper.
            below += _models_in(field.annotation) if field else [candidate]
        candidates = below
    return candidates


def _of_kind(candidates: list[type[BaseModel]], part: int | str) -> list[type[BaseModel]]:
    """Return those of several models whose kind is this part of a place; none where it is no kind."""
    return [found for found in candidates if part in _kinds_of(found)] if len(candidates) > 1 else []


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


class _UniqueKeys(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, and reads 1e-4 as a number (YAML 1.1 wants 1.0e-4).

    A key is always a word: YAML 1.1 reads ``on`` as true, and ``notify`` has a setting of that name.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, or fail on a repeated key."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:bool":
                key_node.tag = "tag:yaml.org,2002:str"
            key = None if key_node.tag == "tag:yaml.org,2002:merge" else self.construct_object(key_node, deep)
            if key is not None and key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_UniqueKeys.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)
