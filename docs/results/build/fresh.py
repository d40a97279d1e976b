"""Write docs/results/fresh.md and its picture from the committed cells of even-fresh.yaml.

python docs/results/build/fresh.py

Does the winner of the fourteen methods hold on seeds that nobody had seen, after 20 iterations and after 40? The claims
are those of the protocol's addendum, on the seeds that are complete in all four methods. What README.md may say of them
is printed.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from longrun import (
    ALONE,
    EARLY,
    HERE,
    LABELS,
    LATE,
    RESULTS,
    TWICE,
    Answered,
    Asked,
    Run,
    Study,
    answer,
    committed,
    draw,
    in_nav,
    later,
    replaced,
    said,
    span,
    table,
    too_few,
    wrapped,
)
from readme_picture import read_rows
from tuning import short

from flows.sweep.statistics import Difference, compare_seeds
from hacrl_core.config.sweep import Sweep, load_sweep

RAFT, HACPO = "raft_foreign", "hacpo"
STUDY = Study("even-fresh", RAFT, (ALONE, TWICE, HACPO, RAFT), family=6)
# What is compared after 40 iterations: claims 1 to 4.
PAIRS = ((RAFT, ALONE), (RAFT, TWICE), (RAFT, HACPO), (HACPO, ALONE))
BOTH = ("ada", "ben")
PROTOCOL = "results/protocol.md#addendum-every-method-tuned-and-fresh-seeds"


def claims(run: Run) -> list[Answered]:
    """Answer the six claims of the addendum as one family."""
    ends = [
        Asked(f"After {LATE} iterations {LABELS[method]} is higher than {LABELS[to]}", run.lead(method, LATE, to), True)
        for method, to in PAIRS
    ]
    return answer(
        (
            *ends,
            Asked(f"The lead of RAFT over GSPO is smaller than after {EARLY}", run.change(RAFT), False),
            Asked(
                "The entropy under RAFT is lower than under GSPO at the end",
                run.diversity_lead(RAFT),
                False,
                "nats per token",
            ),
        )
    )


def complete(folder: Path = RESULTS) -> Run | None:
    """Return the committed run; None unless at least two of its seeds are complete."""
    run = committed(STUDY, folder)
    return run if run is not None and len(run.seeds) > 1 else None


# -- the page ---------------------------------------------------------------------------------------------------------


def planned() -> Sweep:
    """Return the sweep as it was planned: its seeds and learning rates."""
    return load_sweep(HERE.parents[2] / f"configs/sweeps/{STUDY.sweep}.yaml")


def ends(run: Run, file: Path, agents: tuple[str, ...] = BOTH) -> Mapping[str, Mapping[int, float]]:
    """Return how cells ended by method and seed: the mean of some agents, on the seeds of the claims."""
    found: dict[str, dict[int, list[float]]] = {method: {} for method in STUDY.needed}
    for row in read_rows(file):
        if row["agent"] in agents and int(row["seed"]) in run.seeds:
            found[row["variant"]].setdefault(int(row["seed"]), []).append(float(row["after"]))
    return {m: {seed: float(np.mean(values)) for seed, values in seeds.items()} for m, seeds in found.items()}


def greedy(run: Run, folder: Path = RESULTS) -> Mapping[str, Mapping[int, float]]:
    """Return the greedy accuracies at the end."""
    return ends(run, folder / f"{STUDY.sweep}-greedy-cells.csv")


def secondary(run: Run, folder: Path = RESULTS) -> str:
    """Write the differences of the secondary outcomes: greedy answers, and each agent alone."""
    cells = folder / f"{STUDY.sweep}-cells.csv"
    columns = {"greedy answers": greedy(run, folder)}
    columns |= {f"{agent} alone": ends(run, cells, (agent,)) for agent in BOTH}
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|--:" * len(columns) + "|"]
    for method, to in PAIRS:
        found = " | ".join(said(_difference(column, method, to)) for column in columns.values())
        lines.append(f"| {LABELS[method]} over {LABELS[to]} | {found} |")
    return "\n".join(lines)


def _difference(values: Mapping[str, Mapping[int, float]], method: str, to: str) -> Difference:
    found = compare_seeds(values[method], values[to])
    assert found is not None
    return found


def page(run: Run, folder: Path = RESULTS) -> str:
    """Write the page."""
    plan = planned()
    state = (
        f"All {len(run.seeds)} seeds, {span(run.seeds)}, are complete in all four methods."
        if run.seeds == plan.config.seeds
        else f"{len(run.seeds)} of the {len(plan.config.seeds)} planned seeds were complete in all four methods when "
        f"the run ended, and they alone are used: {span(run.seeds)}."
    )
    rows = read_rows(folder / f"{STUDY.sweep}-cells.csv")
    commits = sorted({commit for row in rows if int(row["seed"]) in run.seeds for commit in row["commit"].split("+")})
    if len(commits) > 1:
        state += (
            f" Unlike the protocol says, their cells are of several versions of this project: {', '.join(commits)}."
        )
    by_rate: dict[float, list[str]] = {}
    for variant, rate in {c.variant: c.config.update.learning_rate for c in plan.cells}.items():
        by_rate.setdefault(rate, []).append(LABELS[variant])
    rates = [f"{short(rate)} ({', '.join(names)})" for rate, names in by_rate.items()]
    right = {method: f"{100 * np.mean(list(values.values())):.1f}" for method, values in greedy(run, folder).items()}
    values = {
        "few": too_few(run),
        "state": wrapped(state),
        "claims": "\n".join(answered.row() for answered in claims(run)),
        "table": table(run, (ALONE, TWICE), {"greedy": right}),
        "rates": wrapped(f"Learning rates, tuned for 20 iterations: {'; '.join(rates)}."),
        "secondary": secondary(run, folder),
    }
    return (HERE / "fresh.md.head").read_text().format(**values)


# -- what other pages say ---------------------------------------------------------------------------------------------


def sentences(run: Run | None, folder: Path = RESULTS) -> str:
    """Say in docs/results.md what the fresh seeds found, in two sentences; None: nothing of it is published."""
    if run is None:
        return f"Whether RAFT leads on fresh seeds, too, and for how long is [asked]({PROTOCOL}) and not answered yet."
    answered = claims(run)
    numbers = []
    for a, (_, to) in zip(answered[: len(PAIRS)], PAIRS, strict=True):
        verdict = {"yes": "shown", "no": "the opposite is shown"}.get(a.answer, a.answer)
        numbers.append(f"{100 * a.difference.mean:+.1f} points over {LABELS[to]}{'' if run.few else f' ({verdict})'}")
    first = (
        f"On {len(run.seeds)} [fresh seeds](results/fresh.md) that trained twice as long, each method at its tuned "
        f"rate, RAFT ended {numbers[0]}, {numbers[1]} and {numbers[2]}, and HACPO {numbers[3]}"
    )
    by_greedy = 100 * _difference(greedy(run, folder), RAFT, ALONE).mean
    halfway = f"RAFT's lead over GSPO was {100 * run.lead(RAFT, EARLY).mean:+.1f} points halfway"
    at_end = f"by greedy answers, the secondary outcome, it ends at {by_greedy:+.1f}"
    if run.few:
        return f"{first}: too few seeds to show a difference. {halfway}; {at_end}."
    return f"{first}. {halfway}: {later(answered[4], answered[5])}; {at_end}."


def readme_rows(run: Run) -> str:
    """Write rows for README.md's table of claims: the answer, the difference and the seeds in which it is positive."""
    rows = []
    for a in claims(run):
        d = a.difference
        size = f"{100 * d.mean:.1f} points" if a.unit == "points" else f"{d.mean:+.4f} {a.unit}"
        bold = f"**{a.answer}**" if a.answer in ("yes", "no") else a.answer
        rows.append(f"| {a.text} | {bold}: {size}, {d.higher} of {d.seeds} seeds | not run |")
    return "\n".join(rows)


def main(docs: Path = RESULTS.parent) -> None:
    """Write picture and page, if at least two seeds are complete, its place on the site, and docs/results.md's part."""
    folder = docs / "results"
    run = complete(folder)
    results = docs / "results.md"
    results.write_text(replaced(results.read_text(), "fresh.py", sentences(run, folder)))
    if run is None:
        print("fewer than two complete seeds of even-fresh.yaml: docs/results/fresh.md is not written")
        return
    draw(run, [TWICE, HACPO, RAFT], folder / "even-fresh.png")
    (folder / "fresh.md").write_text(page(run, folder))
    site = docs.parent / "mkdocs.yml"
    site.write_text(in_nav(site.read_text(), "fresh", behind="longer"))
    print(readme_rows(run))


if __name__ == "__main__":
    main()
