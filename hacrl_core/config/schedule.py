"""When a campaign runs by itself, and how far it then goes."""

import re
from typing import Any, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, PositiveInt, model_validator

from hacrl_core.config.base import StrictConfig

_FIELD = re.compile(r"^[A-Za-z0-9*,/#?LW-]+$")


class ScheduleConfig(StrictConfig):
    """One appointment; a campaign may have several, e.g. short nights and a long weekend."""

    cron: str = Field(
        description="Five fields: minute, hour, day of month, month, day of week. '0 22 * * 1-5': workdays at ten in the evening."
    )
    timezone: str = Field("UTC", description="IANA name, e.g. Europe/Berlin; summer time is kept.")
    more_iterations: PositiveInt | None = Field(
        None,
        description="Run so many iterations beyond the last complete one. Empty: up to the campaign's iterations, then nothing.",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings for these runs only, as with --set: {generate.batch_size: 64}."
    )

    @model_validator(mode="after")
    def _readable(self) -> Self:
        fields = self.cron.split()
        if len(fields) != 5 or not all(_FIELD.match(field) for field in fields):
            raise ValueError(f"cron {self.cron!r} has not five fields: minute, hour, day of month, month, day of week")
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(
                f"timezone {self.timezone!r} is not known; give an IANA name such as Europe/Berlin"
            ) from None
        return self
