"""Commands for the servers of a home folder and for scheduled campaigns."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.common import HomeOption, SetOption, one_line_errors
from flows.home import Home
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from hacrl_core.errors import ConfigError

app = typer.Typer()


@app.command()
@one_line_errors
def up(
    postgres: Annotated[
        str | None,
        typer.Option(
            "--postgres",
            envvar="HACRL_POSTGRES_URL",
            metavar="URL",
            show_envvar=True,
            help="Keep the servers' state in PostgreSQL: postgresql://user:password@host:5432/hacrl creates and uses "
            "the databases hacrl_prefect and hacrl_mlflow. Default: sqlite files in the home folder.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen. Anything but loopback needs credentials (docs/operations.md).")
    ] = "127.0.0.1",
    name: Annotated[
        str | None,
        typer.Option(
            help="With --host: the name under which other machines reach this one. Default: its own.",
            show_default=False,
        ),
    ] = None,
    prefect_port: Annotated[int, typer.Option(min=1, max=65535)] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    limit: Annotated[int, typer.Option(min=1, help="How many scheduled campaigns may run at a time.")] = 4,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Also start the head of a Ray cluster on loopback, for trying: hacrl run … --set runtime.executor=ray "
            "--set runtime.address=127.0.0.1:6379 (docs/cluster.md).",
        ),
    ] = False,
    ray_port: Annotated[int, typer.Option(min=1, max=65535)] = 6379,
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground", help="Stay in this terminal and end the servers with Ctrl-C, as systemd expects it."
        ),
    ] = False,
    home: HomeOption = None,
) -> None:
    """Start Prefect's and MLflow's servers and a worker, and wait until they answer. Servers that already run stay."""
    from flows.servers import up as servers
    from flows.servers.postgres import POSTGRES, check_address
    from flows.servers.supervisor import ServerOptions, default_name

    if postgres:
        check_address(postgres)
        os.environ[POSTGRES] = postgres
    else:
        os.environ.pop(POSTGRES, None)
    options = ServerOptions(
        host, prefect_port, mlflow_port, name or default_name(host), limit, ray_port if ray else None
    )
    servers.up(Console(), Home.find(home), options, foreground=foreground)


@app.command()
@one_line_errors
def down(
    force: Annotated[bool, typer.Option("--force", help="Even if a campaign in a terminal uses the servers.")] = False,
    home: HomeOption = None,
) -> None:
    """End the servers that `hacrl up` started. A scheduled campaign that runs is stopped; its next run resumes it."""
    from flows.servers import up as servers

    servers.down(Console(), Home.find(home), force=force)


@app.command()
@one_line_errors
def ps(home: HomeOption = None) -> None:
    """Show the servers: addresses, processes, memory, and whether they answer. Exit code 1 if one does not."""
    from flows.servers import up as servers

    raise typer.Exit(0 if servers.show(Console(), Home.find(home)) else 1)


@app.command()
@one_line_errors
def worker(
    api: Annotated[str, typer.Option(metavar="URL", help="Prefect's API elsewhere: http://HEAD:4200/api.")],
    name: Annotated[str | None, typer.Option(help="The worker's name; default: this machine's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many campaigns may run here at a time.")] = 1,
    home: HomeOption = None,
) -> None:
    """Run deployed campaigns on this machine, in its own home, for a Prefect server elsewhere; until Ctrl-C.

    Deploy with --anywhere: docs/cluster.md.
    """
    from flows.servers.join import join_pool

    join_pool(Console(), Home.find(home), api, name, limit)


@app.command()
@one_line_errors
def deploy(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A campaign's YAML file, usually with a schedule.")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Show what is deployed, the next run and the last result.")
    ] = False,
    remove: Annotated[
        str | None, typer.Option(metavar="NAME", help="Remove a campaign's deployment; artifacts stay.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Also queue a run right away.")] = False,
    anywhere: Annotated[
        bool,
        typer.Option("--anywhere", help="Workers of other machines may run it: no folder of this machine is used."),
    ] = False,
    set_: SetOption = None,
    home: HomeOption = None,
) -> None:
    """Run a campaign on a schedule (schedule in its config), through the worker that `hacrl up` started."""
    from flows.scheduling import deployments

    console = Console()
    place = Home.find(home)
    if (config is not None) + list_ + (remove is not None) != 1:
        raise ConfigError("hacrl deploy: give one of CONFIG, --list, --remove NAME")
    if list_:
        deployments.show(console, place)
    elif remove is not None:
        deployments.remove(console, remove, place)
    elif config is not None:
        deployments.deploy(console, load_config(config, CampaignConfig, set_ or ()), place, now=now, anywhere=anywhere)
