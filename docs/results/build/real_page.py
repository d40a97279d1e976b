"""Write docs/results/real.md and its picture from the committed cells of real.yaml.

python docs/results/build/real_page.py [--home HOME]

With a home the CSV files are written first, from the finished cells in its store and from HOME/cpu.csv, which
``benchmarks/stage_cpu.py`` wrote while they ran. Every number of the page is of these files.
"""

import argparse
import csv
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flows.sweep.statistics import Difference, compare, smallest_p

RESULTS = Path(__file__).resolve().parents[1]
NAME = "real"
METHODS = {"gspo": "GSPO", "hacpo": "HACPO", "shared_gspo": "shared GSPO"}
COLOURS = {"gspo": "#8a8a8a", "hacpo": "#0072b2", "shared_gspo": "#d55e00"}
ALONE = "gspo"
AGENTS = {"smol": "SmolLM2", "gemma": "gemma"}
BOTH = "both"
# Held-out answers of one agent in one cell.
ANSWERS = 56
# Seeds of the protocol.
PLANNED = 3

Row = dict[str, str]


@dataclass(frozen=True)
class Run:
    """The committed rows of the seeds that are complete in all methods, and what all stages cost."""

    seeds: tuple[int, ...]
    cells: tuple[Row, ...]
    costs: tuple[Row, ...]

    def values(self, method: str, agent: str, column: str) -> list[float]:
        """Return a column by seed, of one agent or the mean of both; empty where it was not measured."""
        names = list(AGENTS) if agent == BOTH else [agent]
        found = {(int(r["seed"]), r["agent"]): r[column] for r in self.cells if r["variant"] == method}
        if not all(found[seed, name] for seed in self.seeds for name in names):
            return []
        return [float(np.mean([float(found[seed, name]) for name in names])) for seed in self.seeds]

    def lead(self, method: str, agent: str) -> Difference:
        """Return how much higher a method ends than GSPO, paired by seed."""
        return compare(self.values(method, agent, "after"), self.values(ALONE, agent, "after"))


def read_run(folder: Path = RESULTS) -> Run:
    """Read the committed files; cells of incomplete seeds are left out."""
    cells, costs = (_rows(folder / f"{NAME}-{what}.csv") for what in ("cells", "costs"))
    there = [{int(r["seed"]) for r in cells if r["variant"] == method} for method in METHODS]
    seeds = tuple(sorted(set.intersection(*there)))
    return Run(seeds, tuple(r for r in cells if int(r["seed"]) in seeds), tuple(costs))


def _rows(file: Path) -> list[Row]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


# -------------------- From the store to the files --------------------------------------------------


def export(home: Path, sweep_file: Path, folder: Path = RESULTS) -> None:
    """Write the CSV files from the finished cells of a home."""
    from flows.sweep.report import cells_csv, make_report
    from hacrl_core.config.sweep import load_sweep

    sweep = load_sweep(sweep_file)
    report = make_report(sweep, home)
    (folder / f"{NAME}-cells.csv").write_text(cells_csv(report.results))
    (folder / f"{NAME}-costs.csv").write_text(costs_csv(home))


def costs_csv(home: Path) -> str:
    """Write calls, seconds of the clock and CPU seconds of every stage in the store, once however many cells share it.

    The last row, without a stage, has the clock's seconds of the whole run, and the CPU seconds outside of stages:
    starting, loading libraries, publishing, Prefect.
    """
    sys.path.insert(0, str(RESULTS.parents[1]))
    from benchmarks.stage_cpu import Ran, by_stage, read
    from flows.record.record import read_entries
    from hacrl_core.artifacts.manifests import read_manifest

    owners = {e.key: (e.stage, e.agent) for folder in (home / "campaigns").iterdir() for e in read_entries(folder)}
    ran: dict[str, list[Ran]] = {}
    for key, (stage, agent) in owners.items():
        made = read_manifest(home / "store" / "objects" / stage / key).provenance
        name = f"{stage},{agent}"
        ran.setdefault(name, []).append(Ran(name, made.started, made.finished, made.process))
    slices = read(home / "cpu.csv")
    cpu = by_stage(slices, [r for calls in ran.values() for r in calls])
    clock = sum(end - begin for begin, end in {(s.begin, s.end) for s in slices})
    lines = ["stage,agent,calls,seconds,cpu_seconds"]
    for name, calls in sorted(ran.items()):
        lines.append(f"{name},{len(calls)},{sum(r.end - r.begin for r in calls):.1f},{cpu.get(name, 0.0):.1f}")
    return "\n".join([*lines, f",,,{clock:.1f},{cpu['']:.1f}"]) + "\n"


