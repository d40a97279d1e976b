"""``hacrl plan``: what a campaign will take on a cluster, before anybody rents it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.common import ConfigArgument, HomeOption, SetOption, one_line_errors
from flows.home import Home
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config

app = typer.Typer()


@app.command()
@one_line_errors
def plan(
    config: ConfigArgument,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="8xH100, 4xA100, 16x8xH100 (machines × GPUs) or cpu. Default: as many H100 as the config names.",
        ),
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(metavar="YAML", help="Your own rates, merged over the defaults: see --show-rates."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="CAMPAIGN", help="Take what the stages of this campaign took so far, instead of the rates alone."
        ),
    ] = None,
    show_rates: Annotated[bool, typer.Option("--show-rates", help="Print the rates as YAML and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    set_: SetOption = None,
    home: HomeOption = None,
) -> None:
    """Compute memory, time, disk, idle GPUs and the critical path of a campaign. Nothing is run or downloaded.

    The real stage graph is simulated with a table of rates. Those of GPUs are assumptions until the first iteration:
    then --calibrate reads what the stages took. Exit code 2 if the campaign does not fit.
    """
    from flows.plan import view
    from flows.plan.calibrate import calibrated
    from flows.plan.graph import workload_of
    from flows.plan.plan import default_cluster, make_plan, parse_cluster
    from flows.plan.rates import dump_rates, load_rates
    from flows.record.history import read_history
    from hacrl_core.artifacts import open_store

    console, campaign, table = Console(), load_config(config, CampaignConfig, set_ or ()), load_rates(rates)
    place = parse_cluster(cluster or default_cluster(campaign), table)
    if calibrate is not None:
        where = Home.find(home)
        history = read_history(open_store(where.store), where.campaign(calibrate))
        table = calibrated(table, history, workload_of(history.config, place.device, place.gpus))
    if show_rates:
        typer.echo(dump_rates(table))
        return
    found = make_plan(campaign, place, table)
    if as_json:
        typer.echo(view.as_json(found))
    else:
        view.show_plan(console, found, campaign.iterations)
    raise typer.Exit(2 if found.faults else 0)
