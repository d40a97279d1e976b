"""``hacrl store gc``: shows what would go, and on ``--yes`` lets it go."""

from collections import defaultdict
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table

from flows.home import Home
from flows.record.record import read_campaign
from flows.store.collect import Candidate, carry_out, plan
from flows.views.text import size_text
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.disk import is_disk_full
from hacrl_core.artifacts.locks import exclusive
from hacrl_core.config.keeping import KeepConfig


def clean(
    console: Console, home: Home, policy: KeepConfig | None, campaign: str | None, grace: float, *, really: bool
) -> None:
    if campaign is not None:
        read_campaign(home.campaign(campaign))  # refuses a name that does not exist
    store = Store(home.store)
    if not really:
        candidates = plan(home, store, policy, campaign, grace)
        _show(console, candidates)
        if candidates:
            console.print("dry run, nothing was deleted; add --yes to delete", highlight=False)
        return
    with ExitStack() as alone:
        try:
            alone.enter_context(exclusive(store.root / "gc.lock"))  # one at a time
        except OSError as problem:
            if not is_disk_full(
                problem
            ):  # else there is no room for the lock's file: every artifact has a lock of its own
                raise
        candidates = plan(home, store, policy, campaign, grace)
        _show(console, candidates)
        freed = carry_out(home, store, candidates, grace)
    console.print(f"freed {size_text(freed)}", highlight=False)


def _show(console: Console, candidates: list[Candidate]) -> None:
    if not candidates:
        console.print("nothing to delete: every file belongs to a version or an artifact that some campaign keeps")
        return
    rows: dict[tuple[str, str, str], list[Candidate]] = defaultdict(list)
    for one in candidates:
        rows[one.kind, one.who.partition("@")[0], one.why].append(one)
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title, side in (("what", "left"), ("of", "left"), ("number", "right"), ("size", "right"), ("why", "left")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    words = {"version": "files of versions", "garbage": "artifacts"}
    for (kind, who, why), members in rows.items():
        numbers = [one.who.partition("@")[2] for one in members]
        which = f"{who} @{_ranges(numbers)}" if kind == "version" and all(numbers) else who
        table.add_row(words.get(kind, kind), which, str(len(members)), size_text(sum(m.bytes for m in members)), why)
    console.print(table)
    console.print(f"together {size_text(sum(one.bytes for one in candidates))}", highlight=False)


def _ranges(numbers: list[str]) -> str:
    """1,2,3,7 as 1–3,7."""
    found: list[list[int]] = []
    for number in sorted(int(text) for text in numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}–{b}" for a, b in found)