# -------------------- From the files to the page ---------------------------------------------------


def table(run: Run) -> str:
    """Write each method's reward before and after by agent, the difference to GSPO, and what explains it."""
    head = ["method", "agent", "before", "after", "over GSPO", "each seed", "foreign ratio", "inside", "no signal"]
    lines = ["| " + " | ".join([*head, "responses"]) + " |", "|---|---" + "|--:" * (len(head) - 1) + "|"]
    for method, label in METHODS.items():
        for agent in (BOTH, *AGENTS):
            ends = [_percent(run.values(method, agent, column)) for column in ("before", "after")]
            lead, each = ("", "") if method == ALONE else _lead(run, method, agent)
            why = [_mean(run.values(method, agent, column)) for column in ("foreign_ratio", "inside", "no_signal")]
            count = run.values(method, agent, "responses")
            responses = f"{(2 if agent == BOTH else 1) * np.mean(count):,.0f}"
            cells = [label if agent == BOTH else "", AGENTS.get(agent, BOTH), *ends, lead, each, *why, responses]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _lead(run: Run, method: str, agent: str) -> tuple[str, str]:
    d = run.lead(method, agent)
    pairs = zip(run.values(method, agent, "after"), run.values(ALONE, agent, "after"), strict=True)
    each = ", ".join(f"{100 * (mine - other):+.1f}" for mine, other in pairs)
    interval = f" ({100 * d.low:+.1f} to {100 * d.high:+.1f})" if np.isfinite(d.low) else ""
    return f"{100 * d.mean:+.1f}{interval}", each


def _percent(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.1f}"


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f}" if values else ""


def costs_table(run: Run) -> str:
    """Write CPU seconds by stage and agent."""
    names = [*AGENTS, ""]
    stages = [s for s in dict.fromkeys(r["stage"] for r in run.costs) if s]
    lines = ["| stage | " + " | ".join([*AGENTS.values(), "shared"]) + " | calls | clock |", "|---" + "|--:" * 5 + "|"]
    found = {(r["stage"], r["agent"]): r for r in run.costs}
    order = sorted(stages, key=lambda s: -sum(float(r["cpu_seconds"]) for r in run.costs if r["stage"] == s))
    for stage in order:
        mine = [found.get((stage, name)) for name in names]
        cpu = [f"{float(r['cpu_seconds']):,.0f}" if r else "" for r in mine]
        calls, clock = sum(int(r["calls"]) for r in mine if r), sum(float(r["seconds"]) for r in mine if r)
        lines.append(f"| {stage} | " + " | ".join(cpu) + f" | {calls} | {clock:,.0f} |")
    lines.append(f"| outside of stages |  |  | {float(found['', '']['cpu_seconds']):,.0f} |  |  |")
    return "\n".join(lines)


def cpu_minutes(run: Run) -> float:
    """Return the CPU minutes of everything."""
    return sum(float(r["cpu_seconds"]) for r in run.costs) / 60


