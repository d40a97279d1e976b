"""Every setting with its type, default and meaning, read from the config models: for the command line and the docs."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hacrl_core.config.algorithm import PRESETS, HacpoConfig
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.sweep import SweepConfig
from hacrl_core.errors import ConfigError

# The dotted keys below which any agent's name or any list's element stands.
_ANY = "*"
# It has the settings of the campaign's own problems, which are listed there.
_REPEATED = "evaluate.benchmarks.*.problems"


@dataclass(frozen=True)
class Setting:
    """One setting as a user would look it up."""

    key: str
    type: str
    default: str
    description: str
    # Where a group has several kinds (of problems, of engines): the kind that has this setting.
    of_kind: str = ""


def campaign_settings() -> list[Setting]:
    """Return every setting of a campaign's file in the order of the models, groups before their members."""
    found = list(_below(CampaignConfig, ""))
    place = next(number for number, setting in enumerate(found) if setting.key == "algorithm") + 1
    preset = Setting("algorithm.preset", " | ".join(PRESETS), "hacpo", "The method that the settings below change.")
    return [*found[:place], preset, *_below(HacpoConfig, "algorithm."), *found[place:]]


def sweep_settings() -> list[Setting]:
    """Return every setting of a sweep's file."""
    return list(_below(SweepConfig, ""))


def matching(settings: list[Setting], key: str) -> list[Setting]:
    """Return the settings whose key, or a part of it, is ``key``: ``algorithm``, ``update.lora`` or just ``alpha``."""
    exact = [s for s in settings if s.key == key or s.key.startswith(key + ".")]
    found = exact or [s for s in settings if key in s.key.split(".")] or [s for s in settings if key in s.key]
    if not found:
        raise ConfigError(f"no setting is called {key!r}; `hacrl config explain` lists them all")
    return found


def _below(model: type[BaseModel], prefix: str, of_kind: str = "") -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        key = prefix + name
        if of_kind and name == "kind":
            continue
        yield Setting(key, _type(field.annotation), _default(field), _text(field), of_kind)
        inner = [] if key == _REPEATED else list(_models(field.annotation))
        kinds = [_kind(model) for model, _ in inner]
        if len(inner) > 1:
            yield Setting(f"{key}.kind", " | ".join(kinds), kinds[0], f"Which kind of {name} this is.", of_kind)
        for (below, step), kind in zip(inner, kinds, strict=True):
            yield from _below(below, f"{key}.{step}", kind if len(inner) > 1 else of_kind)


def _kind(model: type[BaseModel]) -> str:
    return str(model.model_fields["kind"].default) if "kind" in model.model_fields else ""


def _models(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the models inside an annotation and what stands between the field's key and theirs."""
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
    elif origin in (dict, tuple, list):
        for part in get_args(annotation):
            yield from ((model, f"{_ANY}.{step}") for model, step in _models(part))
    elif origin is not None and origin is not Literal:
        for part in get_args(annotation):
            yield from _models(part)


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return " | ".join(str(part) for part in parts)
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys("null" if part is NoneType else _type(part) for part in parts))
    if origin in (tuple, list):
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return f"mapping to {_type(parts[1])}" if parts[1] is not Any else "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "group"
    names = {str: "text", int: "integer", float: "number", bool: "true | false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return ""
    return "null" if value is None else _shown(value).replace("\n", "\\n")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    return str(value.value if isinstance(value, Enum) else value)


def _text(field: FieldInfo) -> str:
    """Return the field's description; a group without one is described by its model."""
    if field.description:
        return field.description
    for model, _ in _models(field.annotation):
        return (model.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    return ""
