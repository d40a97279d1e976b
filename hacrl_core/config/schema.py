"""JSON schemas of the files that a user writes: a campaign's and a sweep's.

They accept what the loader accepts: ``extends``, a preset's bare name where a mapping could stand, settings that come
from the extended file, and ``null``, which removes one of those. So only a file that extends nothing must have all
required keys, and only at its top.
"""

from typing import Any, get_args

from hacrl_core.config.algorithm import PRESETS, HacpoConfig
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.problems import PresetName
from hacrl_core.config.sweep import SweepConfig

Schema = dict[str, Any]
_EXTENDS = {"type": "string", "description": "Another file, relative to this one, that these settings are merged over."}
# An agent's own values of these sections have the keys of the campaign's sections.
_OWN = {"algorithm": "Algorithm", "generate": "GenerateConfig", "score": "ScoreConfig", "update": "UpdateConfig"}


def campaign_schema() -> Schema:
    """Return the JSON schema of a campaign's YAML file."""
    schema = CampaignConfig.model_json_schema()
    definitions, properties = schema["$defs"], schema["properties"]
    definitions["Algorithm"] = _algorithm()
    properties["algorithm"] = _described("Algorithm", properties["algorithm"])
    agent = definitions["AgentConfig"]["properties"]
    for section, definition in _OWN.items():
        agent[section] = _described(definition, agent[section])
    for holder in (properties, definitions["BenchmarkConfig"]["properties"]):
        holder["problems"] = _or_name(holder["problems"], ["arithmetic", *get_args(PresetName)])
    benchmark = _or_name({"$ref": "#/$defs/BenchmarkConfig"}, list(get_args(PresetName)))
    benchmarks = definitions["EvaluateConfig"]["properties"]["benchmarks"]
    benchmarks |= {"anyOf": [benchmark, {"type": "array", "items": benchmark}]}
    schedule = properties["schedule"]
    schedule["anyOf"] = [schedule["items"], {"type": "array", "items": schedule["items"]}]
    for listed in (benchmarks, schedule):
        del listed["type"], listed["items"]
    for definition in definitions.values():
        definition.pop("required", None)
        _any_kind(definition)
    return _of_a_file(schema)


def sweep_schema() -> Schema:
    """Return the JSON schema of a sweep's YAML file."""
    return _of_a_file(SweepConfig.model_json_schema())


def _any_kind(definition: Schema) -> None:
    """Let a value leave its kind to what it extends, though it then may fit more than one kind, in place."""
    for value in definition.get("properties", {}).values():
        if "oneOf" in value:
            value["anyOf"] = value.pop("oneOf")


def _algorithm() -> Schema:
    schema = HacpoConfig.model_json_schema()
    preset = {"enum": list(PRESETS), "default": "hacpo", "description": "The method that the settings below change."}
    return {**schema, "properties": {"preset": preset, **schema["properties"]}}


def _described(definition: str, instead_of: Schema) -> Schema:
    return {"$ref": f"#/$defs/{definition}", "description": instead_of["description"]}


def _or_name(schema: Schema, names: list[str]) -> Schema:
    """Allow a name where the schema wants a mapping; the description stays on top, where editors show it."""
    inner = {key: value for key, value in schema.items() if key not in ("description", "title")}
    described = {"description": schema["description"]} if "description" in schema else {}
    return {**described, "anyOf": [{"enum": names}, inner]}


def _of_a_file(schema: Schema) -> Schema:
    required = schema.pop("required")
    for holder in (schema, *schema.get("$defs", {}).values()):
        _removable(holder)
    schema["properties"]["extends"] = _EXTENDS
    schema["anyOf"] = [{"required": ["extends"]}, {"required": required}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _removable(schema: Schema) -> None:
    """Allow null for each of an object's values, in place."""
    for holder in (schema.get("properties", {}), schema.get("patternProperties", {})):
        for key, value in holder.items():
            _removable(value)
            holder[key] = _or_null(value)
    if isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = _or_null(schema["additionalProperties"])


def _or_null(schema: Schema) -> Schema:
    on_top = {key: value for key, value in schema.items() if key in ("description", "title", "default")}
    inner = {key: value for key, value in schema.items() if key not in on_top}
    return {**on_top, "anyOf": [inner, {"type": "null"}]} if inner else schema
