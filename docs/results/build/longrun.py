"""Runs of 40 iterations that were evaluated halfway: their curves, a family of claims, a table and a picture.

longer.py and fresh.py write their pages with it.
"""

import csv
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from claims import Answer, Part, answers

from flows.sweep.statistics import LEVEL, Difference, compare, seeds_needed, smallest_p

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent
ALONE, TWICE = "gspo", "gspo_x2"
LABELS = {ALONE: "GSPO", TWICE: "GSPO×2", "hacpo": "HACPO", "shared_gspo": "shared GSPO", "raft_foreign": "RAFT"}
COLOURS = {
    ALONE: "#8a8a8a",
    TWICE: "#4d4d4d",
    "hacpo": "#0072b2",
    "shared_gspo": "#d55e00",
    "raft_foreign": "#009e73",
}
EARLY, LATE = 20, 40
# Iterations over which the entropy at the start and at the end is averaged.
FIRST, LAST = range(1, 6), range(36, 41)
NUMBERS = {3: "three", 6: "six", 7: "seven", 8: "eight"}

# Method → seed → iterations done → value, the mean of both agents.
Curves = Mapping[str, Mapping[int, Mapping[int, float]]]


@dataclass(frozen=True)
class Study:
    """What a page asks: of which method, on the seeds of which sweep, with how many claims."""

    sweep: str
    subject: str
    # The methods that a seed must have to count.
    needed: tuple[str, ...]
    # How many claims are corrected together.
    family: int


@dataclass(frozen=True)
class Run:
    """The curves of the cells that are complete."""

    study: Study
    # The seeds that all methods of the claims have.
    seeds: tuple[int, ...]
    accuracy: Curves
    entropy: Curves

    @property
    def few(self) -> bool:
        """Say whether no difference whatever could pass the correction with so few seeds."""
        return self.study.family * smallest_p(len(self.seeds)) >= LEVEL

    def shared(self, method: str) -> tuple[int, ...]:
        """Return the seeds of the claims that a method has, too."""
        return tuple(s for s in self.seeds if LATE in self.accuracy.get(method, {}).get(s, {}))

    def at(self, method: str, iterations: int, seeds: Sequence[int] | None = None) -> list[float]:
        """Return the held-out mean reward of each seed after so many iterations."""
        return [self.accuracy[method][seed][iterations] for seed in seeds or self.seeds]

    def diversity(self, method: str, steps: range = LAST) -> list[float]:
        """Return each seed's entropy per token, the mean over some iterations; the last ones unless told."""
        return [float(np.mean([self.entropy[method][seed][i] for i in steps])) for seed in self.shared(method)]

    def lead(self, method: str, iterations: int, to: str = ALONE) -> Difference:
        """Return how much higher a method is than another, GSPO unless told, after so many iterations."""
        seeds = self.shared(method)
        return compare(self.at(method, iterations, seeds), self.at(to, iterations, seeds))

    def leads(self, method: str, iterations: int) -> list[float]:
        """Return each seed's lead of a method over GSPO."""
        seeds = self.shared(method)
        pairs = zip(self.at(method, iterations, seeds), self.at(ALONE, iterations, seeds), strict=True)
        return [mine - alone for mine, alone in pairs]

    def change(self, method: str) -> Difference:
        """Return by how much the lead of a method over GSPO is larger at the end than halfway."""
        return compare(self.leads(method, LATE), self.leads(method, EARLY))

    def diversity_lead(self, method: str) -> Difference:
        """Return by how much the entropy under a method is higher at the end than under GSPO."""
        return compare(self.diversity(method), self.diversity(ALONE))


def read_run(study: Study, folder: Path = RESULTS) -> Run:
    """Read the committed curves."""
    accuracy = _curves(folder / f"{study.sweep}-curves.csv", "accuracy")
    logprob = _curves(folder / f"{study.sweep}-entropy.csv", "own_logprob")
    entropy = {m: {s: {i: -v for i, v in steps.items()} for s, steps in seeds.items()} for m, seeds in logprob.items()}
    there = [{s for s, steps in accuracy.get(m, {}).items() if LATE in steps} for m in study.needed]
    return Run(study, tuple(sorted(set.intersection(*there))), accuracy, entropy)


