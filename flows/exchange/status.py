"""hacrl exchange status: who has published what, how much it was, and who was refused."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from flows.exchange.mailbox import Mailbox
from flows.home import Home
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.errors import ConfigError
from hacrl_core.exchange.messages import Message, Refused

_PLACE = re.compile(r"([^/]+)/([0-9]{6})/([^/]+\.[^/]+)")
_KINDS = ("tokenizer", "commit", "answers", "claims")


@dataclass(frozen=True)
class Published:
    """What a party has in the bucket in one round."""

    kinds: frozenset[str]
    bytes: int


def published(config: CampaignConfig) -> dict[tuple[str, int], Published]:
    """Return what each party has published in each round, read from the names and sizes in the bucket."""
    if config.exchange.bucket is None:
        raise ConfigError(f"campaign {config.name}: exchange.bucket is missing; give the bucket in which parties meet")
    prefix = f"exchange/{config.name}/"
    kinds: dict[tuple[str, int], set[str]] = defaultdict(set)
    sizes: dict[tuple[str, int], int] = defaultdict(int)
    for stat in Bucket(config.exchange.bucket).list(prefix):
        # Whoever can write to the bucket can put anything beside the parties' objects.
        parts = _PLACE.fullmatch(stat.path.removeprefix(prefix))
        if parts is None or parts[1] not in config.parties:
            continue
        party, number, name = parts.groups()
        sizes[party, int(number)] += stat.size
        if name.endswith(".json"):
            kinds[party, int(number)].add(name.rsplit(".", 2)[1])
    return {place: Published(frozenset(kinds[place]), size) for place, size in sizes.items()}


def show_status(console: Console, config: CampaignConfig, home: Home) -> None:
    """Print a row per round, then the refusals that this home knows of."""
    found = published(config)
    rounds = sorted({iteration for _, iteration in found})
    table = Table(title=f"exchange of {config.name}: {len(rounds)} rounds")
    table.add_column("round", justify="right")
    for party in config.parties:
        table.add_column(party)
    for iteration in rounds:
        cells = []
        for party in config.parties:
            one = found.get((party, iteration))
            done = " ".join(kind for kind in _KINDS if one and kind in one.kinds)
            cells.append(f"{done}, {one.bytes / 1000:.1f} kB" if one else "nothing yet")
        table.add_row(str(iteration + 1), *cells)
    console.print(table)
    if rounds:
        total = sum(one.bytes for one in found.values())
        console.print(f"{total / 1000:.1f} kB in all, {total / 1000 / len(rounds):.1f} kB per round", highlight=False)
    for path in sorted((home.campaign(config.name) / "exchange" / "evidence").glob("*/why.json")):
        about = json.loads(path.read_text())
        who = f"{about['party']}: {about['reason']}: {about['what']}"
        console.print(
            f"refused in round {about['iteration'] + 1}: {who} ({path.parent})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    for line in other_stories(config, home):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def other_stories(config: CampaignConfig, home: Home) -> Iterator[str]:
    """Yield what the bucket says differently now from what this home has used: somebody told others another story.

    A message that its party has not signed is nobody's story.
    """
    mailbox = mailbox_of(config, home)
    received = home.campaign(config.name) / "exchange" / "received"
    for path in sorted(received.glob("*/*/*.json")):
        place = path.relative_to(received).as_posix()
        used = Message.model_validate(json.loads(path.read_bytes())["message"])
        try:
            now = mailbox.peek(place, used.party if used.kind != "closing" else None)
        except Refused:
            continue
        is_closing = used.kind == "closing"
        if now is None or (now.members == used.members if is_closing else now == used):
            continue
        where = "closing" if is_closing else f"{used.kind} of {used.agent}"
        yield (
            f"round {used.iteration + 1}: {now.party} has signed another {where} than the one that this home has used; "
            f"compare {path} with {place} in the bucket"
        )


def mailbox_of(config: CampaignConfig, home: Home) -> Mailbox:
    """Return a mailbox that only reads; it needs no private key."""
    if config.exchange.bucket is None:
        raise ConfigError(f"campaign {config.name}: exchange.bucket is missing; give the bucket in which parties meet")
    folder = home.campaign(config.name) / "exchange" / "audit"
    return Mailbox(config, Bucket(config.exchange.bucket), folder, "", print)
