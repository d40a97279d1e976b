"""The README's picture: learning alone and from each other, from the committed numbers of the even pair.

python docs/results/build/readme_picture.py          # writes docs/pictures/shared-against-alone.png

Left: the reward while training over the start, the mean of both agents, a thin line for each seed. Right: the
difference to learning alone after training, on held-out problems, with its 95 % interval.
"""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flows.sweep.statistics import Difference, compare_seeds

RESULTS = Path(__file__).resolve().parents[1]
PICTURE = RESULTS.parent / "pictures/shared-against-alone.png"
ALONE = "gspo"
LABELS = {
    ALONE: "alone (GSPO)",
    "hacpo": "from each other (HACPO)",
    "shared_gspo": "from each other (shared GSPO)",
    "gspo_x2": "alone, twice the answers (GSPO×2)",
    "naive": "from each other, uncorrected (Naive)",
}
COLOURS = {
    ALONE: "#8a8a8a",
    "hacpo": "#0072b2",
    "shared_gspo": "#d55e00",
    "gspo_x2": "#4d4d4d",
    "naive": "#cc79a7",
}
DRAWN = (ALONE, "hacpo", "shared_gspo")
SMOOTH = 3

# Method → seed → value, and → values by iteration.
BySeed = Mapping[str, Mapping[int, float]]
Curves = Mapping[str, Mapping[int, Sequence[float]]]


@dataclass(frozen=True)
class Ends:
    """How the cells of a sweep ended: the mean over both agents, by method and seed."""

    before: BySeed
    after: BySeed
    # Prompts whose rewards are all equal, a share: mean over agents, iterations and seeds.
    no_signal: Mapping[str, float]

    def difference(self, method: str, to: str = ALONE) -> Difference:
        """Return how much higher a method ends, paired by seed."""
        found = compare_seeds(self.after[method], self.after[to])
        assert found is not None
        return found


def read_ends(sweep: str = "even", folder: Path = RESULTS) -> Ends:
    """Read a sweep's committed cells."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {"before": {}, "after": {}}
    silent: dict[str, list[float]] = defaultdict(list)
    for row in read_rows(folder / f"{sweep}-cells.csv"):
        for end, by_method in found.items():
            by_method.setdefault(row["variant"], {}).setdefault(int(row["seed"]), []).append(float(row[end]))
        silent[row["variant"]].append(float(row["no_signal"]))
    before, after = (
        {method: {seed: float(np.mean(both)) for seed, both in seeds.items()} for method, seeds in by_method.items()}
        for by_method in found.values()
    )
    return Ends(before, after, {method: float(np.mean(values)) for method, values in silent.items()})


def read_curves(sweep: str = "even", folder: Path = RESULTS) -> Curves:
    """Read a sweep's committed curves: the mean reward of both agents by iteration."""
    rewards: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for row in read_rows(folder / f"{sweep}-curves.csv"):
        if row["reward"]:
            rewards[row["variant"], int(row["seed"]), int(row["iterations_done"])].append(float(row["reward"]))
    curves: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for variant, seed, step in sorted(rewards):
        curves[variant][seed].append(float(np.mean(rewards[variant, seed, step])))
    return curves


def read_rows(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


def draw(curves: Curves, ends: Ends, file: Path) -> None:
    """Draw both panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.0), width_ratios=(3, 2), layout="constrained")
    _draw_curves(left, curves, ends)
    _draw_differences(right, ends)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    figure.savefig(file, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _draw_curves(panel: Any, curves: Curves, ends: Ends) -> None:
    for method in DRAWN:
        seeds = [100 * (_smooth(curves[method][seed]) - before) for seed, before in ends.before[method].items()]
        steps = np.arange(len(seeds[0])) + (SMOOTH + 1) / 2
        for values in seeds:
            panel.plot(steps, values, color=COLOURS[method], alpha=0.16, linewidth=0.8)
        panel.plot(steps, np.mean(seeds, axis=0), color=COLOURS[method], linewidth=3, label=LABELS[method])
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set(xlabel="iteration", ylabel="points gained, while training")
    panel.set_title(f"Two tiny models, {len(curves[ALONE])} seeds", loc="left", fontsize=11)
    panel.legend(frameon=False, loc="upper left", fontsize=9)


def _draw_differences(panel: Any, ends: Ends) -> None:
    shown = [method for method in LABELS if method != ALONE and method in ends.after]
    panel.axvline(0, color="#888888", linewidth=1)
    for row, method in enumerate(shown):
        d = ends.difference(method)
        panel.plot([100 * d.low, 100 * d.high], [row, row], color=COLOURS[method], linewidth=2.5)
        panel.plot(100 * d.mean, row, "o", color=COLOURS[method], markersize=7)
        words = [LABELS[method], f"{100 * d.mean:+.1f}".replace("-", "−")]
        panel.annotate(
            "  ".join(words if d.mean > 0 else words[::-1]),
            (0.02 if d.mean < 0 else 0.98, row),
            (0, 9),
            xycoords=panel.get_yaxis_transform(),
            textcoords="offset points",
            ha="left" if d.mean < 0 else "right",
            color=COLOURS[method],
            fontsize=9,
        )
    panel.set_yticks([])
    panel.set_ylim(len(shown) - 0.5, -0.7)
    panel.margins(x=0.55)
    panel.set_xlabel("points over learning alone, held-out problems")


def _smooth(values: Sequence[float]) -> Any:
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, mode="valid")


if __name__ == "__main__":
    draw(read_curves(), read_ends(), PICTURE)
    print(PICTURE.relative_to(Path.cwd()) if PICTURE.is_relative_to(Path.cwd()) else PICTURE)
