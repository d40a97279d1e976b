"""A picture of who learned what from whom: a row per learner, with whose answers weighed, on what, to what effect."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.exchange.status import published
from flows.home import Home
from flows.record.record import Entry, read_entries
from hacrl_core.artifacts import Store, open_store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.tables import CREDIT, EVALUATION, PROMPTS, read_table
from hacrl_core.errors import ConfigError

# More kinds of problems than these are drawn as one.
_MOST_KINDS = 6
_COLOURS = ("#3566a8", "#e08a2e", "#5a9e57", "#b0508c", "#7a6bb8", "#8c8c8c")


@dataclass
class Learning:
    """What one learner's home says. Weights: sums of |ω·A| over answers: what an update gives them, before clipping."""

    # sampler → round → weight
    by_round: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    # kind of problem → sampler → weight
    by_kind: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    # kind of problem → accuracy before and after
    accuracy: dict[str, tuple[float, float]] = field(default_factory=dict)

    def share(self, sampler: str) -> float:
        """Return the share of a sampler in everything that weighed."""
        total = sum(sum(of.values()) for of in self.by_round.values())
        return sum(self.by_round[sampler].values()) / total if total else 0.0


def learning_of(config: CampaignConfig, homes: Sequence[Home]) -> dict[str, Learning]:
    """Return what each learner in these homes learned from whom, from its credit tables and evaluations."""
    found: dict[str, Learning] = defaultdict(Learning)
    for home in homes:
        store = open_store(home.store)
        entries = read_entries(home.campaign(config.name))
        kinds = _kinds(store, entries)
        for entry in entries:
            if entry.stage != "credit" or entry.iteration is None:
                continue
            one = found[entry.agent]
            for row in read_table(store.folder("credit", entry.key) / "credit.parquet", CREDIT).to_pylist():
                weight = abs(row["omega"] * row["advantage"])
                one.by_round[row["sampler"]][entry.iteration + 1] += weight
                one.by_kind[kinds[row["prompt_id"]]][row["sampler"]] += weight
        for agent in {entry.agent for entry in entries if entry.stage == "credit"}:
            _read_accuracy(found[agent], store, [e for e in entries if e.stage == "evaluate" and e.agent == agent])
    if not found:
        raise ConfigError(f"campaign {config.name}: the homes have no finished round of it; run its parties first")
    return {agent: found[agent] for agent in config.agents if agent in found}