def committed(study: Study, folder: Path = RESULTS) -> Run | None:
    """Return the committed run, if there is one."""
    return read_run(study, folder) if (folder / f"{study.sweep}-curves.csv").exists() else None


def _curves(file: Path, column: str) -> Curves:
    """Read one column: the mean over the agents."""
    found: dict[str, dict[int, dict[int, list[float]]]] = {}
    with file.open() as lines:
        for row in csv.DictReader(lines):
            if row[column]:
                seeds = found.setdefault(row["variant"], defaultdict(lambda: defaultdict(list)))
                seeds[int(row["seed"])][int(row["iterations_done"])].append(float(row[column]))
    return {
        method: {seed: {i: float(np.mean(both)) for i, both in steps.items()} for seed, steps in seeds.items()}
        for method, seeds in found.items()
    }


# -- claims -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A claim and the difference that decides it."""

    text: str
    difference: Difference
    # Whether the difference is claimed to be positive.
    up: bool
    unit: str = "points"


@dataclass(frozen=True)
class Answered:
    """A claim of an addendum with its answer, the numbers behind it and Holm's p."""

    text: str
    answer: Answer
    difference: Difference
    p: float | None
    unit: str = "points"

    def row(self) -> str:
        """Write it as a row of a table."""
        d, scale, digits = self.difference, *((100, 2) if self.unit == "points" else (1, 4))
        numbers = f"{scale * d.mean:+.{digits}f} ({scale * d.low:+.{digits}f} to {scale * d.high:+.{digits}f})"
        p = "" if self.p is None else "<0.001" if self.p < 0.001 else f"{self.p:.3f}"
        return f"| {self.text} | {self.answer} | {numbers} {self.unit} | {d.higher} of {d.seeds} | {p} |"


def answer(asked: Sequence[Asked]) -> list[Answered]:
    """Answer claims as one family. Entropies have no bound below which they count as equal."""
    parts = [
        Part(a.difference.p, a.difference.p_same if a.unit == "points" else None, ((a.difference.mean > 0) == a.up,))
        for a in asked
    ]
    found = zip(asked, answers(parts), strict=True)
    return [Answered(a.text, answer, a.difference, p, a.unit) for a, (answer, p) in found]


def later(change: Answered, diversity: Answered) -> str:
    """Say in words what became of a lead that was claimed to shrink, and of a diversity that was claimed to fall."""
    lead = {"yes": "the lead shrinks", "no": "the lead grows", "no difference": "the lead stays within a point"}
    fewer = {"yes": "its answers become less diverse", "no": "its answers stay more diverse"}
    return (
        f"{lead.get(change.answer, 'whether the lead shrinks is not shown')}, and "
        f"{fewer.get(diversity.answer, 'a loss of diversity is not shown')}"
    )


def too_few(run: Run) -> str:
    """Say that the seeds are too few for the family, if they are: a paragraph, or nothing."""
    needed = seeds_needed(run.study.family)
    said = (
        f"**{len(run.seeds)} seeds are too few** to show a difference: after the correction over "
        f"{NUMBERS[run.study.family]} claims it takes at least {NUMBERS[needed]}. The numbers are an indication, not "
        "an answer."
    )
    return f"{wrapped(said)}\n\n" if run.few else ""


# -- what pages show --------------------------------------------------------------------------------------------------


