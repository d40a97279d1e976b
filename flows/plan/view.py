"""A plan for people, and as JSON."""

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.plan.plan import Plan
from flows.plan.rates import GIGA
from flows.views.text import decimal_time, duration, percent, size_text


def as_json(plan: Plan) -> str:
    """Return the plan as JSON; seconds and bytes."""
    return json.dumps(asdict(plan), indent=1)


def show_plan(console: Console, plan: Plan, iterations: int) -> None:
    """Print stages, critical path, totals and faults."""
    basis = "from this campaign's own manifests" if plan.calibrated else "computed from rates, nothing measured"
    console.print(Text.assemble((plan.campaign, "bold"), f" on {plan.cluster.text}: {basis}"))
    console.print()
    console.print(_stage_table(plan))
    console.print()
    steps = [(title.partition(" iteration ")[0], decimal_time(seconds)) for title, seconds in plan.critical_path]
    path = " → ".join(f"{stage} {lasted}" for stage, lasted in steps)
    rows = [
        ("one iteration", duration(plan.iteration_seconds)),
        ("critical path", path),
        (f"{iterations} iterations", duration(plan.campaign_seconds)),
        ("idle GPU time", "" if plan.idle_share is None else percent(plan.idle_share, 0)),
        ("a version", ", ".join(f"{agent} {size_text(size)}" for agent, size in plan.version_bytes.items())),
        ("disk at the end", size_text(plan.disk_bytes)),
    ]
    if plan.cluster.machines > 1:
        rows.append(("machines", f"{plan.cluster.machines}: as many campaigns (pairs, seeds, methods) at a time"))
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in rows:
        if value:
            table.add_row(what, value)
    console.print(table)
    for fault in plan.faults:
        console.print(Text.assemble(("fault: ", "red"), fault), soft_wrap=True)


def _stage_table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("agent")
    table.add_column("stage")
    titles = ["time", "GPUs", f"GB of {plan.memory_bytes / GIGA:.0f}" if plan.memory_bytes else "GB"]
    for title in titles:
        table.add_column(title, justify="right")
    for stage in plan.stages:
        memory = "" if stage.memory is None else f"{stage.memory / GIGA:.1f}"
        over = bool(plan.memory_bytes and stage.memory and stage.memory > plan.memory_bytes)
        table.add_row(
            stage.agent, stage.stage, decimal_time(stage.seconds), str(stage.gpus or ""), memory,
            style="red" if over else None,
        )  # fmt: skip
    return table
