"""What a page is made of: charts, tables and sections as plain data, which the template and the script draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Bar", "BarPart", "Cell", "Chart", "Section", "TableView", "left_out", "more_rows", "numbers", "table"]


@dataclass(frozen=True)
class Cell:
    """One cell: what it says and what it sorts by; `value` None sorts as text and aligns left.

    `call`, a row of the recording's calls, makes it a link to that call in the chart of threads and streams; `to`, the
    id of a section, makes it a link to that.
    """

    text: str
    value: float | None = None
    call: int = -1
    to: str = ""


@dataclass(frozen=True)
class TableView:
    """A table; `numeric[i]` aligns column i right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: Sequence[bool]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart: `spec` is what the script draws, `summary` says the same in words, `table` in numbers.

    `spec["kind"]` is "rows" (templates/rows.js), "timeline", "histogram", "heat" or "bars" (templates/page.js).
    """

    id: str
    title: str
    summary: str
    spec: Mapping[str, Any]
    table: TableView
    how: str = ""


@dataclass(frozen=True)
class BarPart:
    """A part of a bar: its CSS class, where it begins and how wide it is, in thousandths, and its words."""

    kind: str
    at: float
    width: float
    title: str
    value: str
    share: str


@dataclass(frozen=True)
class Bar:
    """A whole, drawn as one bar without a script, with a legend of its parts."""

    title: str
    note: str
    parts: Sequence[BarPart]


@dataclass
class Section:
    """A headed part of the page: paragraphs, bars, charts, tables; `folded` opens when it is asked for."""

    id: str
    title: str
    lead: str = ""
    charts: list[Chart] = field(default_factory=list)
    tables: list[TableView] = field(default_factory=list)
    folded: bool = False
    bars: Sequence[Bar] = ()


def left_out(shown: int, of: int) -> str:
    """The note of a table that has the first `shown` of so many rows; "" where it has all."""
    return f"The first {shown:,} of {of:,} rows." if of > shown else ""


def more_rows(number: int, what: str) -> str:
    """The note of a table that leaves out its last rows, with `what` there is to say of them; "" where it has all."""
    return f"{number:,} more row{'s' if number > 1 else ''}{what}." if number > 0 else ""


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "") -> TableView:
    """A table from rows of text, `Cell`s, or (text, sort value) pairs."""
    made: list[list[Cell]] = []
    for row in rows:
        cells: list[Cell] = []
        for item in row:
            if isinstance(item, Cell):
                cells.append(item)
            elif isinstance(item, tuple):
                text, value = item
                value = float(value) if value is not None else None
                cells.append(Cell(str(text), value if value is None or math.isfinite(value) else None))
            else:
                cells.append(Cell(str(item)))
        made.append(cells)
    numeric = [any(row[i].value is not None for row in made) for i in range(len(columns))]
    return TableView(caption, columns, made, numeric, note)


def numbers(values: Any, digits: int = 4) -> list[float | int | None]:
    """An array as short JSON numbers: `digits` significant digits, whole where it can be, None for NaN."""
    array = np.asarray(values, dtype=np.float64)
    known = np.isfinite(array)
    size = np.where(known & (array != 0), np.abs(array), 1.0)
    scale = 10.0 ** (digits - 1 - np.floor(np.log10(size)))
    rounded = np.where(known, np.round(np.where(known, array, 0) * scale) / scale, np.nan)
    out: list[float | int | None] = []
    for value in rounded.tolist():
        if value != value:
            out.append(None)
        elif value == int(value):
            out.append(int(value))
        else:
            out.append(float(f"{value:.{digits}g}"))
    return out
