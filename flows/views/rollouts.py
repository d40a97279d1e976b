"""``hacrl rollouts``: what the agents wrote in an iteration, with verdicts and advantages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flows.home import Home
from flows.record.feedback import Label, by_rollout, read_labels
from flows.record.record import Entry, find_campaign, read_campaign, read_entries
from hacrl_core.artifacts import Store, open_store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.tables import ANSWERS, CREDIT, PROMPTS, ROLLOUTS, VERDICTS, read_table
from hacrl_core.errors import ConfigError
from hacrl_core.printable import printable

STYLES = {"correct": "green", "incorrect": "red", "unparseable": "yellow", "timeout": "magenta", "error": "magenta"}


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
    """Print prompts with their responses, verdicts, and the advantages that a learner gives them."""
    folder = find_campaign(home, campaign)
    config = read_campaign(folder)
    for name in (agent, learner):
        if name is not None and name not in config.agents:
            raise ConfigError(f"agent {name}: not in campaign {config.name}; its agents are {', '.join(config.agents)}")
    if verdict is not None and verdict not in STYLES:
        raise ConfigError(f"--verdict {verdict}: not a verdict; choose one of {', '.join(STYLES)}")
    wanted = ("", "answers")
    entries = {(e.stage, e.agent, e.iteration): e for e in read_entries(folder) if e.variant in wanted}
    chosen = _iteration(entries, iteration, config)
    store = open_store(home.store)
    asked = _table(store, entries["sample", "", chosen], PROMPTS)
    groups = responses_of(store, entries, list(config.agents), chosen, [learner] if learner else [])
    labels = by_rollout(read_labels(folder))
    console.print(Text(f"{config.name}, iteration {chosen + 1}", style="bold"))
    shown = 0
    for prompt in asked:
        rows = [
            r
            for r in groups.get(prompt["prompt_id"], [])
            if agent in (None, r["agent_id"]) and verdict in (None, r["verdict"])
        ]
        if rows and shown < prompts:
            console.print(_panel(prompt, rows, labels))
            shown += 1
    if not shown:
        console.print("No response fits these filters.")


def responses_of(
    store: Store, entries: Mapping[Any, Entry], agents: Sequence[str], iteration: int, learners: Sequence[str] = ()
) -> dict[str, list[dict[str, Any]]]:
    """Return the rollouts by prompt, with verdict and credit by learner; without learners, the sampler's own credit."""
    credits = {a: _credit(store, entries, a, iteration) for a in learners or agents}
    groups: dict[str, list[dict[str, Any]]] = {}
    for sampler in agents:
        rows = _written_by(store, entries, sampler, iteration)
        if not rows or ("verify", sampler, iteration) not in entries:
            continue
        verdicts = {v["rollout_id"]: v for v in _table(store, entries["verify", sampler, iteration], VERDICTS)}
        relevant = credits if learners else {sampler: credits[sampler]}
        for row in rows:
            known = {who: found[row["rollout_id"]] for who, found in relevant.items() if row["rollout_id"] in found}
            row.update(verdict=verdicts[row["rollout_id"]]["verdict"], credits=known)
            groups.setdefault(row["prompt_id"], []).append(row)
    return groups


def _written_by(store: Store, entries: Mapping[Any, Entry], agent: str, iteration: int) -> list[dict[str, Any]]:
    """Return an agent's responses; of another party's agent, what it has shared."""
    if own := entries.get(("generate", agent, iteration)):
        return _table(store, own, ROLLOUTS)
    shared = entries.get(("share", agent, iteration))
    return [{**row, "agent_id": agent} for row in _table(store, shared, ANSWERS)] if shared else []


def _credit(store: Store, entries: Mapping[Any, Entry], learner: str, iteration: int) -> dict[str, dict[str, Any]]:
    entry = entries.get(("credit", learner, iteration))
    return {} if entry is None else {c["rollout_id"]: c for c in _table(store, entry, CREDIT)}


def _panel(prompt: dict[str, Any], rows: list[dict[str, Any]], labels: Mapping[str, Label]) -> Panel:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for title in ("agent", "verdict", "advantage", "times", "response"):
        table.add_column(title, overflow="fold")
    distinct: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        distinct.setdefault((row["agent_id"], row["response_text"]), []).append(row)
    for (who, text), alike in distinct.items():
        kind, credits = alike[0]["verdict"], list(alike[0]["credits"].values())
        advantage = f"{credits[0]['advantage']:+.2f}" if credits else ""
        cut = " …" if alike[0]["finish_reason"] == "length" else ""
        verdict = Text(kind, style=STYLES[kind])
        # A person judged the text, so the verdict is that of all equal responses to this prompt.
        label = next((labels[row["rollout_id"]] for row in alike if row["rollout_id"] in labels), None)
        if label is not None:
            verdict.append(f" ({printable(label.who)}: {label.verdict})", style=STYLES[label.verdict])
        table.add_row(who, verdict, advantage, str(len(alike)), Text(printable(text) + cut))
    question = printable(" ".join(m["content"] for m in prompt["messages"]))
    heading = Text.assemble(
        ("asked: ", "dim"), question, ("   right answer: ", "dim"), (printable(prompt["answer"]), "bold")
    )
    return Panel(
        table,
        title=heading,
        title_align="left",
        subtitle=Text(printable(tags_of(prompt["tags"]))),
        subtitle_align="right",
    )


def tags_of(raw: str) -> str:
    """Write a prompt's tags as ``kind addition, level 2``."""
    return ", ".join(f"{name} {value}" for name, value in json.loads(raw).items() if name != "fact")


def _iteration(entries: dict[Any, Entry], wanted: int | None, config: CampaignConfig) -> int:
    """Return the record's number of an iteration, which counts from 0; people count from 1."""
    verified = {(agent, i) for stage, agent, i in entries if stage == "verify"}
    complete = [i for i in range(config.iterations) if all((agent, i) in verified for agent in config.present(i))]
    if not complete:
        raise ConfigError(f"campaign {config.name}: has no verified rollouts yet; wait for its first iteration")
    if wanted is None:
        return complete[-1]
    if wanted - 1 not in complete:
        raise ConfigError(f"--iteration {wanted}: campaign {config.name} has {complete[0] + 1} to {complete[-1] + 1}")
    return wanted - 1


def _table(store: Store, entry: Entry, schema: Any) -> list[dict[str, Any]]:
    store.fetch(entry.stage, entry.key)
    rows: list[dict[str, Any]] = read_table(
        store.folder(entry.stage, entry.key) / f"{schema.name}.parquet", schema
    ).to_pylist()
    return rows