def draw_exchange(config: CampaignConfig, homes: Sequence[Home], file: Path) -> None:
    """Draw a row per learner: whose answers weighed, on which problems, and the accuracy before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    learned = learning_of(config, homes)
    colours = {agent: _COLOURS[i % len(_COLOURS)] for i, agent in enumerate(config.agents)}
    figure, axes = pyplot.subplots(
        len(learned), 3, figsize=(11, 1.3 + 2.5 * len(learned)), squeeze=False, width_ratios=(1.25, 1, 1)
    )
    for row, (learner, one) in zip(axes, learned.items(), strict=True):
        _draw_rounds(row[0], config, learner, one, colours)
        _draw_kinds(row[1], learner, one, colours)
        _draw_accuracy(row[2], one, colours[learner])
    axes[0, 0].set_title("from whom: share of the update's weight, by round", fontsize=9)
    axes[0, 1].set_title("what: the same by kind of problem", fontsize=9)
    axes[0, 2].set_title("to what effect: accuracy on held-out problems", fontsize=9)
    axes[-1, 0].set_xlabel("round", fontsize=9)
    figure.suptitle(_headline(config, learned), fontsize=11, x=0.02, ha="left", linespacing=1.5)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _draw_rounds(axis: Any, config: CampaignConfig, learner: str, one: Learning, colours: Mapping[str, str]) -> None:
    rounds = sorted({i for of in one.by_round.values() for i in of})
    totals = [sum(of[i] for of in one.by_round.values()) or 1.0 for i in rounds]
    floor = [0.0] * len(rounds)
    # Oneself first: what is above it came from others.
    for sampler in sorted(one.by_round, key=lambda s: s != learner):
        shares = [one.by_round[sampler][i] / total for i, total in zip(rounds, totals, strict=True)]
        axis.bar(rounds, shares, bottom=floor, color=colours[sampler], width=1.0)
        who = f"its own answers {one.share(sampler):.0%}" if sampler == learner else ""
        who = who or f"{sampler} of {config.party_of(sampler)} {one.share(sampler):.0%}"
        middle = sum(low + share / 2 for low, share in zip(floor, shares, strict=True)) / len(rounds)
        axis.text(
            sum(rounds) / len(rounds), middle, who, color="white", ha="center", va="center", fontsize=9, weight="bold"
        )
        floor = [low + share for low, share in zip(floor, shares, strict=True)]
    axis.set_ylim(0, 1)
    axis.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"], fontsize=8)
    axis.set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel(f"{learner} of {config.party_of(learner)}\nlearned from", fontsize=10)
    _bare(axis)


def _draw_kinds(axis: Any, learner: str, one: Learning, colours: Mapping[str, str]) -> None:
    kinds = sorted(one.by_kind, reverse=True)
    for place, kind in enumerate(kinds):
        total, left = sum(one.by_kind[kind].values()) or 1.0, 0.0
        for sampler in sorted(one.by_round, key=lambda s: s != learner):
            share = one.by_kind[kind][sampler] / total
            axis.barh(place, share, left=left, color=colours[sampler], height=0.6)
            if share > 0.08:
                axis.text(
                    left + share / 2, place, f"{share:.0%}", color="white", ha="center", va="center", fontsize=9
                )  # fmt: skip
            left += share
    axis.set_yticks(range(len(kinds)), kinds, fontsize=9)
    axis.set_ylim(-0.6, len(kinds) - 0.4)
    axis.set_xlim(0, 1)
    axis.set_xticks([])
    _bare(axis)


def _draw_accuracy(axis: Any, one: Learning, colour: str) -> None:
    kinds = sorted(one.accuracy, reverse=True)
    for place, kind in enumerate(kinds):
        before, after = one.accuracy[kind]
        axis.annotate("", (after, place), (before, place), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2})
        axis.plot([before], [place], "o", color="white", markeredgecolor=colour, markersize=6)
        text = f"{before:.0%} → {after:.0%}"
        axis.text((before + after) / 2, place + 0.22, text, ha="center", fontsize=9)
    axis.set_yticks(range(len(kinds)), kinds, fontsize=9)
    axis.set_ylim(-0.6, max(len(kinds), 1) - 0.4)
    axis.set_xlim(0, 1)
    axis.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"], fontsize=8)
    _bare(axis)


def _bare(axis: Any) -> None:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(length=0)


def _headline(config: CampaignConfig, learned: Mapping[str, Learning]) -> str:
    """Say in two lines what crossed between the parties."""
    places = published(config)
    rounds = len({iteration for _, iteration in places}) or 1
    total = sum(one.bytes for one in places.values())
    who = ", ".join(f"{name} has {' and '.join(party.agents)}" for name, party in config.parties.items())
    answers = rounds * config.prompts_per_iteration * config.group_size
    return (
        f"{config.name}: {who}; no party ever has another's weights\n"
        f"{rounds} rounds, {answers} answers of each agent were shared, {total / 1000 / rounds:.0f} kB per round"
    )


def _kinds(store: Store, entries: Sequence[Entry]) -> dict[str, str]:
    """Return the kind of each problem: its tag ``kind``, else where it came from."""
    found: dict[str, str] = {}
    for entry in entries:
        if entry.stage == "sample":
            table = read_table(store.folder("sample", entry.key) / "prompts.parquet", PROMPTS)
            for row in table.select(["prompt_id", "source", "tags"]).to_pylist():
                found[row["prompt_id"]] = _kind(row["tags"]) or row["source"]
    return found if len(set(found.values())) <= _MOST_KINDS else dict.fromkeys(found, "all problems")


def _kind(tags: str) -> str:
    known = json.loads(tags or "{}")
    return str(known.get("kind", "")) if isinstance(known, dict) else ""


def _read_accuracy(one: Learning, store: Store, entries: Sequence[Entry]) -> None:
    """Fill in the accuracy of the first and the last evaluation of the first benchmark, by kind of problem."""
    first = next((entry.variant for entry in entries), None)
    dated = sorted(
        (e for e in entries if e.variant == first and e.iteration is not None), key=lambda e: e.iteration or 0
    )
    if len(dated) < 2:
        return
    before, after = (_accuracy(store, entry, set(one.by_kind)) for entry in (dated[0], dated[-1]))
    one.accuracy = {kind: (before[kind], after[kind]) for kind in before if kind in after}


def _accuracy(store: Store, entry: Entry, kinds: set[str]) -> dict[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in read_table(store.folder("evaluate", entry.key) / "evaluation.parquet", EVALUATION).to_pylist():
        kind = _kind(row["tags"])
        rewards[kind if kind in kinds else "all problems"].append(float(row["verdict"] == "correct"))
    return {kind: sum(values) / len(values) for kind, values in rewards.items()}
