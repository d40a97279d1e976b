"""Looking at campaigns in the terminal: how far they are, and what the agents wrote."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flows.display import sparkline
from flows.evaluating import versions_of
from flows.home import Home
from flows.pictures import curves
from flows.records import Entry, is_running, read_campaign, read_entries
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.tables import CREDIT, PROMPTS, ROLLOUTS, VERDICTS, read_table
from hacrl_core.errors import ArtifactError, ConfigError

_STYLES = {"correct": "green", "incorrect": "red", "unparseable": "yellow", "timeout": "magenta", "error": "magenta"}

WIDE = 130  # columns that a terminal needs for the costs


def campaign_folders(home: Home) -> list[Path]:
    """Newest activity first."""
    found = [path.parent for path in home.campaigns.glob("*/config.json")]
    return sorted(found, key=lambda folder: -os.path.getmtime(_last_touched(folder)))


def show_status(console: Console, home: Home) -> None:
    folders = campaign_folders(home)
    if not folders:
        console.print(f"No campaigns in {home.root} yet; start one with: hacrl run configs/demo.yaml")
        return
    store = Store(home.store)
    titles = [
        "campaign",
        "state",
        "iterations",
        "agent",
        "reward",
        "",
        "accuracy",
        "responses",
        "tokens",
        "last activity",
    ]
    if console.width < WIDE:
        titles = titles[:7]
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in titles:
        table.add_column(title, no_wrap=True)
    for folder in folders:
        try:
            rows = _status_rows(store, folder)
        except ConfigError as problem:  # one campaign that cannot be read must not hide the others
            console.print(Text(f"! {problem}", style="yellow"))
            continue
        for row in rows:
            table.add_row(*row[: len(titles)])
    console.print(table)


def _status_rows(store: Store, folder: Path) -> list[list[Any]]:
    config, entries = read_campaign(folder), read_entries(folder)
    done = _iterations_done(store, config, entries)
    state = (
        "[cyan]running[/cyan]"
        if is_running(folder)
        else "[green]complete[/green]"
        if done == config.iterations
        else "stopped"
    )
    # Beyond that lie entries of the iteration under way, and of settings that the campaign no longer has.
    entries = [e for e in entries if e.iteration is None or e.iteration < done + (e.stage == "evaluate")]
    rewards, accuracies = curves(store, entries)
    touched = time.strftime("%Y-%m-%d %H:%M", time.localtime(os.path.getmtime(_last_touched(folder))))
    rows = []
    for number, agent in enumerate(config.agents):
        points = [value for _, value in sorted(rewards.get(agent, {}).items())]
        accuracy = next((found[max(found)] for (who, _), found in accuracies.items() if who == agent), None)
        spent = list(_metrics(store, [e for e in entries if e.stage == "generate" and e.agent == agent]))
        head = [config.name, state, f"{done}/{config.iterations}"] if number == 0 else ["", "", ""]
        rows.append(
            [
                *head,
                agent,
                f"{points[-1]:.2f}" if points else "",
                Text(sparkline(points[-24:]), style="cyan"),
                f"{accuracy:.1%}" if accuracy is not None else "",
                f"{sum(m['generate/responses'] for m in spent):,.0f}",
                f"{sum(m['generate/tokens'] for m in spent):,.0f}",
                touched if number == 0 else "",
            ]
        )
    return rows


def _iterations_done(store: Store, config: CampaignConfig, entries: list[Entry]) -> int:
    """Iterations that every agent that takes part has finished, with the settings of now."""
    versions = {agent: len(versions_of(store, entries, agent, config)) - 1 for agent in config.agents}
    for iteration in range(config.iterations):
        if any(versions[agent] <= iteration - config.agents[agent].joins for agent in config.present(iteration)):
            return iteration
    return config.iterations


def _metrics(store: Store, entries: list[Entry]) -> Iterator[Mapping[str, float]]:
    for entry in entries:
        try:
            yield store.manifest(entry.stage, entry.key).metrics
        except ArtifactError:
            continue  # cleaned away


def show_rollouts(
    console: Console,
    home: Home,
    campaign: str | None,
    iteration: int | None,
    agent: str | None,
    learner: str | None,
    verdict: str | None,
    prompts: int,
) -> None:
    """Prompt by prompt: who wrote what, whether it was right, and what the learner makes of it."""
    folder = _campaign_folder(home, campaign)
    config = read_campaign(folder)
    for name in (agent, learner):
        if name is not None and name not in config.agents:
            raise ConfigError(f"agent {name}: not in campaign {config.name}; its agents are {', '.join(config.agents)}")
    if verdict is not None and verdict not in _STYLES:
        raise ConfigError(f"--verdict {verdict}: not a verdict; choose one of {', '.join(_STYLES)}")
    entries = {(e.stage, e.agent, e.iteration): e for e in read_entries(folder) if not e.variant}
    chosen = _iteration(entries, iteration, config)
    store = Store(home.store)
    asked = _table(store, entries["sample", "", chosen], PROMPTS)
    groups = _responses(store, entries, list(config.agents), chosen, learner)
    console.print(Text(f"{config.name}, iteration {chosen}", style="bold"))
    shown = 0
    for prompt in asked:
        rows = [
            r
            for r in groups.get(prompt["prompt_id"], [])
            if agent in (None, r["agent_id"]) and verdict in (None, r["verdict"])
        ]
        if rows and shown < prompts:
            console.print(_panel(prompt, rows))
            shown += 1
    if not shown:
        console.print("No response fits these filters.")


def _responses(
    store: Store, entries: dict[Any, Entry], agents: list[str], iteration: int, learner: str | None
) -> dict[str, list[dict[str, Any]]]:
    """Rollouts with verdict and advantage, by prompt. Advantages are the given learner's, else each sampler's own."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for sampler in agents:
        if ("verify", sampler, iteration) not in entries:
            continue
        rows = _table(store, entries["generate", sampler, iteration], ROLLOUTS)
        verdicts = {v["rollout_id"]: v for v in _table(store, entries["verify", sampler, iteration], VERDICTS)}
        credit = entries.get(("credit", learner or sampler, iteration))
        credits = {c["rollout_id"]: c for c in _table(store, credit, CREDIT)} if credit else {}
        for row in rows:
            row.update(verdict=verdicts[row["rollout_id"]]["verdict"], credit=credits.get(row["rollout_id"]))
            groups.setdefault(row["prompt_id"], []).append(row)
    return groups


