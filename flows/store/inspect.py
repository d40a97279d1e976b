"""What is in the store, whose it is and whether it is intact: ``hacrl store ls``, ``du`` and ``verify``."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flows.home import Home
from flows.store.survey import recorded_campaigns, survey, survey_campaign
from flows.views.tables import FittingTable
from flows.views.text import age, can_redraw, size_text
from hacrl_core.artifacts import Store, open_store
from hacrl_core.artifacts.removal import last_used, size_of
from hacrl_core.artifacts.store import COLLECTED
from hacrl_core.errors import ArtifactError, ConfigError, NewerArtifactError

NOBODY = "(none)"


# -- hacrl store ls ----------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """The artifacts of one campaign, agent and stage."""

    campaign: str
    agent: str
    stage: str
    artifacts: int = 0
    collected: int = 0
    bytes: int = 0
    # When the newest of them was last used.
    used: float = 0.0


def groups(home: Home, store: Store) -> list[Group]:
    """Return all artifacts in groups; an artifact that two campaigns share appears with both."""
    owners: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for folder in recorded_campaigns(home):
        campaign = survey_campaign(home, store, folder)
        for _, agent, key in campaign.entries:
            owners[key].append((campaign.name, agent))
    found: dict[tuple[str, str, str], Group] = {}
    for folder in sorted((store.root / "objects").glob("*/*")):
        size = size_of(folder)
        used = last_used(folder)
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
    """Print the groups of artifacts, filtered by campaign, agent and stage."""
    store = open_store(home.store)
    known = {folder.relative_to(home.campaigns).as_posix() for folder in recorded_campaigns(home)}
    if campaign is not None and campaign not in known:
        names = ", ".join(sorted(known)) or "none yet"
        raise ConfigError(f"campaign {campaign}: not found in {home.campaigns}; known campaigns: {names}")
    rows = [
        group
        for group in groups(home, store)
        if campaign in (None, group.campaign) and agent in (None, group.agent) and stage in (None, group.stage)
    ]
    if as_json:
        console.print_json(json.dumps([asdict(group) for group in rows]))
        return
    if not rows:
        console.print(f"no artifacts in {store.root}" + (" that fit" if campaign or agent or stage else " yet"))
        return
    titles = ("campaign", "agent", "stage", "artifacts", "collected", "size", "last used")
    table = FittingTable(titles, droppable=("collected", "last used"), left=("agent", "stage"))
    for group in rows:
        table.add(
            group.campaign,
            group.agent,
            group.stage,
            str(group.artifacts),
            str(group.collected or ""),
            size_text(group.bytes),
            age(group.used),
        )
    console.print(table)


def show_versions(console: Console, home: Home, campaign: str | None, as_json: bool) -> None:
    """Print every agent's versions: which have files, and whether the policy keeps them."""
    store = open_store(home.store)
    facts = []
    table = _table(("version", "accuracy", "size", "files"), right={1, 2})
    for folder in recorded_campaigns(home):
        found = survey_campaign(home, store, folder)
        for version in found.versions if campaign in (None, found.name) else ():
            name = f"{found.name}/{version.agent}@{version.number}"
            size = size_of(store.folder(version.stage, version.key))
            has_files = not store.is_collected(version.stage, version.key)
            facts.append(
                {
                    "version": name,
                    "accuracy": version.accuracy,
                    "pinned": version.pinned,
                    "kept": version.kept,
                    "files": has_files,
                    "bytes": size,
                    "digest": version.key,
                }
            )
            accuracy = "" if version.accuracy is None else f"{version.accuracy:.1%}"
            state = _version_state(version.pinned, version.kept, has_files)
            table.add_row(name, accuracy, size_text(size), state)
    if as_json:
        console.print_json(json.dumps(facts))
    else:
        console.print(table)


def _version_state(pinned: bool, kept: bool, has_files: bool) -> str:
    if pinned:
        return "pinned"
    if kept:
        return "kept"
    return "may go" if has_files else "collected"


# -- hacrl store du ----------------------------------------------------------------------------------------------------


def show_du(console: Console, home: Home, as_json: bool) -> None:
    """Print each campaign's size: of all that it names, and of what only it names (what deleting it would free)."""
    sizes = list(_sizes(home, open_store(home.store)))
    if as_json:
        console.print_json(json.dumps([{"what": what, "bytes": size, "alone": alone} for what, size, alone in sizes]))
        return
    table = _table(("what", "size", "its alone"), right={1, 2})
    for what, size, alone in sizes:
        if size:
            table.add_row(what, size_text(size), size_text(alone))
    console.print(table)
    console.print(f"all together {size_text(size_of(home.root))} in {home.root}", highlight=False, soft_wrap=True)


def _sizes(home: Home, store: Store) -> Iterator[tuple[str, int, int]]:
    """Name, bytes and bytes that nothing else shares, of every campaign and of the rest of the home folder."""
    campaigns = {campaign.name: campaign.keys for campaign in survey(home, store).campaigns}
    sizes = {folder.name: size_of(folder) for folder in (store.root / "objects").glob("*/*")}
    owners: dict[str, set[str]] = defaultdict(set)
    for name, keys in campaigns.items():
        for key in keys:
            owners[key].add(name)
    for name, keys in campaigns.items():
        alone = sum(sizes.get(key, 0) for key in keys if owners[key] == {name})
        yield name, sum(sizes.get(key, 0) for key in keys), alone
    nobody = sum(size for key, size in sizes.items() if not owners[key])
    yield NOBODY, nobody, nobody
    rest = [store.root / name for name in ("staging", "partial", "damaged", "trash")]
    for path in [*rest, *sorted(p for p in home.root.glob("*") if p != home.store)]:
        size = _disk_bytes(path)
        yield path.relative_to(home.root).as_posix(), size, size


