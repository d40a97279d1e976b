"""The README's picture: what two agents gain alone and from each other, seed by seed, from the committed cells.

python docs/results/build/readme_picture.py          # writes docs/pictures/shared-against-alone.png
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1]
PICTURE = RESULTS.parent / "pictures/shared-against-alone.png"
ALONE, SHARED = "gspo", "hacpo"
LABELS = {ALONE: "alone (GSPO)", SHARED: "learning from each other (HACPO)"}
COLOURS = {ALONE: "#8a8a8a", SHARED: "#0072b2"}


@dataclass(frozen=True)
class Gains:
    """Points of held-out accuracy that one agent gained by training, by seed: with each method."""

    agent: str
    by_method: Mapping[str, Mapping[int, float]]

    def mean(self, method: str) -> float:
        """Return the mean over the seeds."""
        values = self.by_method[method].values()
        return sum(values) / len(values)

    @property
    def differences(self) -> Sequence[float]:
        """Sharing minus alone, seed by seed; both start from the same version."""
        alone, shared = self.by_method[ALONE], self.by_method[SHARED]
        return [shared[seed] - alone[seed] for seed in sorted(alone)]


def read_gains(file: Path = RESULTS / "main-cells.csv") -> list[Gains]:
    """Return the gains of every agent in the cells of a sweep."""
    with file.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["variant"] in LABELS]
    return [
        Gains(
            agent,
            {
                method: {
                    int(row["seed"]): 100 * (float(row["after"]) - float(row["before"]))
                    for row in rows
                    if row["agent"] == agent and row["variant"] == method
                }
                for method in LABELS
            },
        )
        for agent in sorted({row["agent"] for row in rows})
    ]


def draw(gains: Sequence[Gains], file: Path) -> None:
    """Draw one panel for each agent: a thin line for each seed, a thick one for the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(gains), figsize=(9.6, 3.9), sharey=True, layout="constrained")
    for panel, one in zip(panels, gains, strict=True):
        for method, colour in COLOURS.items():
            for gain in one.by_method[method].values():
                panel.plot((0, 20), (0, gain), color=colour, alpha=0.4, linewidth=1)
                panel.plot(20, gain, "o", color=colour, alpha=0.5, markersize=4, markeredgewidth=0)
            mean = one.mean(method)
            panel.plot((0, 20), (0, mean), color=colour, linewidth=3.5, label=LABELS[method])
            panel.annotate(
                f"+{mean:.1f}",
                (20, mean),
                (9, 0),
                textcoords="offset points",
                va="center",
                color=colour,
                weight="bold",
                fontsize=13,
            )
        up = sum(difference > 0 for difference in one.differences)
        panel.set_title(
            f"{one.agent}: {sum(one.differences) / len(one.differences):+.1f} points by sharing, "
            f"{up} of {len(one.differences)} seeds",
            fontsize=11,
            loc="left",
        )
        panel.set(xticks=(0, 20), xlim=(-0.5, 23.5))
        panel.set_xticklabels(("start", "after 20 iterations"))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    panels[0].set_ylim(0, 1.04 * max(max(seeds.values()) for one in gains for seeds in one.by_method.values()))
    panels[0].set_ylabel("points of held-out accuracy gained")
    panels[0].legend(frameon=False, loc="upper left", fontsize=10)
    figure.savefig(file, dpi=130, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(read_gains(), PICTURE)
    print(PICTURE.relative_to(Path.cwd()) if PICTURE.is_relative_to(Path.cwd()) else PICTURE)