def draw(run: Run, methods: Sequence[str], file: Path) -> None:
    """Draw the lead of some methods over GSPO at both times, and the entropy over the iterations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.0), layout="constrained")
    subject = run.study.subject
    for pair in zip(run.leads(subject, EARLY), run.leads(subject, LATE), strict=True):
        left.plot([EARLY, LATE], 100 * np.array(pair), color=COLOURS[subject], alpha=0.25, linewidth=0.8)
    for number, method in enumerate(methods):
        _draw_lead(left, run, method, shift=0.5 * (number - (len(methods) - 1) / 2))
    left.axhline(0, color=COLOURS[ALONE], linewidth=1.5)
    left.set(xlabel="iterations", ylabel="points over GSPO, held-out reward", xticks=[EARLY, LATE], xlim=(16, 44))
    whose = f"Lead of {LABELS[subject]}" if len(methods) == 1 else "Leads over GSPO"
    left.set_title(f"{whose}, {len(run.seeds)} seeds, 95 % intervals", loc="left", fontsize=11)
    if len(methods) > 1:
        left.legend(frameon=False, fontsize=9)
    for method in (ALONE, *methods):
        _draw_entropy(right, run, method)
    right.set(xlabel="iteration", ylabel="entropy, nats per token")
    right.set_title("Diversity of the sampled answers", loc="left", fontsize=11)
    right.legend(frameon=False, fontsize=9)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    figure.savefig(file, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _draw_lead(panel: Any, run: Run, method: str, shift: float) -> None:
    leads = [run.lead(method, n) for n in (EARLY, LATE)]
    places = [EARLY + shift, LATE + shift]
    width = 3 if method == run.study.subject else 1.8
    style = {"color": COLOURS[method], "label": LABELS[method], "linewidth": width}
    panel.plot(places, [100 * d.mean for d in leads], "o-", **style)
    for at, d in zip(places, leads, strict=True):
        if np.isfinite(d.low):
            panel.plot([at, at], [100 * d.low, 100 * d.high], color=COLOURS[method], linewidth=2)


def _draw_entropy(panel: Any, run: Run, method: str) -> None:
    """Draw the mean over the seeds; of the subject and of GSPO each seed, too."""
    seeds = run.shared(method)
    steps = sorted(set.intersection(*(set(run.entropy[method][s]) for s in seeds)))
    values = np.array([[run.entropy[method][s][i] for i in steps] for s in seeds])
    smooth = np.array([np.convolve(v, np.ones(3) / 3, mode="valid") for v in values])
    main = method in (ALONE, run.study.subject)
    for line in smooth if main else ():
        panel.plot(steps[1:-1], line, color=COLOURS[method], alpha=0.2, linewidth=0.8)
    style = {"color": COLOURS[method], "label": LABELS[method], "linewidth": 3 if main else 1.8}
    panel.plot(steps[1:-1], smooth.mean(axis=0), **style)


def table(run: Run, rivals: Sequence[str] = (ALONE,), more: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Write what each method measured: reward before, at both times, the leads over some rivals, and the entropy.

    ``more``: columns at the right, each with a cell for every method.
    """
    more = more or {}
    head = ["method", "seeds", "before", f"after {EARLY}", f"after {LATE}"]
    head += [name for rival in rivals for name in (f"over {LABELS[rival]} after {EARLY}", f"after {LATE}")]
    head += ["entropy, first 5 iterations", "last 5", *more]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for method, label in LABELS.items():
        seeds = run.shared(method)
        if not seeds:
            continue
        cells = [label, str(len(seeds)), *(f"{100 * np.mean(run.at(method, n, seeds)):.1f}" for n in (0, EARLY, LATE))]
        for rival in rivals:
            cells += ["" if method == rival else said(run.lead(method, n, rival)) for n in (EARLY, LATE)]
        cells += [f"{np.mean(run.diversity(method, steps)):.4f}" for steps in (FIRST, LAST)]
        lines.append("| " + " | ".join([*cells, *(column[method] for column in more.values())]) + " |")
    return "\n".join(lines)


def said(d: Difference) -> str:
    """Write a difference in points with its interval and the seeds in which it is positive."""
    interval = f"{100 * d.low:+.1f} to {100 * d.high:+.1f}, " if np.isfinite(d.low) else ""
    return f"{100 * d.mean:+.1f} ({interval}{d.higher} of {d.seeds} up)"


def span(seeds: Sequence[int]) -> str:
    """Write seeds in a row as their first and last one, and others one by one."""
    in_a_row = len(seeds) > 1 and seeds[-1] - seeds[0] == len(seeds) - 1
    return f"{seeds[0]} to {seeds[-1]}" if in_a_row else ", ".join(map(str, seeds))


def wrapped(text: str) -> str:
    """Wrap a paragraph as the pages are."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def replaced(text: str, script: str, told: str) -> str:
    """Put what a script says between its marks in docs/results.md, wrapped."""
    first, last = f"<!-- {script} writes this -->", "<!-- until here -->"
    before, rest = text.split(first, 1)
    _, after = rest.split(last, 1)
    return f"{before}{first}\n{wrapped(told)}\n{last}{after}"


def in_nav(site: str, page: str, behind: str = "protocol") -> str:
    """Put a page into the site's navigation, behind another one."""
    before, entry = f"results/{behind}.md, ", f"results/{page}.md, "
    return site if entry in site else site.replace(before, before + entry, 1)
