"""Write docs/results/methods.md and its picture: every method and single switches on the pair that was taught the same.

python docs/results/build/methods.py

Everything on this page is exploratory: no claim was written down before, and intervals are single ones. All numbers
come from the committed cells of even-methods.yaml, switches.yaml, even-resample.yaml and even-three.yaml, and of the
sweeps that the learning rates were tuned with. The script also writes what docs/results.md says of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import fresh
import numpy as np
import tuning
from longrun import replaced, wrapped
from readme_picture import RESULTS, read_rows

from flows.sweep.statistics import Difference, compare_seeds
from hacrl_core.config.sweep import load_sweep

# What a method is called on the page, and in one clause what it does with the others' answers.
METHODS = {
    "gspo": ("GSPO", "does not read them"),
    "gspo_x2": ("GSPO×2", "samples twice as many of its own instead"),
    "hacpo": ("HACPO", "window, damping by the ratio, capability-aware advantages"),
    "shared_gspo": ("shared GSPO", "GSPO's clip around the ratio to the sampler"),
    "naive": ("Naive (SAPO)", "as if they were its own"),
    "raft_foreign": ("RAFT", "successes with their advantage and no ratio, failures not at all"),
    "topr": ("TOPR", "successes without a ratio, failures with a ratio of at most 1"),
    "cispo": ("CISPO", "a ratio of at most 1 as a constant weight"),
    "luffy": ("LUFFY", "π / (π + 0.1) instead of a ratio"),
    "prp": ("PRP", "one group of everybody's answers, clip from 0.8 to 1.28"),
    "xgrpo": ("XGRPO", "only their rewards: they join the baseline of its own answers"),
    "sgt": ("SGT", "successes as texts to imitate where it has none of its own"),
    "pessimistic": ("HACPO, pessimistic", "as HACPO, the smaller of clipped and unclipped gain"),
    "calibrated": ("HACPO, calibrated", "a window that lets half of them through"),
}
NAMES = {method: label for method, (label, _) in METHODS.items()}
SWEEPS = ("even-methods", "switches", "even-resample", "even-three")
# The methods of three agents.
THREE_AGENTS = {"gspo": "GSPO", "gspo_x3": "GSPO×3", "hacpo": "HACPO", "shared_gspo": "shared GSPO"}
# Switch → its name and the variant that it is one setting away from.
SWITCHES = {
    "alpha_minus_1": ("α = -1", "hacpo"),
    "alpha_minus_half": ("α = -0.5", "hacpo"),
    "alpha_0": ("α = 0", "hacpo"),
    "length_of_sampler": ("one length for the ratio: the sampler's", "hacpo"),
    "length_of_learner": ("one length for the ratio: the learner's", "hacpo"),
    "mixed": ("own and foreign answers mixed in a minibatch", "hacpo"),
    "replay": ("foreign successes of the last 2 iterations again", "hacpo"),
    "shared_gspo_capped": ("foreign failures with a ratio of at most 1", "shared_gspo"),
    "shared_gspo_replay": ("foreign successes of the last 2 iterations again", "shared_gspo"),
    "shared_gspo_mixed": ("own and foreign answers mixed in a minibatch", "shared_gspo"),
}
# Method → seed → the mean of all agents.
Ends = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Cells:
    """The cells of one or several sweeps: both outcomes and what was seen on the way."""

    sampled: Ends
    greedy: Ends
    silent: Mapping[str, float]
    responses: Mapping[str, float]

    def difference(self, method: str, to: str, *, greedy: bool = False) -> Difference | None:
        """Return how much higher a method ends than another, paired by seed; None without common seeds."""
        ends = self.greedy if greedy else self.sampled
        return compare_seeds(ends[method], ends[to]) if method in ends and to in ends else None

    def seeds(self) -> list[int]:
        """Return the seeds that every method has."""
        return sorted(set.intersection(*(set(seeds) for seeds in self.sampled.values())))


def read_cells(sweep: str, folder: Path = RESULTS) -> Cells | None:
    """Read a sweep's committed cells; None if there are none."""
    if not (folder / f"{sweep}-cells.csv").exists():
        return None
    rows, greedy = (read_rows(folder / f"{name}-cells.csv") for name in (sweep, f"{sweep}-greedy"))
    return Cells(_ends(rows), _ends(greedy), _means(rows, "no_signal"), _means(rows, "responses"))