def _disk_bytes(path: Path) -> int:
    if path.is_dir():
        return size_of(path)
    return path.stat().st_size if path.exists() else 0


# -- hacrl store verify ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The result of verifying one artifact."""

    # whole, collected, damaged or newer.
    state: str
    stage: str
    key: str
    bytes: int
    problem: str = ""


def check(store: Store, folder: Path) -> Finding:
    """Verify one artifact against its manifest. Hashing releases Python's lock, so threads can do it in parallel."""
    stage = folder.parent.name
    key = folder.name
    try:
        manifest = store.manifest(stage, key)
        if (manifest.stage, manifest.key, manifest.identity.key) != (stage, key, key):
            raise ArtifactError(
                f"{folder / 'manifest.json'}: belongs to another artifact ({manifest.stage} {manifest.key[:12]})"
            )
        if store.is_collected(stage, key):
            return Finding("collected", stage, key, 0)
        try:
            store.check(folder, manifest, digests="all")
        except ArtifactError:
            # It may have been collected meanwhile; the mark is written before the files go.
            if store.is_collected(stage, key):
                return Finding("collected", stage, key, 0)
            raise
    except NewerArtifactError as problem:
        return Finding("newer", stage, key, 0, str(problem))
    except ArtifactError as problem:
        return Finding("damaged", stage, key, 0, str(problem))
    return Finding("whole", stage, key, manifest.bytes)


def verify_store(console: Console, home: Home, repair: bool) -> int:
    """Verify every artifact, and set damaged ones aside if ``repair``.

    Return the exit code: 1 if something is damaged, even if it was set aside just now.
    """
    store = open_store(home.store)
    folders = sorted(path for path in (store.root / "objects").glob("*/*") if path.is_dir())
    with _progress(console, sum(_bytes(store, folder) for folder in folders)) as advance, _threads() as threads:
        findings = []
        for finding in threads.map(lambda folder: check(store, folder), folders):
            advance(finding.bytes)
            findings.append(finding)
    damaged = [finding for finding in findings if finding.state == "damaged"]
    _show_findings(console, home, store, findings, damaged)
    if repair:
        for finding in damaged:
            _set_aside(home, finding)
        store.remove_stale_staging()
    if not damaged:
        return 0
    if repair:
        remedy = f"set aside in {store.root / 'damaged'}; run the campaigns again to compute them anew"
    else:
        remedy = (
            "hacrl store verify --repair sets them aside; a campaign that meets one does so itself and recomputes it"
        )
    console.print(remedy, highlight=False, soft_wrap=True)
    return 1


def _set_aside(home: Home, finding: Finding) -> None:
    """Check again under the key's lock: a running campaign may have collected or recomputed it since."""
    store = open_store(home.store)
    folder = store.folder(finding.stage, finding.key)
    with store.lock(finding.key):
        again = check(store, folder)
        if again.state == "damaged":
            store.set_aside(folder, again.problem)


def _show_findings(console: Console, home: Home, store: Store, findings: list[Finding], damaged: list[Finding]) -> None:
    owners = _owners(home, store)
    if damaged:
        table = Table(box=None, padding=(0, 2), header_style="dim", title="Damaged", title_justify="left")
        for title in ("artifact", "of", "what is wrong"):
            table.add_column(title, overflow="fold")
        for finding in damaged:
            whose = ", ".join(sorted(owners.get(finding.key, ()))) or "no campaign"
            table.add_row(f"{finding.stage} {finding.key[:12]}", whose, Text(finding.problem, style="red"))
        console.print(table)
    for finding in findings:
        if finding.state == "newer":
            console.print(Text(f"! {finding.problem}", style="yellow"), soft_wrap=True)
    present = {finding.key for finding in findings}
    absent = {key for key in owners if key not in present}
    count = {state: sum(f.state == state for f in findings) for state in ("whole", "collected", "damaged", "newer")}
    parts = [f"{count['whole']} artifacts are whole ({size_text(sum(f.bytes for f in findings))} hashed)"]
    parts += [f"{count['collected']} collected"] if count["collected"] else []
    parts += [f"{count['newer']} of a newer hacrl, left alone"] if count["newer"] else []
    parts += [f"{count['damaged']} damaged"]
    if absent:
        parts.append(f"{len(absent)} in campaigns' records are missing; running the campaigns again makes them")
    console.print("; ".join(parts), highlight=False, soft_wrap=True)


def _owners(home: Home, store: Store) -> dict[str, set[str]]:
    owners: dict[str, set[str]] = {}
    for folder in recorded_campaigns(home):
        campaign = survey_campaign(home, store, folder)
        for key in campaign.keys:
            owners.setdefault(key, set()).add(campaign.name)
    return owners


def _bytes(store: Store, folder: Path) -> int:
    try:
        if store.is_collected(folder.parent.name, folder.name):
            return 0
        return store.manifest(folder.parent.name, folder.name).bytes
    except ArtifactError:
        return 0


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="verify")


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; gives a function that adds verified bytes to it."""
    if not can_redraw(console):
        yield lambda size: None
        return
    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("checking", total=total)
        yield lambda size: bars.advance(bar, size)


def _table(titles: Iterable[str], right: set[int]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number in right else "left", no_wrap=True)
    return table
