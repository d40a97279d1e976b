"""Tables that fit the terminal: columns that matter least are left out before any text is cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

# Between two columns.
_GAP = 2
# Of the first column's text so many characters are shown in any case.
_LEAST = 6


@dataclass
class FittingTable:
    """A table without lines. Where it is too wide, the columns in ``droppable`` go, the first one first.

    What is still too wide is cut in the first column.
    """

    titles: Sequence[str]
    droppable: Sequence[str] = ()
    left: Sequence[str] = ()
    rows: list[list[Text]] = field(default_factory=list)

    def add(self, *cells: str | Text) -> None:
        """Add a row."""
        self.rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def shown(self, width: int) -> list[int]:
        """Return the numbers of the columns that are shown in so many columns of text."""
        # A column without any value says nothing.
        kept = [n for n, _ in enumerate(self.titles) if n == 0 or not self.rows or any(r[n].plain for r in self.rows)]
        for title in self.droppable:
            if sum(self._width(n) + _GAP for n in kept) - _GAP <= width:
                break
            kept = [n for n in kept if self.titles[n] != title]
        return kept

    def _width(self, number: int) -> int:
        return max(len(self.titles[number]), *(row[number].cell_len for row in self.rows), 0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the table out for this terminal."""
        kept = self.shown(options.max_width)
        room = options.max_width - sum(self._width(number) + _GAP for number in kept[1:])
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
        for place, number in enumerate(kept):
            title = self.titles[number]
            table.add_column(
                title,
                no_wrap=True,
                justify="left" if place == 0 or title in self.left else "right",
                overflow="ellipsis",
                min_width=None if place == 0 else self._width(number),
                max_width=max(_LEAST, room - _GAP) if place == 0 else None,
            )
        for row in self.rows:
            table.add_row(*(row[number] for number in kept))
        yield table
