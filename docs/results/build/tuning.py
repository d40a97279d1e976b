"""How the learning rates of the methods were chosen, from the committed cells of the tuning sweeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from longrun import wrapped
from readme_picture import RESULTS, read_rows

from hacrl_core.config.sweep import load_sweep

CONFIGS = RESULTS.parents[1] / "configs/sweeps"

# The five methods of even.yaml, and the nine that were tuned after them.
FIVE, NINE = "even-tuning", "even-tuning-methods"


@dataclass(frozen=True)
class Tuned:
    """What one method reached at each learning rate on the tuning seeds."""

    # Rate → seed → the mean of both agents.
    rewards: Mapping[float, Mapping[int, float]]

    @property
    def seeds(self) -> list[int]:
        """Return the seeds that every rate has."""
        return sorted(set.intersection(*(set(seeds) for seeds in self.rewards.values())))

    def mean(self, rate: float) -> float:
        """Return the mean over the seeds that every rate has."""
        return float(np.mean([self.rewards[rate][seed] for seed in self.seeds]))

    @property
    def chosen(self) -> float:
        """Return the rate with the highest mean."""
        return max(self.rewards, key=self.mean)

    @property
    def edge(self) -> bool:
        """Say whether the chosen rate is the lowest or highest of those tried."""
        return self.chosen in (min(self.rewards), max(self.rewards))


def read_tuning(folder: Path = RESULTS, sweeps: Sequence[str] = (FIVE, NINE)) -> dict[str, Tuned]:
    """Return what the tuning found by method; empty while the nine methods have no committed cells."""
    if not (folder / f"{NINE}-cells.csv").exists():
        return {}
    found: dict[str, dict[float, dict[int, list[float]]]] = {}
    for sweep in sweeps:
        for row in read_rows(folder / f"{sweep}-cells.csv"):
            method, rate = row["variant"].split(".learning_rate-")
            rates = found.setdefault(method, {}).setdefault(float(rate.replace("_", ".")), {})
            rates.setdefault(int(row["seed"]), []).append(float(row["after"]))
    return {
        method: Tuned({r: {s: float(np.mean(both)) for s, both in seeds.items()} for r, seeds in sorted(rates.items())})
        for method, rates in found.items()
    }


def table(tuning: Mapping[str, Tuned], labels: Mapping[str, str]) -> str:
    """Write the mean reward by method and rate, the chosen rate's in bold."""
    rates = sorted({rate for tuned in tuning.values() for rate in tuned.rewards})
    lines = ["| method | " + " | ".join(map(short, rates)) + " |", "|---" + "|--:" * len(rates) + "|"]
    for method, label in labels.items():
        if method in tuning:
            tuned = tuning[method]
            cells = [f"{100 * tuned.mean(rate):.1f}" if rate in tuned.rewards else "" for rate in rates]
            bold = [f"**{c}**" if rate == tuned.chosen else c for rate, c in zip(rates, cells, strict=True)]
            lines.append(f"| {label} | " + " | ".join(bold) + " |")
    return "\n".join(lines)


def other_rates(tuning: Mapping[str, Tuned], ran: Mapping[str, float], labels: Mapping[str, str]) -> list[str]:
    """Say which methods run at another rate than the one that was found for them."""
    return [
        f"{labels[method]} was tuned to {short(tuned.chosen)} and ran at {short(ran[method])}"
        for method, tuned in tuning.items()
        if method in ran and not np.isclose(ran[method], tuned.chosen)
    ]


def configured() -> dict[str, float]:
    """Return the learning rate of each method in even-methods.yaml."""
    return {c.variant: c.config.update.learning_rate for c in load_sweep(CONFIGS / "even-methods.yaml").cells}


def note(tuning: Mapping[str, Tuned], labels: Mapping[str, str], ran: Mapping[str, float] | None = None) -> str:
    """Say which methods have a tuned learning rate, and which of them did not run at it."""
    if not tuning:
        return UNTUNED
    others = other_rates(tuning, ran or configured(), labels)
    told = (
        "Every method's learning rate was tuned in the same way, on other seeds "
        "([below](#how-the-learning-rates-were-chosen))"
    )
    return wrapped(f"{told}. Each runs at its best one." if not others else f"{told}. But {', '.join(others)}.")


def section(tuning: Mapping[str, Tuned], labels: Mapping[str, str]) -> str:
    """Write the part of the page about the tuning."""
    edges = ", ".join(label for method, label in labels.items() if method in tuning and tuning[method].edge)
    return "\n".join([TUNED, table(tuning, labels), *(["", wrapped(EDGES.format(edges=edges))] if edges else [])])


def short(rate: float) -> str:
    """Write 0.0001 as 1e-4."""
    return f"{rate:.0e}".replace("e-0", "e-")


UNTUNED = """\
GSPO, GSPO×2, HACPO, shared GSPO and Naive have a learning rate that was tuned for each. The others have 1e-4, which
four of those five were tuned to, and were not tuned themselves: a method that ends low here may do better at another
rate."""
TUNED = """
## How the learning rates were chosen

The mean reward of both agents after 20 iterations on tuning seeds 101 to 103, in percent, the best rate in bold. The
agents were taught a little longer than those above. The first five methods ran before the others, with an earlier
version of this project: rates of one row may be compared, rows may not.
"""
EDGES = "The best rate is the lowest or the highest that was tried for {edges}: a rate beyond it might be better still."