def _ends(rows: Sequence[Mapping[str, str]]) -> Ends:
    ends: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        ends.setdefault(row["variant"], {}).setdefault(int(row["seed"]), []).append(float(row["after"]))
    return {m: {seed: float(np.mean(values)) for seed, values in seeds.items()} for m, seeds in ends.items()}


def _means(rows: Sequence[Mapping[str, str]], column: str) -> Mapping[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row[column]:
            found.setdefault(row["variant"], []).append(float(row[column]))
    return {method: float(np.mean(values)) for method, values in found.items()}


def limited(cells: Cells, seeds: Sequence[int]) -> Cells:
    """Return the cells of some seeds, so that rows of one table have the same ones."""
    sampled, greedy = (
        {m: {s: v for s, v in values.items() if s in seeds} for m, values in ends.items()}
        for ends in (cells.sampled, cells.greedy)
    )
    return Cells(sampled, greedy, cells.silent, cells.responses)


def read_whole(sweep: str, folder: Path) -> Cells | None:
    """Read the seeds of a sweep that every method has; None if there are none."""
    cells = read_cells(sweep, folder)
    return limited(cells, cells.seeds()) if cells is not None and cells.seeds() else None


def read_switches(folder: Path) -> Cells | None:
    """Read the switches; None unless one of them and its method have a seed in common."""
    cells = read_cells("switches", folder)
    there = cells is not None and any(cells.difference(v, base) for v, (_, base) in SWITCHES.items())
    return cells if there else None


def said(d: Difference | None) -> str:
    """Write a difference in points with its interval and the seeds in which it is positive."""
    if d is None:
        return ""
    interval = f" ({100 * d.low:+.1f} to {100 * d.high:+.1f})" if np.isfinite(d.low) else ""
    return f"{100 * d.mean:+.1f}{interval}, {d.higher}/{d.seeds}"


def methods_table(cells: Cells) -> str:
    """Write a row for each method, the highest reward first."""
    there = [m for m in METHODS if m in cells.sampled]
    order = sorted(there, key=lambda m: -float(np.mean(list(cells.sampled[m].values()))))
    lines = [
        "| method | the others' answers | reward | over GSPO | over GSPO×2 | greedy, over GSPO | without signal |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for m in order:
        label, what = METHODS[m]
        over = ["" if m == to else said(cells.difference(m, to)) for to in ("gspo", "gspo_x2")]
        greedy = "" if m == "gspo" else said(cells.difference(m, "gspo", greedy=True))
        reward = f"{100 * np.mean(list(cells.sampled[m].values())):.1f}"
        lines.append(f"| {label} | {what} | {reward} | {over[0]} | {over[1]} | {greedy} | {cells.silent[m]:.2f} |")
    return "\n".join(lines)


def switches_table(cells: Cells) -> str:
    """Write a row for each switch: the difference to the method without it."""
    lines = ["| method | switch | reward | greedy |", "|---|---|--:|--:|"]
    for variant, (label, base) in SWITCHES.items():
        if cells.difference(variant, base):
            both = [said(cells.difference(variant, base, greedy=greedy)) for greedy in (False, True)]
            lines.append(f"| {METHODS[base][0]} | {label} | {both[0]} | {both[1]} |")
    return "\n".join(lines)


def plain_table(cells: Cells, labels: Mapping[str, str], rivals: Sequence[str]) -> str:
    """Write a row for each variant: its end, what it sampled, and its differences to some others."""
    head = [f"over {labels[rival]}" for rival in rivals] + [f"greedy, over {labels[rival]}" for rival in rivals]
    lines = ["| method | reward | responses of an agent | " + " | ".join(head) + " |"]
    lines.append("|---" + "|--:" * (len(head) + 2) + "|")
    for m, label in labels.items():
        if m in cells.sampled:
            over = [
                "" if m == to else said(cells.difference(m, to, greedy=greedy))
                for greedy in (False, True)
                for to in rivals
            ]
            reward = f"{100 * np.mean(list(cells.sampled[m].values())):.1f}"
            lines.append(f"| {label} | {reward} | {cells.responses[m]:,.0f} | " + " | ".join(over) + " |")
    return "\n".join(lines)


def draw(cells: Cells, switches: Cells | None, file: Path) -> None:
    """Draw the difference of every method to GSPO, and of every switch to the method without it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    methods = [(METHODS[m][0], d) for m in METHODS if m != "gspo" and (d := cells.difference(m, "gspo"))]
    panels = [("Every method: points over GSPO", sorted(methods, key=lambda row: -row[1].mean))]
    if switches is not None:
        # The sweep's own names are short.
        names = load_sweep(tuning.CONFIGS / "switches.yaml").config
        rows = [(names.label(v), d) for v, (_, base) in SWITCHES.items() if (d := switches.difference(v, base))]
        panels.append(("Single switches: points over the method without", rows))
    height = 1.2 + 0.32 * max(len(rows) for _, rows in panels)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(7.2 * len(panels), height), layout="constrained", squeeze=False, sharex=True
    )
    for axis, (title, rows) in zip(axes[0], panels, strict=True):
        axis.axvline(0, color="#888888", linewidth=1)
        for at, (_, d) in enumerate(rows):
            colour = "#8a8a8a" if not d.excludes_zero else "#0072b2" if d.mean > 0 else "#d55e00"
            axis.plot([100 * d.low, 100 * d.high], [at, at], color=colour, linewidth=2)
            axis.plot(100 * d.mean, at, "o", color=colour)
        axis.set_yticks(range(len(rows)), [label for label, _ in rows])
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("points of held-out reward, 95 % interval")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(file, dpi=120, metadata={"Software": None})
    plt.close(figure)


def page(folder: Path = RESULTS) -> str | None:
    """Write the page; None while the methods have not run."""
    methods = read_cells("even-methods", folder=folder)
    if methods is None or "topr" not in methods.sampled:
        return None
    seeds = methods.seeds()
    tuned = tuning.read_tuning(folder)
    parts = [TOP.format(seeds=len(seeds), first=seeds[0], last=seeds[-1]), methods_table(limited(methods, seeds))]
    parts += [NOTE.format(rates=tuning.note(tuned, NAMES) + versions(folder))]
    parts += [AGAIN] if fresh.complete(folder) else []
    switches = read_switches(folder)
    if switches is not None:
        parts += [SWITCHED, switches_table(switches)]
    resample = read_cells("even-resample", folder=folder)
    if resample is not None:
        labels = {"gspo": "GSPO", "gspo_resample": "GSPO, prompts without signal again"}
        parts += [RESAMPLED, plain_table(resample, labels, ("gspo",))]
    three = read_whole("even-three", folder)
    if three is not None:
        parts += [THREE, plain_table(three, THREE_AGENTS, ("gspo", "gspo_x3"))]
    parts += [tuning.section(tuned, NAMES)] if tuned else []
    return "\n".join([*parts, BOTTOM.format(files=wrapped(_files(folder)))])


def _files(folder: Path) -> str:
    """Name the files of what ran, and the sweeps that did not."""
    there = {sweep: (folder / f"{sweep}-cells.csv").exists() for sweep in (*SWEEPS, tuning.FIVE, tuning.NINE)}
    both = [f"`{sweep}-cells.csv`" for sweep in SWEEPS if there[sweep]]
    alone = [f"`{sweep}-cells.csv`" for sweep in (tuning.FIVE, tuning.NINE) if there[tuning.NINE]]
    waiting = [f"`{sweep}.yaml`" for sweep, ran in there.items() if not ran]
    told = f"The cells are {', '.join(both)} in the folder `docs/results`, each with a twin for greedy answers."
    told += f" The learning rates are from {' and '.join(alone)}." if alone else ""
    return f"{told} Written and not run: {', '.join(waiting)}." if waiting else told


def versions(folder: Path) -> str:
    """Say which methods ran with another version of this project than most did; nothing if all ran with one."""
    made: dict[str, set[str]] = {}
    for row in read_rows(folder / "even-methods-cells.csv"):
        made.setdefault(row["commit"], set()).add(row["variant"])
    most = max(made, key=lambda commit: len(made[commit]))
    others = [f"{NAMES[m]} ({commit})" for commit in made if commit != most for m in NAMES if m in made[commit]]
    told = f"Most methods ran with the version {most} of this project, and with another one: {', '.join(others)}."
    return f"\n{wrapped(told)}" if others else ""


def sentences(folder: Path = RESULTS) -> str:
    """Say in docs/results.md how the other methods, three agents and single switches ended."""
    methods = read_cells("even-methods", folder)
    if methods is None:
        return "Nine more methods, three agents and single switches of this pair have sweeps and were not run."
    cells = limited(methods, methods.seeds())
    best = max((m for m in cells.sampled if m != "gspo"), key=lambda m: float(np.mean(list(cells.sampled[m].values()))))
    d = cells.difference(best, "gspo")
    assert d is not None
    name = "foreign successes alone (RAFT)" if best == "raft_foreign" else NAMES[best]
    tuned = tuning.read_tuning(folder)
    how = "without tuning" if not tuned else "tuned in the same way"
    if others := tuning.other_rates(tuned, tuning.configured(), NAMES):
        how = f"tuned in the same way, but {len(others)} of them not at their best rate"
    told = (
        f"The five methods above have a tuned learning rate each; [nine more](results/methods.md) ran on {d.seeds} "
        f"seeds, {how}. There, {name} ended highest, {100 * d.mean:.1f} points over GSPO in {d.higher} of {d.seeds} "
        "seeds: an observation, no claim."
    )
    return " ".join([told, *_three_said(folder), *_switches_said(folder)])


def _three_said(folder: Path) -> list[str]:
    three = read_whole("even-three", folder)
    if three is None:
        return ["Three agents of this kind have a sweep and were not run."]
    leads = [f"{NAMES[m]} {said(d)}" for m in ("hacpo", "shared_gspo") if (d := three.difference(m, "gspo_x3"))]
    return [f"Of three agents, in points over GSPO×3: {'; '.join(leads)}."] if leads else []


def _switches_said(folder: Path) -> list[str]:
    switches = read_switches(folder)
    if switches is None:
        return ["Single switches have a sweep and were not run."]
    found = {v: d for v, (_, base) in SWITCHES.items() if (d := switches.difference(v, base))}
    clear = sum(d.excludes_zero for d in found.values())
    means = [100 * d.mean for d in found.values()]
    return [
        f"[Single switches](results/methods.md#single-switches) moved the end by {min(means):+.1f} to "
        f"{max(means):+.1f} points; {clear} of {len(found)} intervals lie on one side of zero."
    ]


TOP = """# Every method, and single switches

How do the other ways of learning from each other end on the pair that was [taught the same](../results.md)? Nothing
here was claimed before it ran: the page is for looking, not for showing. Intervals are single ones at 95 %, without a
correction for their number.

![Every method against GSPO, every switch against its method](methods.png)

## Every method

After 20 iterations, {seeds} seeds ({first} to {last}), the mean of both agents. *Reward* is the share of right answers
at temperature 1 on 2400 held-out problems, in percent; differences are in points, paired by seed, with their interval
and the number of seeds in which they are positive.
"""
NOTE = """
{rates}
*Without signal*: the share of prompts whose answers, all that the learner may learn from, are all right or all wrong.
"""
AGAIN = """\
RAFT ended highest when this table was first written. It ran again on [fresh seeds](fresh.md), for twice as long and
with claims that were written down before.
"""
SWITCHED = """
## Single switches

Each row changes one setting of HACPO (α = 1, each agent's own length in the ratio, foreign minibatches behind own ones)
or of shared GSPO. The differences are to the method without the switch. Two switches change the number of updates in
an iteration, too: 4 without a switch, 8 with replay, 2 with mixed minibatches. What they move may be due to that alone;
no run here separates the two.
"""
RESAMPLED = """
## Answering prompts without signal again

GSPO alone, with one more set of answers for each prompt whose answers were all right or all wrong. It samples more than
GSPO does, so it has to be worth its answers.
"""
THREE = """
## Three agents

A third agent, taught the same, joins; everybody's answers to a prompt stand in one minibatch, and every update has 96
answers. The fair rival is GSPO×3, which samples as many answers as three agents share. All four methods run at 1e-4:
nothing was tuned for three agents, and GSPO's tuned rate for two is 2e-4.
"""
BOTTOM = """
## Where the numbers come from

{files}

`hacrl sweep configs/sweeps/NAME.yaml` runs a sweep, `make results` writes this page. [Algorithm](../algorithm.md) has
every method's equation and source.
"""


def main(docs: Path = RESULTS.parent) -> None:
    """Write page and picture, if the cells are there, and the part of docs/results.md."""
    folder = docs / "results"
    results = docs / "results.md"
    results.write_text(replaced(results.read_text(), "methods.py", sentences(folder)))
    text = page(folder)
    if text is None:
        print("no cells of even-methods.yaml: docs/results/methods.md is not written")
        return
    methods = read_cells("even-methods", folder)
    assert methods is not None
    draw(limited(methods, methods.seeds()), read_switches(folder), folder / "methods.png")
    (folder / "methods.md").write_text(text)


if __name__ == "__main__":
    main()
