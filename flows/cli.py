"""The ``hacrl`` command, made of the commands in ``flows/commands``."""

import atexit
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.commands import (
    campaigns,
    configs,
    exchange,
    methods,
    plan,
    servers,
    start,
    store,
    sweeps,
    tasks,
    track,
    views,
)
from flows.run.signals import end_quickly
from hacrl_core.place import ROOT

# A user's own verifier is a module beside the config; a console script does not search the current folder by itself.
# This project comes first, so that a folder of the user's named flows or stages does not replace its packages, neither
# here nor in the processes that are started with this path.
sys.path += [str(ROOT), str(Path.cwd())]


class App(typer.Typer):
    """The command line, with help in the usual form: no ``<bool>`` beside a flag, no braces around an argument."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that the arguments name."""
        atexit.register(end_quickly)
        return _with_plain_help(typer.main.get_command(self))(*args, **kwargs)


def _with_plain_help(command: Any) -> Any:
    for below in getattr(command, "commands", {}).values():
        _with_plain_help(below)
    for param in command.params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    # The option for help is made anew at each call.
    make_help = command.get_help_option
    command.get_help_option = lambda ctx: _without_type(make_help(ctx))
    pieces = command.collect_usage_pieces
    command.collect_usage_pieces = lambda ctx: [piece.strip("{}") for piece in pieces(ctx)]
    return command


def _without_type(flag: Any) -> Any:
    if flag is not None:
        flag.metavar = ""
    return flag


app = App(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train several different language models together on one verifiable task (HACPO), as a pipeline of cached "
    "stages.\n\nStart with [bold]hacrl init first[/bold], then [bold]hacrl run first.yaml[/bold]. Run the same command "
    "again to resume after a crash, or to see the result again.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"hacrl {version('hacrl')}, Python {sys.version.split()[0]}, torch {version('torch')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


# Without a name the commands stand at the top (hacrl run); with one, below it (hacrl config show).
app.add_typer(start.app)
app.add_typer(campaigns.app)
app.add_typer(plan.app)
app.add_typer(views.app)
app.add_typer(servers.app)
app.add_typer(sweeps.app)
app.add_typer(methods.app)
app.add_typer(configs.app, name="config")
app.add_typer(store.app, name="store")
app.add_typer(tasks.app, name="task")
app.add_typer(track.app, name="track")
app.add_typer(exchange.app, name="exchange")


if __name__ == "__main__":
    app()
