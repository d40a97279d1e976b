"""``hacrl store verify``: every artifact against its manifest, every byte hashed."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flows.home import Home
from flows.store.survey import campaign_places, read_place
from flows.views.text import size_text
from hacrl_core.artifacts import Store
from hacrl_core.errors import ArtifactError, NewerArtifactError


@dataclass(frozen=True)
class Finding:
    state: str  # whole, collected, damaged, newer
    stage: str
    key: str
    bytes: int
    problem: str = ""


def check(store: Store, folder: Path) -> Finding:
    """One artifact, by its own manifest; hashing leaves Python's lock, so several threads do it side by side."""
    stage, key = folder.parent.name, folder.name
    try:
        manifest = store.manifest(stage, key)
        if (manifest.stage, manifest.key, manifest.identity.key) != (stage, key, key):
            raise ArtifactError(
                f"{folder / 'manifest.json'}: belongs to another artifact ({manifest.stage} {manifest.key[:12]})"
            )
        if store.is_collected(stage, key):
            return Finding("collected", stage, key, 0)
        try:
            store.check(folder, manifest, digests=True)
        except ArtifactError:
            if store.is_collected(stage, key):  # meanwhile; the mark comes before the files go
                return Finding("collected", stage, key, 0)
            raise
    except NewerArtifactError as problem:
        return Finding("newer", stage, key, 0, str(problem))
    except ArtifactError as problem:
        return Finding("damaged", stage, key, 0, str(problem))
    return Finding("whole", stage, key, manifest.bytes)


def verify_store(console: Console, home: Home, repair: bool) -> int:
    """Returns the exit code: 1 where something is damaged, also when it was set aside just now."""
    store = Store(home.store)
    folders = sorted(path for path in (store.root / "objects").glob("*/*") if path.is_dir())
    with _bar(console, sum(_bytes(store, folder) for folder in folders)) as advance, _threads() as threads:
        findings = []
        for finding in threads.map(lambda folder: check(store, folder), folders):
            advance(finding.bytes)
            findings.append(finding)
    damaged = [finding for finding in findings if finding.state == "damaged"]
    _show(console, home, store, findings, damaged)
    if repair:
        for finding in damaged:
            _set_aside(home, finding)
        store.remove_stale_staging()
    if damaged:
        console.print(
            f"set aside in {store.root / 'damaged'}; run the campaigns again to have them computed anew"
            if repair
            else "hacrl store verify --repair sets them aside; a campaign that meets one does so by itself and computes it anew",
            highlight=False,
            soft_wrap=True,
        )
    return 1 if damaged else 0


def _set_aside(home: Home, finding: Finding) -> None:
    """Alone and looked at afresh: a campaign that runs may have collected it or made it anew since."""
    store = Store(home.store)
    folder = store.folder(finding.stage, finding.key)
    with store.lock(finding.key):
        again = check(store, folder)
        if again.state == "damaged":
            store.set_aside(folder, again.problem)


def _show(console: Console, home: Home, store: Store, findings: list[Finding], damaged: list[Finding]) -> None:
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
    there = {finding.key for finding in findings}
    absent = {key for key in owners if key not in there}
    count = {state: sum(f.state == state for f in findings) for state in ("whole", "collected", "damaged", "newer")}
    parts = [f"{count['whole']} artifacts are whole ({size_text(sum(f.bytes for f in findings))} hashed)"]
    parts += [f"{count['collected']} collected"] if count["collected"] else []
    parts += [f"{count['newer']} of a newer hacrl, left alone"] if count["newer"] else []
    parts += [f"{count['damaged']} damaged"]
    if absent:
        parts.append(f"{len(absent)} in campaigns' records are not there; running the campaigns again makes them")
    console.print("; ".join(parts), highlight=False, soft_wrap=True)


def _owners(home: Home, store: Store) -> dict[str, set[str]]:
    owners: dict[str, set[str]] = {}
    for folder in campaign_places(home):
        campaign = read_place(home, store, folder)
        for _, _, key in campaign.entries:
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
def _bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    if not console.is_terminal:
        yield lambda bytes_: None
        return
    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("checking", total=total)
        yield lambda bytes_: bars.advance(bar, bytes_)
