"""Write docs/results/census.md and its picture from the committed readings of two real models.

python docs/results/build/census_page.py     # after python -m benchmarks.census --out docs/results
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(RESULTS.parents[1]))
from benchmarks.census import LENGTHS, Length, Reading, distribution, ratios  # noqa: E402

NAMES = {"smol": "SmolLM2", "gemma": "gemma"}
WORDS: dict[Length, str] = {
    "own": "each agent's own length",
    "sampler": "the sampler's length",
    "learner": "the learner's length",
}
Readings = dict[tuple[str, str], list[Reading]]


def read(folder: Path = RESULTS) -> Readings:
    """Read the committed readings: (learner, sampler) → one for each response."""
    found: Readings = {}
    with (folder / "census-readings.csv").open() as lines:
        for row in csv.DictReader(lines):
            means = float(row["learner_mean"]), int(row["learner_tokens"])
            reading = Reading(*means, float(row["sampler_mean"]), int(row["sampler_tokens"]))
            found.setdefault((row["learner"], row["sampler"]), []).append(reading)
    return found


def ratio_table(found: Readings) -> str:
    """Write the distribution of the ratio, both ways and with each length."""
    head = (
        "learner ← sampler",
        "divided by",
        "mean",
        "quartiles",
        "below 0.8",
        "in [0.8, 1]",
        "in [0.85, 1]",
        "above 1",
    )
    lines = ["| " + " | ".join(head) + " |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    for (learner, sampler), readings in found.items():
        for length in LENGTHS:
            d = distribution(ratios(readings, length))
            quartiles = ", ".join(f"{d[name]:.2f}" for name in ("quartile_1", "median", "quartile_3"))
            shares = " | ".join(f"{d[name]:.2f}" for name in ("below_0.8", "inside_0.8", "inside_0.85", "above_1"))
            who = f"{NAMES[learner]} ← {NAMES[sampler]}" if length == "own" else ""
            lines.append(f"| {who} | {WORDS[length]} | {d['mean']:.2f} | {quartiles} | {shares} |")
    return "\n".join(lines)


def agents_table(agents: dict[str, dict[str, float]]) -> str:
    """Write what each model answered."""
    lines = ["| model | responses | right | tokens | cut off | log-prob per token | prompts with a signal |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for name, a in agents.items():
        cells = (f"{a['responses']:.0f}", f"{a['reward']:.2f}", f"{a['tokens']:.1f}", f"{a['cut_off']:.2f}")
        rest = (f"{a['mean_logprob']:.2f}", f"{a['prompts_with_signal']:.2f}")
        lines.append(f"| {NAMES[name]} | " + " | ".join((*cells, *rest)) + " |")
    return "\n".join(lines)


def cosines(report: dict[str, Any]) -> str:
    """Say what the cosines were, and of how many rows."""
    said = []
    for name, c in report["cosine"].items():
        if "update/gradient_cosine" not in c:
            said.append(f"For {NAMES[name]} no prompt teaches both sides, so there is no cosine.")
            continue
        yardstick = c.get("update/gradient_cosine_own")
        halves = "" if yardstick is None else f"; between two halves of its own responses it is {yardstick:+.2f}"
        said.append(
            f"For {NAMES[name]} it is {c['update/gradient_cosine']:+.2f}, over {c['own_rows']} own and "
            f"{c['foreign_rows']} foreign responses to {c['prompts']} prompts{halves}."
        )
    return " ".join(said) or "It was not measured."


def draw(found: Readings, file: Path) -> None:
    """Draw the distribution of the ratio for both directions, with own and with one length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(10.4, 3.6), layout="constrained", sharey=True)
    bins = np.linspace(0, 1.6, 33)
    for panel, ((learner, sampler), readings) in zip(panels, found.items(), strict=True):
        panel.axvspan(0.8, 1.0, color="#009e73", alpha=0.15, label="HACPO's window, δ = 0.2")
        for length, colour in (("own", "#0072b2"), ("sampler", "#d55e00")):
            values = np.clip(ratios(readings, length), 0, 1.6)  # type: ignore[arg-type]
            panel.hist(values, bins, histtype="step", linewidth=2, color=colour, label=WORDS[length])  # type: ignore[index]
        panel.set_title(f"{NAMES[learner]} reads {NAMES[sampler]}", loc="left", fontsize=11)
        panel.set_xlabel("ratio, learner over sampler (the last bin has all above)")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("responses")
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(file, dpi=130, metadata={"Software": None})
    plt.close(figure)


def page(found: Readings, report: dict[str, Any]) -> str:
    """Write the page."""
    template = (RESULTS / "build" / "census.md.head").read_text()
    parts = {"ratios": ratio_table(found), "agents": agents_table(report["agents"]), "cosines": cosines(report)}
    return template.format(**parts, **report["asked"])


if __name__ == "__main__":
    rows = read()
    draw(rows, RESULTS / "census.png")
    (RESULTS / "census.md").write_text(page(rows, json.loads((RESULTS / "census.json").read_text())))
