"""How numbers, times and sizes are written, in the terminal, on pages and in pictures. How commands are written."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

GIB = 1 << 30
_BARS = "▁▂▃▄▅▆▇█"


def can_redraw(console: "Console") -> bool:
    """Whether lines can be drawn again in place.

    A notebook sets FORCE_COLOR and takes colours, but it would keep every frame of a live table.
    """
    only_colours = bool(os.environ.get("FORCE_COLOR")) and not console.file.isatty()
    return console.is_interactive and not only_colours


@contextmanager
def waiting(console: "Console", text: str) -> Iterator[Callable[[str], None]]:
    """Show a moving line while something is waited for; yield a function that changes its text.

    Where lines cannot be redrawn nothing is shown, because every frame would stay.
    """
    if not can_redraw(console):
        yield lambda text: None
        return
    with console.status(text) as status:
        yield status.update


def clock(seconds: float | None) -> str:
    """Write a duration as 0:07, 12:34 or 3:12:34; None is empty."""
    if seconds is None:
        return ""
    whole = int(seconds + 0.5)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def duration(seconds: float) -> str:
    """Write a duration by its two largest units: 12 s, 3 min 5 s, 2 h 10 min, 4 d 3 h."""
    whole = int(seconds)
    if whole >= 86400:
        return f"{whole // 86400} d {whole // 3600 % 24} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole // 60 % 60} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole} s"


def decimal_time(seconds: float) -> str:
    """Write a duration in one unit: 9.5 s, 12.3 min, 4.2 h."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def moment(at: float) -> str:
    """Write a time stamp of today as 14:05, any other as 2026-11-16."""
    then, now = time.localtime(at), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%Y-%m-%d", then)


def age(at: float) -> str:
    """Write how long ago a time stamp was: 3 days ago, just now."""
    seconds = max(0.0, time.time() - at)
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


def short(number: float) -> str:
    """Write a count with three digits: 950, 6.1k, 12.3M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def size_text(size: float) -> str:
    """Write a number of bytes in decimal units: 812 B, 4.5 MB, 1.20 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def gib(size: float, digits: int = 1) -> str:
    """Write a number of bytes in GiB, without the unit."""
    return f"{size / GIB:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """Write a share as 45.3 %; None is empty."""
    return "" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None, digits: int = 2) -> str:
    """Write a number with so many decimals; None is empty."""
    return "" if value is None else f"{value:.{digits}f}"


def signed(value: float, digits: int = 2) -> str:
    """Write a number with a sign, a real minus, and no sign at zero."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text if float(f"{value:.{digits}f}") else text.lstrip("+−")


def sparkline(values: Sequence[float]) -> str:
    """Draw values between 0 and 1 as a line of bars."""
    return "".join(_BARS[min(7, max(0, int(value * 8)))] for value in values)


def hacrl_command() -> str:
    """Return what the user has to type for ``hacrl``: the bare name where it is on the PATH, else its path."""
    own = Path(sys.executable).with_name("hacrl")
    found = shutil.which("hacrl")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "hacrl"
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)
