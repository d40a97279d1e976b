"""How a campaign is operated: resources, tracking, retention, schedules, and what happens when training diverges."""

import re
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, PositiveInt, StringConstraints, field_validator, model_validator

from hacrl_core.config.addresses import is_http, userinfo, without_userinfo
from hacrl_core.config.base import StrictConfig
from hacrl_core.config.loading import NAME_PATTERN

# Names become parts of rollout ids, MLflow metric names and file names.
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=60)]
BUCKET_SCHEMES = ("s3", "gs", "az", "file")
# An environment variable, as a shell writes it.
_VARIABLE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")
# A part of a path that nobody would type: the secret of a web hook.
_TOKEN = re.compile(r"[A-Za-z0-9_-]{20,}")
_CRON_FIELD = re.compile(r"^[A-Za-z0-9*,/#?LW-]+$")
_CRON_RANGES = {"minute": (0, 59), "hour": (0, 23), "day of month": (1, 31), "month": (1, 12), "day of week": (0, 7)}


class RuntimeConfig(StrictConfig):
    """How the work is spread over the machine. None of it changes a result's identity."""

    threads_per_agent: PositiveInt = Field(1, description="torch threads of each agent's worker; tiny models want 1.")
    retries: int = Field(
        2, ge=0, description="How often a stage is retried when its worker dies or the machine has a transient error."
    )
    executor: Literal["local", "ray"] = Field(
        "local",
        description="Where stages run: in processes of this machine, or on the nodes of a Ray cluster (hacrl[ray]).",
    )
    address: str = Field(
        "auto", description="The Ray cluster's head, host:port; auto: RAY_ADDRESS, else the cluster of this machine."
    )
    node_store: str | None = Field(
        None,
        description="Folder of the store on each node of the cluster; {node} in it becomes the node's id. Empty: the "
        "store's own path, which all nodes must then share.",
    )
    place_seconds: float = Field(
        45.0,
        gt=0,
        description="How long a stage waits for a node that could run it to appear, before the campaign ends.",
    )
    slots: tuple[Name, ...] | None = Field(
        None,
        description="Slots to hold while the campaign runs; a campaign that wants the same ones waits. Empty: one per "
        "GPU in use.",
    )
    profile: bool = Field(
        False, description="Write a trace of what every process did, for Perfetto; the same as hacrl run --profile."
    )
    profile_ops: tuple[Literal["warmstart", "generate", "evaluate", "score", "update"], ...] = Field(
        (), description="Stages whose torch operations the trace shows too: of each, its second call in every process."
    )


class StoreConfig(StrictConfig):
    """A bucket behind the store, which machines share. Changes no result; credentials come from the environment."""

    bucket: str = Field(description="s3://bucket/prefix, gs://bucket/…, az://container/… or file:///folder.")
    endpoint: str | None = Field(
        None, description="Address of a server of your own, e.g. http://127.0.0.1:8333 for S3; empty: the cloud's."
    )
    cache_gb: float | None = Field(
        None,
        gt=0,
        description="Local files of artifacts that are in the bucket may take so much; the longest unused go first.",
    )

    @field_validator("bucket")
    @classmethod
    def _known_address(cls, value: str) -> str:
        scheme, _, rest = value.partition("://")
        if scheme not in BUCKET_SCHEMES or not rest.strip("/"):
            raise ValueError(f"{value!r} is no bucket; give s3://bucket/prefix, gs://…, az://… or file:///folder")
        if scheme == "file" and not rest.startswith("/"):
            raise ValueError(f"{value!r} is not absolute; give file:///folder with three slashes")
        if userinfo(value) is not None:
            raise ValueError("credentials in the config would be shown in reports; set them in the environment")
        return value.rstrip("/")

    @field_validator("endpoint")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and (not is_http(value) or userinfo(value) is not None):
            raise ValueError(f"{value!r} is no http:// or https:// address without a user")
        return value if value is None else value.rstrip("/")


class TrackingConfig(StrictConfig):
    """Where the campaign is mirrored into MLflow."""

    enabled: bool = Field(True, description="Mirror the manifests into MLflow.")
    uri: str | None = Field(
        None, description="MLflow tracking server; empty: MLFLOW_TRACKING_URI, else a sqlite file in the home folder."
    )
    experiment: str = Field("hacrl", description="MLflow experiment the campaign's runs go into.")
    patience_seconds: float = Field(
        60.0, gt=0, description="Longest the end of a campaign waits for MLflow. Iterations never wait."
    )

    traces: int = Field(
        2,
        ge=0,
        le=64,
        description="Responses of each agent and iteration that MLflow shows as traces with verdict, reward and "
        "advantages; 0: none. All agents' traces of an iteration answer the same prompts. After the fifth iteration, "
        "iterations that are short have none: fifteen seconds of generation lie between two that have. Cells of a "
        "sweep have none.",
    )
    system_metrics: bool = Field(
        True, description="Record CPU, memory, disk, network and GPU of this machine while the campaign runs."
    )

    @field_validator("uri")
    @classmethod
    def _without_password(cls, value: str | None) -> str | None:
        """Refuse a password: the config is shown in reports, MLflow and Prefect."""
        found = None if value is None else userinfo(value)
        if found is not None and value is not None and (found[1] or is_http(value)):
            raise ValueError(
                "a user or password in the config would be shown in reports; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the environment instead (for a database, MLFLOW_TRACKING_URI)"
            )
        return value


