"""The compose file, read as docker compose reads it (merge keys, ${VARIABLE} substitution), into a strict model.

The model covers the part of the specification that the file uses. There is no container engine where the tests run, so
a typo must be caught here.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

INFRA = Path(__file__).resolve().parents[2] / "infra"
Duration = Annotated[str, StringConstraints(pattern=r"^(\d+h)?(\d+m)?(\d+s)?$", min_length=2)]
Size = Annotated[str, StringConstraints(pattern=r"^\d+(kb|mb|gb|k|m|g)$")]
Port = Annotated[str, StringConstraints(pattern=r"^127\.0\.0\.1:\d+:\d+$")]  # published on loopback only
Volume = Annotated[str, StringConstraints(pattern=r"^[\w./-]+:/[\w./-]+(:ro)?$")]
Image = Annotated[str, StringConstraints(pattern=r"^[a-z0-9./-]+:[\w.-]+$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Build(Strict):
    context: str
    dockerfile: str
    target: str


class Health(Strict):
    test: list[str]
    interval: Duration
    timeout: Duration
    retries: int
    start_period: Duration


class Logging(Strict):
    driver: Literal["json-file"]
    options: dict[str, str]


class Condition(Strict):
    condition: Literal["service_healthy", "service_started"]


class Device(Strict):
    driver: Literal["nvidia"]
    count: Literal["all"] | int
    capabilities: list[Literal["gpu"]]


class Reservations(Strict):
    devices: list[Device]


class Resources(Strict):
    reservations: Reservations


class Deploy(Strict):
    resources: Resources


class Service(Strict):
    image: Image
    build: Build | None = None
    command: list[str] | None = None
    environment: dict[str, str]
    user: Annotated[str, StringConstraints(pattern=r"^\d+:\d+$")] | None = None
    init: bool = False
    read_only: bool = False
    tmpfs: list[str] = []
    cap_drop: list[Literal["ALL"]] = []
    security_opt: list[Literal["no-new-privileges:true"]]
    restart: Literal["unless-stopped", "always", "on-failure", "no"]
    logging: Logging
    ports: list[Port] = []
    volumes: list[Volume] = []
    working_dir: str | None = None
    shm_size: Size | None = None
    stop_grace_period: Duration | None = None
    depends_on: dict[str, Condition] = {}
    healthcheck: Health | None = None
    profiles: list[str] = []
    deploy: Deploy | None = None


class Compose(Strict):
    name: str
    services: dict[str, Service]
    volumes: dict[str, None]
    x_servers: dict = Field(alias="x-servers")
    x_worker: dict = Field(alias="x-worker")


def variables() -> set[str]:
    return set(re.findall(r"\$\{(\w+)", (INFRA / "compose.yaml").read_text()))


def read_compose(values: dict[str, str]) -> Compose:
    """With the variables' values; a variable that is required and missing raises KeyError, as compose refuses."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match["name"], match["kind"], match["rest"] or ""
        if values.get(name):
            return values[name]
        if kind == ":-":
            return rest
        raise KeyError(f"{name}: {rest}")

    text = re.sub(
        r"\$\{(?P<name>\w+)(?:(?P<kind>:-|:\?)(?P<rest>[^}]*))?\}", value, (INFRA / "compose.yaml").read_text()
    )
    return Compose.model_validate(yaml.safe_load(text))
