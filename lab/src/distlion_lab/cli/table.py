"""Tables that are never cut: full width in a file, one value a line on a narrow terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 100_000


def build_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[str] = (),
    title: str | None = None,
    bold: Sequence[int] = (),
) -> Table:
    """Build a table.

    Args:
        head: Names of the columns; a line feed in one breaks it.
        rows: Rows of cells, one cell for each column.
        left: Columns with words; all others hold numbers.
        title: Title above the table.
        bold: Numbers of rows to show in bold.
    """
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in head:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if number in bold else None)
    return table


def fits(console: Console, table: Table) -> bool:
    """Return True if a console shows the whole table; a file or a pipe does."""
    return not console.is_terminal or _measure(console, table) <= console.width


def print_table(console: Console, table: Table) -> None:
    """Print a table; on a terminal that is too narrow, row by row with one value a line."""
    if not console.is_terminal:
        # In a file or a pipe, nothing limits the width.
        console.width = max(console.width, _measure(console, table))
    if fits(console, table):
        console.print(table)
        return
    if table.title:
        console.print(Text(str(table.title)), soft_wrap=True)
    names = [str(column.header).replace("-\n", "").replace("\n", " ") for column in table.columns]
    for cells in zip(*(list(column.cells) for column in table.columns), strict=True):
        console.print()
        for name, cell in zip(names, cells, strict=True):
            if str(cell):
                console.print(Text(f"{name}: {cell}"), soft_wrap=True)


def _measure(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).maximum
