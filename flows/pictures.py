"""The learning curves: reward in training and held-out accuracy, an agent a colour."""

from collections import defaultdict
from pathlib import Path

from flows.records import Entry
from hacrl_core.artifacts import Store
from hacrl_core.errors import ArtifactError

# Okabe and Ito's colours, told apart by people who see fewer of them.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def learning_curves(store: Store, entries: list[Entry], folder: Path) -> Path | None:
    """Draw ``learning-curves.png`` into the folder; nothing to draw, no picture."""
    rewards, accuracies = curves(store, entries)
    if not rewards:
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for number, (agent, points) in enumerate(sorted(rewards.items())):
        colour = COLOURS[number % len(COLOURS)]
        steps, values = zip(*sorted(points.items()), strict=True)
        axes[0].plot(steps, values, color=colour, alpha=0.35, linewidth=1)
        axes[0].plot(steps, _smooth(list(values)), color=colour, label=agent)
        for (name, benchmark), found in accuracies.items():
            if name == agent:
                steps, values = zip(*sorted(found.items()), strict=True)
                axes[1].plot(steps, values, color=colour, marker="o", markersize=4, label=f"{agent} ({benchmark})")
    for axis, title in zip(axes, ("Mean reward while training", "Held-out accuracy"), strict=True):
        axis.set(title=title, xlabel="iteration", ylim=(0, 1))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False, loc="lower right")
    path = folder / "learning-curves.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def curves(
    store: Store, entries: list[Entry]
) -> tuple[dict[str, dict[int, float]], dict[tuple[str, str], dict[int, float]]]:
    """Rewards by agent and iteration; accuracies by agent, benchmark and iterations done. From the manifests alone."""
    rewards: dict[str, dict[int, float]] = defaultdict(dict)
    accuracies: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for entry in entries:
        if entry.iteration is None or entry.stage not in ("verify", "evaluate"):
            continue
        try:
            metrics = store.manifest(entry.stage, entry.key).metrics
        except ArtifactError:
            continue  # cleaned away
        if entry.stage == "verify":
            rewards[entry.agent][entry.iteration + 1] = metrics["verify/reward_mean"]
        else:
            accuracy = metrics.get(f"evaluate/{entry.variant}/accuracy")
            if accuracy is not None:  # None: not one answer could be verified
                accuracies[entry.agent, entry.variant][entry.iteration] = accuracy
    return rewards, accuracies


def _smooth(values: list[float], width: int = 5) -> list[float]:
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
        for i in range(len(values))
    ]
