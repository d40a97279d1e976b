"""Write docs/arena.md from the committed cells: every method on every task that has run, and who is ahead.

python docs/results/build/arena.py
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import fresh
import numpy as np
import tuning
from longrun import EARLY, span
from readme_picture import RESULTS, Ends, read_ends

from flows.sweep.statistics import compare_seeds

PAGE = RESULTS.parent / "arena.md"
# What all methods are compared with: it is in every sweep.
RIVAL = "gspo_x2"


@dataclass(frozen=True)
class Task:
    """A sweep's cells, and what its agents and problems are."""

    sweeps: tuple[str, ...]
    name: str
    what: str


TASKS = (
    Task(("even",), "taught the same", "half addition, half subtraction for both agents; rates tuned per method"),
    Task(("even-methods",), "taught the same, every method", "the first eight seeds again; {rates}"),
    Task(("even-fresh",), "taught the same, fresh seeds", "seeds {seeds}, after 20 of their 40 iterations; {rates}"),
    Task(
        ("even-three",),
        "taught the same, three agents",
        "against GSPO×3, which samples as many answers as three agents share; not tuned",
    ),
    Task(("main", "rivals"), "opposite strengths", "ada was taught mostly addition, ben mostly subtraction"),
    Task(("confirm",), "the same, fresh seeds", "claims written down before"),
    Task(("answers",), "several valid answers", "opposite strengths, answers right within 5 %"),
    Task(("gap",), "a large gap", "ada starts at 87 %, ben at 41 %"),
)
# Shared GSPO was called Naive with the ratio to the sampler first; the settings are the same. Three agents are compared
# with three times the answers.
SAME = {"naive_sampler_ratio": "shared_gspo", "gspo_x3": RIVAL}
LABELS = {
    "gspo": "GSPO",
    "hacpo": "HACPO",
    "shared_gspo": "shared GSPO",
    "naive": "Naive (as own, SAPO)",
    "grpo": "GRPO",
    "pessimistic": "HACPO, pessimistic",
    "undamped": "pessimistic, α = 0",
    "closed": "pessimistic, α = 0, δ = 0",
    "calibrated": "HACPO, calibrated",
    "raft_foreign": "foreign successes only (RAFT)",
    "topr": "TOPR",
    "cispo": "CISPO",
    "luffy": "LUFFY",
    "prp": "PRP",
    "xgrpo": "XGRPO",
    "sgt": "SGT",
}


def arena(tasks: Mapping[str, Ends]) -> list[tuple[str, list[str], float]]:
    """Return for each method a cell for each task and its mean over the tasks it ran on, the best first."""
    rows = []
    for method, label in LABELS.items():
        differences = [compare_seeds(e.after.get(method, {}), e.after.get(RIVAL, {})) for e in tasks.values()]
        cells = [
            ""
            if d is None
            else f"{100 * d.mean:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f}), {d.higher}/{d.seeds}"
            for d in differences
        ]
        known = [100 * d.mean for d in differences if d is not None]
        if known:
            rows.append((label, cells, float(np.mean(known))))
    return sorted(rows, key=lambda row: (-sum(bool(cell) for cell in row[1]), -row[2]))


def ends_of(task: Task, folder: Path = RESULTS) -> Ends:
    """Read a task's cells, with one name for each method. Sweeps of one task share seeds and first versions.

    A sweep without committed cells is left out; a method that several sweeps have is that of the first one.
    """
    parts = [
        halfway(folder) if sweep == fresh.STUDY.sweep else read_ends(sweep, folder) for sweep in there(task, folder)
    ]
    after: dict[str, Mapping[int, float]] = {}
    for part in parts:
        for method, seeds in part.after.items():
            after.setdefault(SAME.get(method, method), seeds)
    return Ends(parts[0].before, after, parts[0].no_signal)


def halfway(folder: Path = RESULTS) -> Ends:
    """Return the rewards of the fresh seeds after as many iterations as the other tasks have."""
    run = fresh.complete(folder)
    assert run is not None
    early = {m: dict(zip(run.seeds, run.at(m, EARLY), strict=True)) for m in fresh.STUDY.needed}
    return Ends({}, early, {})


def there(task: Task, folder: Path = RESULTS) -> list[str]:
    """Return the sweeps of a task that have committed cells; of the fresh seeds at least two must be complete."""
    if fresh.STUDY.sweep in task.sweeps and fresh.complete(folder) is None:
        return []
    return [sweep for sweep in task.sweeps if (folder / f"{sweep}-cells.csv").exists()]


def page(folder: Path = RESULTS) -> str:
    """Write the page."""
    ran = [task for task in TASKS if there(task, folder)]
    tasks = {task.name: ends_of(task, folder) for task in ran}
    run = fresh.complete(folder)
    known = {
        "rates": "rates tuned per method" if tuning.read_tuning(folder) else "untuned methods at 1e-4",
        "seeds": span(run.seeds) if run else "",
    }
    lines = [
        TOP,
        "| method | " + " | ".join(t.name for t in ran) + " | mean, for the order only |",
        "|---" + "|--:" * (len(ran) + 1) + "|",
    ]
    lines += [f"| {label} | " + " | ".join(cells) + f" | {mean:+.1f} |" for label, cells, mean in arena(tasks)]
    lines.append(MIDDLE)
    for t in ran:
        names = " and ".join(f"{name}.yaml" for name in there(t, folder))
        lines.append(f"* **{t.name}** ({names}): {t.what.format(**known)}.")
    return "\n".join([*lines, BOTTOM])


TOP = """# Arena: every method on every task

How far does each way of learning from each other get, against an agent that learns alone from **twice the answers**
(GSPO×2)? A cell is the difference in points of held-out accuracy, the mean of both agents, with its 95 % interval and
the seeds in which it is higher. All other methods sample half of what GSPO×2 samples. Methods that ran on more tasks
come first, then the higher mean.
"""
MIDDLE = """
The tasks:
"""
BOTTOM = """
**How to read it.** Cells of one column have the same seeds and the same first versions, so they may be compared.
Columns may not be pooled: they differ in agents, in tuning and in the measure. That is the mean reward at temperature 1
for the columns *taught the same* and the greedy accuracy for all others. Only claims that were written down before
count as shown: see [results](results.md) and [the first comparison](results/complementary.md). The intervals here are
single ones, without correction.

`make arena` runs a quick look at seven methods, two seeds each, in minutes. `hacrl methods` lists all methods with
their equations. [Every method](results/methods.md) has the second column with greedy answers beside it. The page is
written by `docs/results/build/arena.py` from the committed cells.
"""

if __name__ == "__main__":
    PAGE.write_text(page())