def draw(run: Run, file: Path) -> None:
    """Draw the held-out reward at the end by agent, method and seed, over the reward before."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained", sharey=True)
    for panel, agent in zip(panels, AGENTS, strict=True):
        for at, method in enumerate(METHODS):
            ends = 100 * np.array(run.values(method, agent, "after"))
            panel.plot(np.full(len(ends), at), ends, "o", color=COLOURS[method], alpha=0.55)
            panel.plot([at - 0.25, at + 0.25], [ends.mean()] * 2, color=COLOURS[method], linewidth=3)
        start = 100 * np.mean(run.values(ALONE, agent, "before"))
        panel.axhline(start, color="#333333", linewidth=1, linestyle=":")
        panel.annotate("before", (-0.45, start), xytext=(0, 3), textcoords="offset points", fontsize=9)
        panel.set(xticks=range(len(METHODS)), xticklabels=METHODS.values(), xlim=(-0.5, len(METHODS) - 0.5))
        panel.set_title(f"{AGENTS[agent]}, held-out problems", loc="left", fontsize=11)
    panels[0].set(ylabel="reward at temperature 1, percent", ylim=(0, None))
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    figure.savefig(file, dpi=130, metadata={"Software": None})
    plt.close(figure)


def page(run: Run, folder: Path = RESULTS) -> str:
    """Write the page."""
    template = (folder / "build" / "real.md.head").read_text()
    said = {method: run.lead(method, BOTH) for method in METHODS if method != ALONE}
    words = {f"{m}_said": f"{100 * d.mean:+.1f} points ({d.higher} of {d.seeds} seeds up)" for m, d in said.items()}
    inside = {f"inside_{a}": f"{100 * np.mean(run.values('hacpo', a, 'inside')):.0f} %" for a in AGENTS}
    many = len(run.seeds) > 1
    seeds = f"seed{'s' if many else ''} {', '.join(str(s) for s in run.seeds)}"
    by_agent = {a: sum(float(r["cpu_seconds"]) for r in run.costs if r["agent"] == a) for a in AGENTS}
    start = float(np.mean(run.values(ALONE, BOTH, "before")))
    filled = template.format(
        table=table(run),
        costs=costs_table(run),
        minutes=f"{cpu_minutes(run):.0f}",
        clock=f"{float(run.costs[-1]['seconds']) / 60:.0f}",
        gemma_share=f"{100 * by_agent['gemma'] / sum(by_agent.values()):.0f} %",
        seeds=seeds,
        test=_test(run),
        state=_state(run),
        iterations=max(int(r["iterations"]) for r in run.cells),
        cells=len({(r["variant"], r["seed"]) for r in run.cells}),
        answers=ANSWERS,
        error=f"{100 * np.sqrt(start * (1 - start) / ANSWERS):.0f}",
        partial=_partial(run),
        **words,
        **inside,
    )
    return "\n\n".join(_wrapped(part) for part in filled.split("\n\n"))


def _test(run: Run) -> str:
    """Say why so few seeds show nothing."""
    if len(run.seeds) == 1:
        return "one seed has neither an interval nor a test"
    return f"no two-sided test of {len(run.seeds)} seeds can fall below {smallest_p(len(run.seeds)):.2g}"


def _state(run: Run) -> str:
    """Say how many seeds are still to come."""
    left = PLANNED - len(run.seeds)
    return (
        f" {len(run.seeds)} of {PLANNED} seeds are complete; the others are added when they have run." if left else ""
    )


def _partial(run: Run) -> str:
    """Say how many updates were of cells that do not count, because their seed is not complete."""
    counted = sum(int(r["iterations"]) for r in run.cells)
    beyond = sum(int(r["calls"]) for r in run.costs if r["stage"] == "update") - counted
    return f" {beyond} of the updates are of cells whose seed is not complete." if beyond else ""


def _wrapped(part: str) -> str:
    """Wrap a paragraph at 120 columns; tables, headings, lists and pictures stay."""
    if part.startswith(("|", "#", "*", "!")) and not part.startswith("**"):
        return part
    end = "\n" if part.endswith("\n") else ""
    # Code and the texts of links stay on one line.
    whole = re.sub(r"`[^`]*`|\[[^]]*\]", lambda found: found[0].replace(" ", "\0"), " ".join(part.split()))
    return textwrap.fill(whole, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ") + end


def main() -> None:
    """Write the files if a home is given, then picture and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=None)
    parser.add_argument("--sweep", type=Path, default=Path("configs/sweeps/real.yaml"))
    options = parser.parse_args()
    if options.home is not None:
        export(options.home, options.sweep)
    run = read_run()
    draw(run, RESULTS / f"{NAME}.png")
    (RESULTS / f"{NAME}.md").write_text(page(run))


if __name__ == "__main__":
    main()
