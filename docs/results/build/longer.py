"""Write docs/results/longer.md and its picture from the committed cells of even-longer.yaml.

python docs/results/build/longer.py

Does a method that learns from successes win early and lose its diversity later? The claims are those of the protocol's
addendum and its amendment: GSPO and shared GSPO, on the seeds that are complete in both.
"""

import csv
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from claims import Answer, Part, answers
from readme_picture import read_ends

from flows.sweep.statistics import LEVEL, Difference, compare, smallest_p

RESULTS = Path(__file__).resolve().parents[1]
METHODS = {"gspo": "GSPO", "gspo_x2": "GSPO×2", "hacpo": "HACPO", "shared_gspo": "shared GSPO"}
COLOURS = {"gspo": "#8a8a8a", "gspo_x2": "#4d4d4d", "hacpo": "#0072b2", "shared_gspo": "#d55e00"}
# The methods of the claims. The others ran on a few seeds and are exploratory.
ALONE, SHARING = "gspo", "shared_gspo"
EARLY, LATE = 20, 40
FIRST = range(1, 6)
FAMILY = 3
# Around the sentence about this run in docs/results.md.
MARKS = ("<!-- longer.py writes this -->", "<!-- until here -->")
# Iterations over which the entropy at the end is averaged.
LAST = range(36, 41)

# Method → seed → iterations done → value, the mean of both agents.
Curves = Mapping[str, Mapping[int, Mapping[int, float]]]


@dataclass(frozen=True)
class Run:
    """The curves of the cells that are complete."""

    # The seeds that both methods of the claims have.
    seeds: tuple[int, ...]
    accuracy: Curves
    entropy: Curves

    def shared(self, method: str) -> tuple[int, ...]:
        """Return the seeds of the claims that a method has, too."""
        return tuple(s for s in self.seeds if LATE in self.accuracy.get(method, {}).get(s, {}))

    def at(self, method: str, iterations: int, seeds: Sequence[int] | None = None) -> list[float]:
        """Return the held-out mean reward of each seed after so many iterations."""
        return [self.accuracy[method][seed][iterations] for seed in seeds or self.seeds]

    def diversity(self, method: str, steps: range = LAST) -> list[float]:
        """Return each seed's entropy per token, the mean over some iterations; the last ones unless told."""
        return [float(np.mean([self.entropy[method][seed][i] for i in steps])) for seed in self.shared(method)]

    def lead(self, method: str, iterations: int) -> Difference:
        """Return how much higher a method is than GSPO after so many iterations."""
        seeds = self.shared(method)
        return compare(self.at(method, iterations, seeds), self.at(ALONE, iterations, seeds))


def read_run(name: str = "even-longer", folder: Path = RESULTS) -> Run:
    """Read the committed curves."""
    accuracy = _curves(folder / f"{name}-curves.csv", "accuracy")
    logprob = _curves(folder / f"{name}-entropy.csv", "own_logprob")
    entropy = {m: {s: {i: -v for i, v in steps.items()} for s, steps in seeds.items()} for m, seeds in logprob.items()}
    there = [{s for s, steps in accuracy.get(m, {}).items() if LATE in steps} for m in (ALONE, SHARING)]
    return Run(tuple(sorted(set.intersection(*there))), accuracy, entropy)


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


@dataclass(frozen=True)
class Answered:
    """A claim of the addendum with its answer, the numbers behind it and Holm's p."""

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


def claims(run: Run) -> list[Answered]:
    """Answer claims 1, 4 and 5 of the addendum as one family."""
    early, late = (np.array(run.at(SHARING, n)) - np.array(run.at(ALONE, n)) for n in (EARLY, LATE))
    asked = (
        (f"After {LATE} iterations shared GSPO is higher than GSPO", run.lead(SHARING, LATE), True, "points"),
        (
            "The lead of shared GSPO over GSPO is smaller than after 20",
            compare(list(late), list(early)),
            False,
            "points",
        ),
        (
            "The entropy under shared GSPO is lower than under GSPO at the end",
            compare(run.diversity(SHARING), run.diversity(ALONE)),
            False,
            "nats per token",
        ),
    )
    # Entropies have no bound below which they count as equal.
    parts = [Part(d.p, d.p_same if u == "points" else None, ((d.mean > 0) == up,)) for _, d, up, u in asked]
    return [
        Answered(text, answer, d, p, unit)
        for (text, d, _, unit), (answer, p) in zip(asked, answers(parts), strict=True)
    ]


