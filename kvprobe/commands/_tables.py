"""Tables in a terminal: as wide as it is and never cut; in a pipe, as wide as they are."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_table", "width_limit"]

_WRAPPED, _LONGEST_WORD = 18, 32  # characters that a column whose texts are wrapped keeps; and for a long word
_NO_LIMIT = 1 << 16


def width_limit(console: Console) -> int:
    """How many characters a line may have: no limit in a pipe, unless COLUMNS sets one."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS", "").isdigit() else _NO_LIMIT


def print_table(
    console: Console, table: Table, *, wrapped: Sequence[str] = (), spared: Sequence[str] = (), rest: str = ""
) -> None:
    """Prints all of a table that fits: where it is too wide, texts are wrapped, then whole columns are left out.

    Args:
        console: prints.
        table: its columns named by their headings; no cell holds markup.
        wrapped: columns whose texts may take several lines.
        spared: columns that a narrow terminal does without, the first one first.
        rest: what prints the columns that were left out, for the line that names them.
    """
    from rich.console import Console
    from rich.measure import Measurement
    from rich.text import Text

    limit = width_limit(console)
    unlimited = console.options.update(width=_NO_LIMIT)
    for column in table.columns:
        column.no_wrap = True
    width = Measurement.get(console, unlimited, table).maximum
    left_out = []
    if width > limit:
        for column in table.columns:
            if str(column.header) in wrapped:
                cells = [Measurement.get(console, unlimited, one) for one in (column.header, *column.cells)]
                word = min(max(one.minimum for one in cells), _LONGEST_WORD)
                column.min_width = min(max(one.maximum for one in cells), max(_WRAPPED, word))
                column.no_wrap, column.overflow = False, "fold"
        for name in spared:
            if _least(console, table, wrapped) > limit and any(str(one.header) == name for one in table.columns):
                table = _without(table, name)
                left_out.append(name)
        if _least(console, table, wrapped) > limit:  # rather broken than cut
            for column in table.columns:
                column.no_wrap, column.overflow, column.min_width = False, "fold", None
        width = limit
    Console(
        file=console.file,
        force_terminal=console.is_terminal,
        highlight=False,
        width=max(width, 1),
        no_color=console.no_color,
    ).print(table)
    if left_out and rest:
        console.print(
            Text(f"This terminal is too narrow for {', '.join(left_out)}; {rest} prints all.", "dim"), soft_wrap=True
        )


def _without(table: Table, name: str) -> Table:
    """The same table without the columns of this heading; at least one other column is left."""
    kept = [one for one in table.columns if str(one.header) != name]
    out = copy.copy(table)
    out.columns, out.rows = [], []
    for column in kept:  # added anew: a column finds its cells by its number
        fields = (one.name for one in dataclasses.fields(column) if not one.name.startswith("_"))
        out.add_column(**{field: getattr(column, field) for field in fields})
    for row, cells in zip(table.rows, zip(*(column.cells for column in kept), strict=True), strict=True):
        out.add_row(*cells, style=row.style, end_section=row.end_section)
    return out


def _least(console: Console, table: Table, wrapped: Sequence[str]) -> int:
    """The width below which something would be cut."""
    from rich.measure import Measurement

    kept = [one.max_width for one in table.columns]
    for column in table.columns:
        if str(column.header) in wrapped:
            column.max_width = column.min_width
    try:
        return Measurement.get(console, console.options.update(width=_NO_LIMIT), table).maximum
    finally:
        for column, width in zip(table.columns, kept, strict=True):
            column.max_width = width
