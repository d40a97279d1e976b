"""Write docs/results/longer.md and its picture from the committed cells of even-longer.yaml.

python docs/results/build/longer.py

Does a method that learns from successes win early and lose its diversity later? The claims are those of the protocol's
addendum and its amendment: GSPO and shared GSPO, on the seeds that are complete in both.
"""

from pathlib import Path

import numpy as np
from longrun import (
    ALONE,
    EARLY,
    HERE,
    LABELS,
    LATE,
    RESULTS,
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
from readme_picture import read_ends

SHARING = "shared_gspo"
# The methods of the claims. The others ran on a few seeds and are exploratory.
STUDY = Study("even-longer", SHARING, (ALONE, SHARING), family=3)


def claims(run: Run) -> list[Answered]:
    """Answer claims 1, 4 and 5 of the addendum as one family."""
    entropy = run.diversity_lead(SHARING)
    return answer(
        (
            Asked(f"After {LATE} iterations shared GSPO is higher than GSPO", run.lead(SHARING, LATE), up=True),
            Asked("The lead of shared GSPO over GSPO is smaller than after 20", run.change(SHARING), up=False),
            Asked(
                "The entropy under shared GSPO is lower than under GSPO at the end", entropy, False, "nats per token"
            ),
        )
    )


def page(run: Run, folder: Path = RESULTS) -> str:
    """Write the page."""
    rows = "\n".join(answered.row() for answered in claims(run))
    beside = [label for method, label in LABELS.items() if method not in STUDY.needed and run.shared(method)]
    others = (
        f"Exploratory: {', '.join(beside)}. Means of rows with other seeds may not be compared; differences are paired "
        "and may.\n"
        if beside
        else ""
    )
    return (
        (HERE / "longer.md.head")
        .read_text()
        .format(
            few=too_few(run),
            claims=rows,
            table=table(run),
            count=len(run.seeds),
            seeds=span(run.seeds),
            others=others,
            greedy=greedy(folder),
        )
    )


def greedy(folder: Path = RESULTS) -> str:
    """Say how the greedy answers, the secondary outcome, ended."""
    ends = read_ends("even-longer-greedy", folder)
    d = ends.difference(SHARING, ALONE)
    alone, sharing = (100 * np.mean(list(ends.after[method].values())) for method in (ALONE, SHARING))
    return wrapped(
        f"**Greedy answers**, the secondary outcome, say something else: {sharing:.1f} % are right under shared GSPO "
        f"after {LATE} iterations and {alone:.1f} % under GSPO, a lead of {said(d)}. It was no claim."
    )


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
    if run.few:
        return lead + "too few seeds to show whether a method that wins early loses later."
    _, shrinks, entropy = claims(run)
    by_greedy = 100 * read_ends("even-longer-greedy").difference(SHARING, ALONE).mean
    found = later(shrinks, entropy)
    return f"{lead}{found}. By greedy answers, the secondary outcome, it leads by {by_greedy:.1f} points."


def main() -> None:
    """Write picture and page, if there are cells, its place on the site, and the sentence of docs/results.md."""
    run = committed(STUDY)
    results = RESULTS.parent / "results.md"
    results.write_text(replaced(results.read_text(), "longer.py", sentence(run)))
    if run is None:
        print("no cells of even-longer.yaml: docs/results/longer.md is not written")
        return
    draw(run, [SHARING], RESULTS / "even-longer.png")
    (RESULTS / "longer.md").write_text(page(run))
    site = RESULTS.parents[1] / "mkdocs.yml"
    site.write_text(in_nav(site.read_text(), "longer"))


if __name__ == "__main__":
    main()