class EmailConfig(StrictConfig):
    """A mail server and who gets the mail."""

    to: str = Field(min_length=3, description="Address of the recipient; several with commas between.")
    server: str = Field("localhost:25", description="Mail server, host:port; port 465 speaks TLS from the start.")
    sender: str = Field("hacrl@localhost", description="Address of the sender.")
    starttls: bool = Field(False, description="Encrypt the connection after the greeting (port 587).")
    user: str | None = Field(None, description="User at the mail server; empty: without a login.")
    password_variable: str = Field(
        "HACRL_MAIL_PASSWORD", description="The environment variable with the password; the config never holds it."
    )


class NotifyConfig(StrictConfig):
    """Who is told how a campaign goes. HACRL sends it itself, so it works without any server. Changes no result."""

    on: tuple[Literal["failed", "collapsed", "best", "done"], ...] = Field(
        ("failed", "collapsed", "done"),
        min_length=1,
        description="failed: the run ended in an error; collapsed: rewards collapsed; best: an agent has a new best "
        "accuracy; done: the campaign is complete.",
    )
    url: str | None = Field(
        None,
        description="Web address that gets each message as a POST of JSON (text, event, campaign, home). Where it is "
        "secret, write $NAME for an environment variable that holds it.",
    )
    command: str | None = Field(
        None,
        description="Shell command that is run with HACRL_EVENT, HACRL_CAMPAIGN and HACRL_MESSAGE in its environment.",
    )
    email: EmailConfig | None = Field(None, description="Mail server and recipient.")

    @field_validator("url")
    @classmethod
    def _not_secret(cls, value: str | None) -> str | None:
        if value is None or _VARIABLE.fullmatch(value):
            return value
        if not is_http(value):
            raise ValueError(f"{without_userinfo(value)!r} is no http:// or https:// address and no $VARIABLE")
        if userinfo(value) is not None or "?" in value or _TOKEN.search(value.partition("://")[2].partition("/")[2]):
            raise ValueError(
                "the address looks secret, and the config is shown in reports; put it into an environment variable and "
                "write $NAME"
            )
        return value

    @model_validator(mode="after")
    def _somebody_hears(self) -> Self:
        if self.url is None and self.command is None and self.email is None:
            raise ValueError("notify says nobody to tell; give url, command or email")
        return self


class KeepConfig(StrictConfig):
    """Which versions of an agent keep their files; of the others only the manifest stays. Changes no result.

    First versions and pinned ones always keep their files.
    """

    last: PositiveInt = Field(
        2, description="The newest so many versions of each agent; training continues from the last."
    )
    best: bool = Field(
        False, description="The version that @best means: the highest mean accuracy over the campaign's benchmarks."
    )
    every: PositiveInt | None = Field(None, description="Every so many iterations one version: 10 keeps @10, @20, …")

    def keeps(self, version: int, newest: int, best: int | None) -> bool:
        """Return whether a version keeps its files; versions count completed iterations, 0 is the agent's first."""
        return (
            version == 0
            or version > newest - self.last
            or (self.best and version == best)
            or (self.every is not None and version % self.every == 0)
        )

    def count(self, iterations: int) -> int:
        """Return how many versions keep their files after so many iterations."""
        kept = sum(self.keeps(version, iterations, None) for version in range(iterations + 1))
        return min(iterations + 1, kept + self.best)


class CollapseConfig(StrictConfig):
    """When an agent's rewards count as collapsed: several iterations in a row far below its best window."""

    share: float = Field(0.2, gt=0, lt=1, description="Below this share of its best window's mean reward is too low.")
    window: PositiveInt = Field(5, description="Iterations in a window.")
    iterations: PositiveInt = Field(5, description="So many iterations in a row must be too low.")
    action: Literal["warn", "stop"] = Field("warn", description="warn: once; stop: before the next update.")


class DivergenceConfig(StrictConfig):
    """What happens when training diverges. The last good version stays current in every case."""

    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="NaN or infinity in loss, gradient or weights: stop the campaign, or publish the version unchanged "
        "and continue.",
    )
    on_verifier_failure: Literal["stop", "skip"] = Field(
        "stop",
        description="More than verify.max_error_share of an agent's answers ended in a verifier's error: stop, or skip "
        "the updates that "
        "would learn from them.",
    )
    collapse: CollapseConfig | None = Field(CollapseConfig(), description="Watch for collapsing rewards; null: do not.")


class ScheduleConfig(StrictConfig):
    """One schedule; a campaign may have several, e.g. short nights and a long weekend."""

    cron: str = Field(
        description="Five fields: minute, hour, day of month, month, day of week. '0 22 * * 1-5': workdays at 22:00."
    )
    timezone: str = Field("UTC", description="IANA name, e.g. Europe/Berlin; daylight saving time is respected.")
    more_iterations: PositiveInt | None = Field(
        None,
        description="Run so many iterations beyond the last complete one. Empty: up to the campaign's iterations.",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings for these runs only, as with --set: {generate.batch_size: 64}."
    )

    @model_validator(mode="after")
    def _readable(self) -> Self:
        fields = self.cron.split()
        if len(fields) != 5 or not all(_CRON_FIELD.match(field) for field in fields):
            raise ValueError(
                f"cron {self.cron!r} does not have five fields: minute, hour, day of month, month, day of week"
            )
        for field, (name, (low, high)) in zip(fields, _CRON_RANGES.items(), strict=True):
            # What follows a slash is a step, what follows a # a week of the month.
            wrong = [n for n in re.findall(r"(?<![/#\d])\d+", field) if not low <= int(n) <= high]
            if wrong:
                raise ValueError(f"cron {self.cron!r}: {name} {wrong[0]} is not between {low} and {high}")
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(
                f"timezone {self.timezone!r} is not known; give an IANA name such as Europe/Berlin"
            ) from None
        return self