def _panel(prompt: dict[str, Any], rows: list[dict[str, Any]]) -> Panel:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for title in ("agent", "verdict", "advantage", "times", "response"):
        table.add_column(title, overflow="fold")
    distinct: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        distinct.setdefault((row["agent_id"], row["response_text"]), []).append(row)
    for (who, text), alike in distinct.items():
        kind, credit = alike[0]["verdict"], alike[0]["credit"]
        advantage = f"{credit['advantage']:+.2f}" if credit else ""
        cut = " …" if alike[0]["finish_reason"] == "length" else ""
        table.add_row(who, Text(kind, style=_STYLES[kind]), advantage, str(len(alike)), Text(text + cut))
    question = " ".join(m["content"] for m in prompt["messages"])
    title = Text.assemble(("asked: ", "dim"), question, ("   right answer: ", "dim"), (prompt["answer"], "bold"))
    return Panel(table, title=title, title_align="left", subtitle=Text(_tags(prompt["tags"])), subtitle_align="right")


def _tags(raw: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in json.loads(raw).items() if name != "fact")


def _campaign_folder(home: Home, name: str | None) -> Path:
    if name is not None:
        return home.campaign(name)
    folders = campaign_folders(home)
    if not folders:
        raise ConfigError(f"no campaigns in {home.root} yet; start one with: hacrl run configs/demo.yaml")
    return folders[0]


def _iteration(entries: dict[Any, Entry], wanted: int | None, config: CampaignConfig) -> int:
    verified = {(agent, i) for stage, agent, i in entries if stage == "verify"}
    complete = [i for i in range(config.iterations) if all((agent, i) in verified for agent in config.present(i))]
    if not complete:
        raise ConfigError(f"campaign {config.name}: has no verified rollouts yet; wait for its first iteration")
    if wanted is None:
        return complete[-1]
    if wanted not in complete:
        raise ConfigError(f"--iteration {wanted}: campaign {config.name} has {complete[0]} to {complete[-1]}")
    return wanted


def _table(store: Store, entry: Entry, schema: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(
        store.folder(entry.stage, entry.key) / f"{schema.name}.parquet", schema
    ).to_pylist()
    return rows


def _last_touched(folder: Path) -> Path:
    record = folder / "stages.jsonl"
    return record if record.exists() else folder
