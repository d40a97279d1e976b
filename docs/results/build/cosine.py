"""Write docs/results/cosine.md from the store: do own and foreign responses pull the same way?

``hacrl sweep configs/sweeps/cosine.yaml``, then ``python docs/results/build/cosine.py --home HOME``. Every number comes
from a manifest.
"""

import argparse
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from flows.home import Home
from flows.sweep.results import CellResult, read_results
from hacrl_core.config.sweep import load_sweep

SWEEP = Path("configs/sweeps/cosine.yaml")
PULL, YARDSTICK = "update/gradient_cosine", "update/gradient_cosine_own"


def interval(values: list[float]) -> str:
    """Return the mean over seeds with its 95 % interval (Student)."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:+.3f}"
    half = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def row(label: str, agent: str, cells: list[CellResult]) -> str:
    """Return a row of the table: means over the iterations of a seed, then over seeds."""
    pulls = [list(cell.agents[agent].metrics[PULL].values()) for cell in cells]
    halves = [float(np.mean(list(cell.agents[agent].metrics[YARDSTICK].values()))) for cell in cells]
    means = [float(np.mean(values)) for values in pulls]
    every = np.concatenate([np.array(values) for values in pulls])
    half = float(np.mean(halves))
    alike = 2 * half / (1 + half)
    positive = f"{(every > 0).sum()} of {len(every)}"
    seeds = f"{sum(mean > 0 for mean in means)} of {len(means)}"
    return f"| {label} | {agent} | {interval(means)} | {seeds} | {positive} | {interval(halves)} | {alike:+.3f} |"


def main() -> None:
    """Read the sweep's finished cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=None)
    options = parser.parse_args()
    sweep = load_sweep(SWEEP)
    results = read_results(sweep, Home.find(options.home).root)
    whole = [seed for seed in sweep.config.seeds if sum(r.seed == seed for r in results) == len(sweep.config.variants)]
    rows = []
    for variant, label in sweep.config.labels.items():
        cells = [r for r in results if r.variant == variant and r.seed in whole]
        rows += [row(label, agent, cells) for agent in cells[0].agents]
    head = Path(__file__).with_name("cosine.md.head").read_text().replace("SEEDS", ", ".join(map(str, whole)))
    Path("docs/results/cosine.md").write_text(head + "\n".join(rows) + "\n")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
