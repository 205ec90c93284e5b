"""Tables that are never cut: as wide as they are in a file, one value a line where it is narrow."""

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
        rows: Cells, as many as names.
        left: Columns that hold words; all others hold numbers.
        title: Above it.
        bold: Numbers of rows that stand out.
    """
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in head:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if number in bold else None)
    return table


def fits(console: Console, table: Table) -> bool:
    """Return whether a console shows all of a table; a file or a pipe does."""
    return not console.is_terminal or _measure(console, table) <= console.width


def print_table(console: Console, table: Table) -> None:
    """Print a table; on a terminal that is too narrow for it, row by row with a value a line."""
    if not console.is_terminal:
        # In a file or a pipe, nothing says how wide it may be.
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
