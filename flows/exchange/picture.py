"""A picture of who learned how much from whom: a row per learner, a column per sampler."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flows.home import Home
from flows.record.record import read_entries
from hacrl_core.artifacts import open_store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.tables import CREDIT, read_table
from hacrl_core.errors import ConfigError

# learner → sampler → round → sum of |ω·A|, the weight of the sampler's answers in the learner's update
Weights = dict[str, dict[str, dict[int, float]]]


def weights_of(config: CampaignConfig, homes: Sequence[Home]) -> Weights:
    """Return how much each sampler's answers weighed in each learner's updates, from the parties' credit tables."""
    found: Weights = defaultdict(lambda: defaultdict(dict))
    for home in homes:
        store = open_store(home.store)
        for entry in read_entries(home.campaign(config.name)):
            if entry.stage != "credit" or entry.iteration is None:
                continue
            rows = read_table(store.folder("credit", entry.key) / "credit.parquet", CREDIT).to_pylist()
            for row in rows:
                of = found[entry.agent][row["sampler"]]
                of[entry.iteration] = of.get(entry.iteration, 0.0) + abs(row["omega"] * row["advantage"])
    if not found:
        raise ConfigError(f"campaign {config.name}: the homes have no finished round of it; run its parties first")
    return found


def draw_exchange(config: CampaignConfig, homes: Sequence[Home], file: Path) -> None:
    """Draw, for each learner, what share of an update's weight each sampler had, round by round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    weights = weights_of(config, homes)
    learners = [agent for agent in config.agents if agent in weights]
    figure, axes = pyplot.subplots(len(learners), 1, figsize=(7, 2.4 * len(learners)), squeeze=False, sharex=True)
    for axis, learner in zip(axes[:, 0], learners, strict=True):
        rounds = sorted({i for of in weights[learner].values() for i in of})
        totals = [sum(of.get(i, 0.0) for of in weights[learner].values()) or 1.0 for i in rounds]
        floor = np.zeros(len(rounds))
        for place, sampler in enumerate(config.agents):
            of = weights[learner].get(sampler, {})
            share = np.array([of.get(i, 0.0) / total for i, total in zip(rounds, totals, strict=True)])
            who = "itself" if sampler == learner else f"{sampler} ({config.party_of(sampler)})"
            axis.bar(rounds, share, bottom=floor, color=f"C{place}", label=who, width=0.9)
            floor += share
        axis.set_title(f"{learner} ({config.party_of(learner)}) learned from", fontsize=10, loc="left")
        axis.set_ylim(0, 1)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylabel("share of the weight")
        axis.legend(fontsize=8, loc="upper right")
    axes[-1, 0].set_xlabel("round")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
