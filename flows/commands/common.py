"""What all commands share: options, and errors in one line instead of a traceback."""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from flows.home import Home
from flows.run.signals import Stop, raise_on_signals
from hacrl_core.artifacts.disk import disk_full, is_disk_full
from hacrl_core.errors import HacrlError, StageError
from hacrl_core.printable import printable

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="Folder for all state. Default: $HACRL_HOME, else .hacrl in the current folder.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Override one setting of the config, e.g. --set update.learning_rate=1e-4. Repeatable.",
    ),
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The campaign's YAML file.")]
CampaignArgument = Annotated[str | None, typer.Argument(help="Name of the campaign. Default: the most recent one.")]


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that mistakes and known failures end in one line and an exit code, not in a traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            with raise_on_signals():
                command(*args, **kwargs)
        except HacrlError as problem:
            raise _in_one_line(str(problem), problem.exit_code) from None
        except OSError as problem:
            if not is_disk_full(problem):
                raise
            place = problem.filename or Home.find(kwargs.get("home")).root
            raise _in_one_line(disk_full(Path(os.fsdecode(place))), StageError.exit_code) from None
        except KeyboardInterrupt as stop:
            notes = getattr(stop, "__notes__", ["everything finished so far is saved"])
            Console(stderr=True, soft_wrap=True).print(
                f"stopped; {escape('; '.join(notes))}. Run the same command again to go on.", highlight=False
            )
            raise typer.Exit(stop.exit_code if isinstance(stop, Stop) else 130) from None

    return wrapped


def _in_one_line(problem: str, exit_code: int) -> typer.Exit:
    Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(printable(problem))}", highlight=False)
    return typer.Exit(exit_code)