def draw(run: Run, file: Path) -> None:
    """Draw the lead over GSPO at both times, and the entropy over the iterations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.0), layout="constrained")
    leads = [run.lead(SHARING, n) for n in (EARLY, LATE)]
    early, late = (np.array(run.at(SHARING, n)) - np.array(run.at(ALONE, n)) for n in (EARLY, LATE))
    for pair in zip(100 * early, 100 * late, strict=True):
        left.plot([EARLY, LATE], pair, color=COLOURS[SHARING], alpha=0.25, linewidth=0.8)
    left.plot([EARLY, LATE], [100 * d.mean for d in leads], "o-", color=COLOURS[SHARING], linewidth=3)
    for at, d in zip((EARLY, LATE), leads, strict=True):
        if np.isfinite(d.low):
            left.plot([at, at], [100 * d.low, 100 * d.high], color=COLOURS[SHARING], linewidth=2)
    left.axhline(0, color=COLOURS[ALONE], linewidth=1.5)
    left.set(xlabel="iterations", ylabel="points over GSPO, held-out reward", xticks=[EARLY, LATE], xlim=(16, 44))
    left.set_title(f"Lead of shared GSPO, {len(run.seeds)} seeds, 95 % intervals", loc="left", fontsize=11)
    for method in (ALONE, SHARING):
        steps = sorted(set.intersection(*(set(run.entropy[method][s]) for s in run.seeds)))
        values = np.array([[run.entropy[method][s][i] for i in steps] for s in run.seeds])
        smooth = np.array([np.convolve(v, np.ones(3) / 3, mode="valid") for v in values])
        for line in smooth:
            right.plot(steps[1:-1], line, color=COLOURS[method], alpha=0.2, linewidth=0.8)
        right.plot(steps[1:-1], smooth.mean(axis=0), color=COLOURS[method], label=METHODS[method], linewidth=3)
    right.set(xlabel="iteration", ylabel="entropy, nats per token")
    right.set_title("Diversity of the sampled answers", loc="left", fontsize=11)
    right.legend(frameon=False, fontsize=9)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    figure.savefig(file, dpi=130, metadata={"Software": None})
    plt.close(figure)


def table(run: Run) -> str:
    """Write what each method measured: reward before, at both times, the lead, and the entropy."""
    head = ["method", "seeds", "before", f"after {EARLY}", f"after {LATE}", f"over GSPO after {EARLY}", f"after {LATE}"]
    head += ["entropy, first 5 iterations", "last 5"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for method, label in METHODS.items():
        seeds = run.shared(method)
        if not seeds:
            continue
        ends = [f"{100 * np.mean(run.at(method, n, seeds)):.1f}" for n in (0, EARLY, LATE)]
        leads = ["", ""] if method == ALONE else [_difference(run.lead(method, n)) for n in (EARLY, LATE)]
        entropies = [f"{np.mean(run.diversity(method, steps)):.4f}" for steps in (FIRST, LAST)]
        lines.append("| " + " | ".join([label, str(len(seeds)), *ends, *leads, *entropies]) + " |")
    return "\n".join(lines)


def _difference(d: Difference) -> str:
    interval = f"{100 * d.low:+.1f} to {100 * d.high:+.1f}, " if np.isfinite(d.low) else ""
    return f"{100 * d.mean:+.1f} ({interval}{d.higher} of {d.seeds} up)"


def page(run: Run, folder: Path = RESULTS) -> str:
    """Write the page."""
    template = (folder / "build" / "longer.md.head").read_text()
    few = (
        f"**{len(run.seeds)} seeds are too few** to show a difference: after the correction over three claims it takes "
        "at least seven. The numbers are an indication, not an answer.\n\n"
    )
    few = few if FAMILY * smallest_p(len(run.seeds)) >= LEVEL else ""
    rows = "\n".join(answered.row() for answered in claims(run))
    seeds = f"{run.seeds[0]} to {run.seeds[-1]}" if len(run.seeds) > 1 else str(run.seeds[0])
    beside = [label for method, label in METHODS.items() if method not in (ALONE, SHARING) and run.shared(method)]
    others = (
        f"Exploratory: {', '.join(beside)}. Means of rows with other seeds may not be compared; differences are paired "
        "and may.\n"
        if beside
        else ""
    )
    return template.format(
        few=few, claims=rows, table=table(run), count=len(run.seeds), seeds=seeds, others=others, greedy=greedy(folder)
    )


def greedy(folder: Path = RESULTS) -> str:
    """Say how the greedy answers, the secondary outcome, ended."""
    ends = read_ends("even-longer-greedy", folder)
    d = ends.difference(SHARING, ALONE)
    alone, sharing = (100 * np.mean(list(ends.after[method].values())) for method in (ALONE, SHARING))
    said = (
        f"**Greedy answers**, the secondary outcome, say something else: {sharing:.1f} % are right under shared GSPO "
        f"after {LATE} iterations and {alone:.1f} % under GSPO, a lead of {_difference(d)}. It was no claim."
    )
    return textwrap.fill(said, 120, break_long_words=False, break_on_hyphens=False)


def sentence(run: Run | None) -> str:
    """Say in docs/results.md what the longer run found; None: nothing of it is published."""
    if run is None:
        return (
            "Longer training of this pair was [begun](results/protocol.md#addendum-twice-as-long) and has too few "
            "seeds for any test, so a method that wins early may lose later."
        )
    early, late = (100 * run.lead(SHARING, n).mean for n in (EARLY, LATE))
    lead = f"In {len(run.seeds)} seeds that trained [twice as long](results/longer.md) shared GSPO ended {late:+.1f} "
    lead += f"points over GSPO, after {early:+.1f} halfway: "
    if FAMILY * smallest_p(len(run.seeds)) >= LEVEL:
        return lead + "too few seeds to show whether a method that wins early loses later."
    _, shrinks, entropy = claims(run)
    said = {"yes": "the lead shrinks", "no": "the lead grows", "no difference": "the lead stays within a point"}
    fewer = {"yes": "its answers become less diverse", "no": "its answers stay more diverse"}
    found = said.get(shrinks.answer, "whether the lead shrinks is not shown")
    by_greedy = 100 * read_ends("even-longer-greedy").difference(SHARING, ALONE).mean
    return (
        f"{lead}{found}, and {fewer.get(entropy.answer, 'a loss of diversity is not shown')}. By greedy answers, the "
        f"secondary outcome, it leads by {by_greedy:.1f} points."
    )


def replaced(text: str, said: str) -> str:
    """Put the sentence between its marks in docs/results.md, wrapped."""
    before, rest = text.split(MARKS[0], 1)
    _, after = rest.split(MARKS[1], 1)
    wrapped = textwrap.fill(said, 120, break_long_words=False, break_on_hyphens=False)
    return f"{before}{MARKS[0]}\n{wrapped}\n{MARKS[1]}{after}"


def in_nav(site: str) -> str:
    """Put the page into the site's navigation, behind the protocol."""
    before, page = "results/protocol.md, ", "results/longer.md, "
    return site if page in site else site.replace(before, before + page, 1)


def committed() -> Run | None:
    """Return the committed run, if there is one."""
    return read_run() if (RESULTS / "even-longer-curves.csv").exists() else None


def main() -> None:
    """Write picture and page, if there are cells, its place on the site, and the sentence of docs/results.md."""
    run = committed()
    results = RESULTS.parent / "results.md"
    results.write_text(replaced(results.read_text(), sentence(run)))
    if run is None:
        print("no cells of even-longer.yaml: docs/results/longer.md is not written")
        return
    draw(run, RESULTS / "even-longer.png")
    (RESULTS / "longer.md").write_text(page(run))
    site = RESULTS.parents[1] / "mkdocs.yml"
    site.write_text(in_nav(site.read_text()))


if __name__ == "__main__":
    main()
