"""Parties: owners of agents that share answers through a bucket, and never their weights."""

import base64
import binascii
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from hacrl_core.config.base import StrictConfig
from hacrl_core.config.operation import Name, StoreConfig

KEY_PREFIX = "ed25519:"


def _public_key(value: str) -> str:
    try:
        key = base64.b64decode(value.removeprefix(KEY_PREFIX), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    # A key has one text only: its last letter has two bits to spare, and other texts would hide that two keys are one.
    if len(key) != 32 or value != KEY_PREFIX + base64.b64encode(key).decode():
        raise ValueError(
            f"{value!r} is no public key; give the line that hacrl exchange keygen printed ({KEY_PREFIX}…)"
        )
    return value


def overlap(one: str, other: str) -> bool:
    """Whether two buckets are one, or one of them lies inside the other."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _id_pattern(value: str) -> str:
    if not value or "/" in value:
        raise ValueError(f"{value!r} matches no problem: ids are never empty and have no /; give a pattern like ward-*")
    return value


class WithholdConfig(StrictConfig):
    """Problems that stay at home. They are in no round, so nothing is made of them that could leave."""

    ids: tuple[Annotated[str, AfterValidator(_id_pattern)], ...] = Field(
        (), description="Patterns of problem ids, e.g. ward-*."
    )
    tags: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="Patterns of values by tag, e.g. kind: [patient, 'trial-*']."
    )

    def matches(self, problem_id: str, tags: Mapping[str, str]) -> bool:
        """Return whether a problem with this id and these tags is withheld."""
        return any(fnmatchcase(problem_id, pattern) for pattern in self.ids) or any(
            name in tags and fnmatchcase(tags[name], pattern)
            for name, patterns in self.tags.items()
            for pattern in patterns
        )


class PartyConfig(StrictConfig):
    """One party of an exchange, as all parties know it."""

    agents: tuple[Name, ...] = Field(min_length=1, description="The agents whose weights this party has.")
    public_key: Annotated[str, AfterValidator(_public_key)] = Field(
        description="What hacrl exchange keygen printed; whatever this party publishes must be signed with it."
    )
    weight_limit: PositiveFloat | None = Field(
        None,
        description="All its answers together may weigh so many times a learner's own in an update; empty: no limit.",
    )
    withhold: WithholdConfig | None = Field(
        None, description="Problems of a dataset that this party keeps out of every round, e.g. {ids: ['ward-*']}."
    )
    share: tuple[Literal["tokenizer"], ...] = Field(
        (), description="What this party publishes besides answers: [tokenizer] or nothing."
    )


class OwnPartyConfig(StrictConfig):
    """Which party this process is. Everything else of the config is the same for all parties."""

    name: Name = Field(description="A name under parties.")
    agents: tuple[Name, ...] = Field((), description="May repeat the party's agents, as a check.")
    key: Path | None = Field(None, description="File of the private key; empty: the key itself is in HACRL_PARTY_KEY.")


class ExchangeConfig(StrictConfig):
    """How parties exchange answers. The bucket must be another one than that of ``store``, which holds weights."""

    bucket: StoreConfig | None = Field(None, description="Where parties meet, e.g. {bucket: s3://meeting/place}.")
    round_seconds: PositiveFloat | None = Field(
        None, description="A round closes with who is there after so long; empty: it waits for everyone."
    )
    staleness: Literal[0, 1] = Field(
        0, description="1: agents answer with the version before their newest, so that nobody waits for an update."
    )
    max_characters: PositiveInt = Field(20_000, description="A longer answer of another party is refused as spam.")
    alarm: float = Field(
        1e-6, gt=0, lt=0.1, description="A party is quarantined where an honest one would look like this so rarely."
    )
    poll_seconds: PositiveFloat = Field(2.0, description="How often a party looks whether something has arrived.")
