"""``hacrl sweep``: run variants of a campaign with several seeds, and compare them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from flows.commands.common import HomeOption, SetOption, one_line_errors
from flows.home import Home
from hacrl_core.config.sweep import load_sweep
from hacrl_core.errors import HacrlError

app = typer.Typer()


@app.command()
@one_line_errors
def sweep(
    config: Annotated[
        Path, typer.Argument(metavar="SWEEP", help="The sweep's YAML file, e.g. configs/sweeps/main.yaml.")
    ],
    plan: Annotated[
        bool, typer.Option("--plan", help="Run nothing; show what would run, and how much of it is shared.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Run nothing; write the page, tables and pictures of the finished cells.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", min=1, help="Number of processes that run cells side by side. Default: as the sweep says."
        ),
    ] = None,
    pool: Annotated[
        bool,
        typer.Option(
            "--pool",
            help="Run nothing here; queue the cells in Prefect's work pool, where any hacrl worker takes them.",
        ),
    ] = False,
    set_: SetOption = None,
    home: HomeOption = None,
) -> None:
    """Run variants of a campaign with several seeds, share what they have in common, and compare them.

    After an interruption the same command resumes. Finished cells are not run again, so a variant or seed that is added
    to the file runs alone. --set overrides settings of the sweep, e.g. --set seeds=[1,2] or
    --set settings.iterations=10. Workers on several machines need a common bucket (settings.store); once they are done,
    the same command without --pool makes the report from it.
    """
    from flows.sweep.page import PAGE
    from flows.sweep.report import make_report
    from flows.sweep.run import plan_sweep, run_sweep, show_outcome, show_plan, sweep_folder
    from flows.sweep.written import write_report

    console, place = Console(), Home.find(home)
    chosen = load_sweep(config, [*(set_ or ()), *([f"concurrency={jobs}"] if jobs else [])])
    if plan:
        show_plan(console, chosen, plan_sweep(chosen, place)[0])
        return
    if pool:
        from flows.scheduling.deployments import queue_cells

        queue_cells(console, chosen.config.name, [cell.config for cell in chosen.cells], place)
        return
    if report:
        found, outcome = make_report(chosen, place.root), None
        write_report(found, sweep_folder(chosen, place))
    else:
        outcome = run_sweep(chosen, place, console)
        show_outcome(console, outcome)
        found = outcome.report or make_report(chosen, place.root)
    if found.comparisons:
        console.print()
        console.print(escape(found.overview()), highlight=False, soft_wrap=True)
        folder = sweep_folder(chosen, place)
        console.print(f"page:                             {folder / PAGE}", soft_wrap=True, highlight=False)
        console.print(f"tables, pictures and raw numbers: {folder}", soft_wrap=True, highlight=False)
    else:
        console.print(f"nothing to compare yet: no finished cell of the baseline {found.baseline}")
    if outcome is not None and outcome.failures:
        raise HacrlError(f"sweep {chosen.config.name}: {len(outcome.failures)} jobs failed; the others are finished")
