"""The base of every config model: frozen, an unknown key is an error, and each field says whether it is identity.

A stage's key is a hash of what decides its artifact. By default every field of a config does. A field that does not
says so where it is declared, once::

    token_budget: Annotated[PositiveInt, NotIdentity] = 4096
    own: Annotated[Literal["scored", "sampled"], IdentityUnlessDefault] = "scored"
"""

from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo


class _Marker(Enum):
    NOT_IDENTITY = "not identity"
    IDENTITY_UNLESS_DEFAULT = "identity unless it has its default"


# The field changes speed, memory, placement or what is shown, and never the content of an artifact.
NotIdentity = _Marker.NOT_IDENTITY
# The field was added after artifacts without it had been made. Leaving its default out keeps their keys valid.
IdentityUnlessDefault = _Marker.IDENTITY_UNLESS_DEFAULT


def _with_float64(device: Any) -> Any:
    if device == "mps":
        raise ValueError("mps has no float64, which sampling, ratios and the loss are computed in; set device: cpu")
    return device


# A name of torch's for the device that an agent runs on.
Device = Annotated[str, BeforeValidator(_with_float64)]


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class StrictConfig(StrictModel):
    """Settings of a user or of a stage; knows which of them decide what an artifact contains."""

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide an artifact's content, as JSON values: all fields not marked otherwise."""
        dumped = self.model_dump(mode="json")
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if NotIdentity in field.metadata or (IdentityUnlessDefault in field.metadata and _is_default(value, field)):
                dumped.pop(name, None)
            else:
                dumped[name] = _identity_of(value, dumped[name])
        return dumped


def _is_default(value: Any, field: FieldInfo) -> bool:
    return bool(value == field.get_default(call_default_factory=True, validated_data={}))


def _identity_of(value: Any, dumped: Any) -> Any:
    """The JSON form of a field's value, with nested models reduced to their identity."""
    if isinstance(value, StrictConfig):
        return value.identity()
    if isinstance(value, tuple | list):
        return [_identity_of(item, plain) for item, plain in zip(value, dumped, strict=True)]
    if isinstance(value, dict):
        return {key: _identity_of(item, dumped[key]) for key, item in value.items()}
    return dumped
