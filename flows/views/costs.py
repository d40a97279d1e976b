"""What a campaign's stages cost: seconds and memory by agent and stage, from the manifests."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from flows.record.record import Entry
from hacrl_core.artifacts import Store
from hacrl_core.errors import ArtifactError

GIB = 1 << 30


@dataclass(frozen=True)
class Cost:
    agent: str
    stage: str
    runs: int
    mean_seconds: float
    peak_bytes: int  # of the agent's worker process
    peak_device_bytes: int  # allocated by torch on a GPU


def stage_costs(store: Store, entries: Sequence[Entry]) -> list[Cost]:
    """One per agent and stage that ran in a worker; what was cleaned away is left out."""
    found: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    for entry in entries:
        if not entry.agent or entry.stage == "credit":
            continue
        try:
            made = store.manifest(entry.stage, entry.key).provenance
        except ArtifactError:
            continue
        one = (made.seconds, made.peak_memory_bytes, made.peak_device_bytes)
        found.setdefault((entry.agent, entry.stage), []).append(one)
    return [
        Cost(
            agent,
            stage,
            len(rows),
            sum(r[0] for r in rows) / len(rows),
            max(r[1] for r in rows),
            max(r[2] for r in rows),
        )
        for (agent, stage), rows in found.items()
    ]


def show_costs(console: Console, costs: Sequence[Cost]) -> None:
    """Grouped by agent, in the order in which stages first ran."""
    has_device = any(cost.peak_device_bytes for cost in costs)
    table = Table(title="Time and memory by stage", title_justify="left", box=None, padding=(0, 2), header_style="dim")
    for title in ("agent", "stage"):
        table.add_column(title)
    for title in ("runs", "seconds each", "peak GiB", *(["GPU GiB"] if has_device else [])):
        table.add_column(title, justify="right")
    for agent in dict.fromkeys(cost.agent for cost in costs):
        for place, cost in enumerate(c for c in costs if c.agent == agent):
            device = [_gib(cost.peak_device_bytes)] if has_device else []
            name = agent if place == 0 else ""
            table.add_row(name, cost.stage, str(cost.runs), f"{cost.mean_seconds:.1f}", _gib(cost.peak_bytes), *device)
    console.print(table)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "–"
