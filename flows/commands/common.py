"""What all commands share: options, and errors in one line instead of a traceback."""

import errno
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
from hacrl_core.errors import ConfigError, HacrlError, StageError
from hacrl_core.printable import printable

# A path that is no folder, cannot be made, or may not be written or read.
_PLACES = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
# What a process may have: files, processes, memory.
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
_NO_THREAD = "can't start new thread"

# Commands whose work is kept, so that the same command goes on where it was.
_RESUMED = ("run", "sweep", "evaluate", "push", "pull", "sync")

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
        except typer.Exit:
            raise
        except (OSError, RuntimeError, MemoryError) as problem:
            known = _explained(problem, Home.find(kwargs.get("home")))
            if known is None:
                raise
            raise _in_one_line(*known) from None
        except KeyboardInterrupt as stop:
            # A command that only looks at something has nothing to save.
            usual = ["everything finished so far is saved"] if command.__name__ in _RESUMED else []
            notes = getattr(stop, "__notes__", usual)
            more = f"; {escape('; '.join(notes))}. Run the same command again to go on." if notes else ""
            Console(stderr=True, soft_wrap=True).print(f"stopped{more}", highlight=False)
            raise typer.Exit(stop.exit_code if isinstance(stop, Stop) else 130) from None

    return wrapped


def _explained(problem: OSError | RuntimeError | MemoryError, home: Home) -> tuple[str, int] | None:
    """Return the line and the exit code for what the system refused; None for an error that nobody foresaw."""
    if isinstance(problem, OSError):
        place = Path(os.fsdecode(problem.filename)) if problem.filename is not None else None
        if is_disk_full(problem):
            return disk_full(place or home.root), StageError.exit_code
        if place is not None and problem.errno in _PLACES:
            return _refused(place, os.strerror(problem.errno), home), ConfigError.exit_code
        if place is not None and problem.errno == errno.ENOENT and place in (home.root, *home.root.parents):
            return _refused(place, os.strerror(problem.errno), home), ConfigError.exit_code
        if problem.errno not in _LIMITS:
            return None
    elif isinstance(problem, RuntimeError) and _NO_THREAD not in str(problem):
        return None
    reason = (problem.strerror if isinstance(problem, OSError) else str(problem)) or "out of memory"
    return (
        f"the system refuses more to this process ({reason}); raise its limits (ulimit -a shows them) and run the same "
        "command again: everything finished so far is saved",
        ConfigError.exit_code,
    )


def _refused(place: Path, reason: str, home: Home) -> str:
    if home.root == place or home.root in place.parents or place in home.root.parents:
        return f"home {home.root}: {place}: {reason}; give a folder that you may write to with --home or HACRL_HOME"
    return f"{place}: {reason}; check the path and its permissions"


def _in_one_line(problem: str, exit_code: int) -> typer.Exit:
    Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(printable(problem))}", highlight=False)
    return typer.Exit(exit_code)
