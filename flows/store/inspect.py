"""``hacrl store ls`` and ``du``: what is in the store, whose it is, how large and how old."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from flows.home import Home
from flows.store.survey import Campaign, campaign_places, read_place, survey
from flows.views.text import age, size_text
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.removal import last_used, size_of
from hacrl_core.artifacts.store import COLLECTED
from hacrl_core.errors import ConfigError

NOBODY = "(none)"


@dataclass
class Group:
    """Artifacts of one campaign, agent and stage."""

    campaign: str
    agent: str
    stage: str
    artifacts: int = 0
    collected: int = 0
    bytes: int = 0
    used: float = 0.0  # newest


def groups(home: Home, store: Store) -> list[Group]:
    """An artifact that two campaigns share appears with both."""
    owners: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for folder in campaign_places(home):
        campaign = read_place(home, store, folder)
        for _, agent, key in campaign.entries:
            owners[key].append((campaign.name, agent))
    found: dict[tuple[str, str, str], Group] = {}
    for folder in sorted((store.root / "objects").glob("*/*")):
        size, used = size_of(folder), last_used(folder)
        for campaign_name, agent in dict.fromkeys(owners.get(folder.name, [(NOBODY, "")])):
            place = (campaign_name, agent, folder.parent.name)
            group = found.setdefault(place, Group(*place))
            group.artifacts += 1
            group.collected += (folder / COLLECTED).exists()
            group.bytes += size
            group.used = max(group.used, used)
    return sorted(
        found.values(), key=lambda group: (group.campaign == NOBODY, group.campaign, group.agent, -group.bytes)
    )


def show_ls(
    console: Console, home: Home, campaign: str | None, agent: str | None, stage: str | None, as_json: bool
) -> None:
    store = Store(home.store)
    known = {folder.relative_to(home.campaigns).as_posix() for folder in campaign_places(home)}
    if campaign is not None and campaign not in known:
        raise ConfigError(f"campaign {campaign}: not found in {home.campaigns}; known campaigns: {', '.join(sorted(known)) or 'none yet'}")  # fmt: skip
    rows = [
        group
        for group in groups(home, store)
        if campaign in (None, group.campaign) and agent in (None, group.agent) and stage in (None, group.stage)
    ]
    if as_json:
        console.print_json(json.dumps([asdict(group) for group in rows]))
        return
    table = _table(("campaign", "agent", "stage", "artifacts", "collected", "size", "last used"), right={3, 4, 5})
    for group in rows:
        table.add_row(group.campaign, group.agent, group.stage, str(group.artifacts), str(group.collected or ""), size_text(group.bytes), age(group.used))  # fmt: skip
    console.print(table)


def show_versions(console: Console, home: Home, campaign: str | None, as_json: bool) -> None:
    """Every agent's versions: which have files, and why they keep them."""
    store, rows = Store(home.store), []
    for folder in campaign_places(home):
        found = read_place(home, store, folder)
        rows += [(found, v) for v in found.versions if campaign in (None, found.name)]
    facts = [
        {
            "version": f"{found.name}/{v.agent}@{v.number}",
            "accuracy": v.accuracy,
            "pinned": v.pinned,
            "kept": v.kept,
            "files": not store.is_collected(v.stage, v.key),
            "bytes": size_of(store.folder(v.stage, v.key)),
            "digest": v.key,
        }
        for found, v in rows
    ]
    if as_json:
        console.print_json(json.dumps(facts))
        return
    table = _table(("version", "accuracy", "size", "files"), right={1, 2})
    for fact in facts:
        state = "pinned" if fact["pinned"] else "kept" if fact["kept"] else "may go" if fact["files"] else "collected"
        accuracy = "" if fact["accuracy"] is None else f"{fact['accuracy']:.1%}"
        table.add_row(str(fact["version"]), accuracy, size_text(int(str(fact["bytes"]))), state)
    console.print(table)


def show_du(console: Console, home: Home, as_json: bool) -> None:
    """Sizes by campaign: all it names, and what only it names (what deleting it would free)."""
    store = Store(home.store)
    seen = survey(home, store)
    sizes = {folder.name: size_of(folder) for folder in (store.root / "objects").glob("*/*")}
    namers: dict[str, set[str]] = defaultdict(set)
    for campaign in seen.campaigns:
        for key in _keys(campaign):
            namers[key].add(campaign.name)
    facts = []
    for campaign in seen.campaigns:
        keys = _keys(campaign)
        alone = sum(sizes.get(key, 0) for key in keys if namers[key] == {campaign.name})
        facts.append({"what": campaign.name, "bytes": sum(sizes.get(key, 0) for key in keys), "alone": alone})
    nobody = sum(size for key, size in sizes.items() if not namers[key])
    facts.append({"what": NOBODY, "bytes": nobody, "alone": nobody})
    rest = [store.root / name for name in ("staging", "partial", "damaged", "trash")]
    for path in [*rest, *sorted(p for p in home.root.glob("*") if p != home.store)]:
        size = size_of(path) if path.is_dir() else path.stat().st_size if path.exists() else 0
        facts.append({"what": path.relative_to(home.root).as_posix(), "bytes": size, "alone": size})
    if as_json:
        console.print_json(json.dumps(facts))
        return
    table = _table(("what", "size", "its alone"), right={1, 2})
    for fact in facts:
        if fact["bytes"]:
            table.add_row(str(fact["what"]), size_text(int(fact["bytes"])), size_text(int(fact["alone"])))
    console.print(table)
    console.print(f"all together {size_text(size_of(home.root))} in {home.root}", highlight=False, soft_wrap=True)


def _keys(campaign: Campaign) -> set[str]:
    return {key for _, _, key in campaign.entries}


def _table(titles: Iterable[str], right: set[int]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number in right else "left", no_wrap=True)
    return table
