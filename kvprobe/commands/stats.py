"""`kvprobe stats`: tables of a recording, of the kind that `nsys stats` prints."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvprobe.commands._paths import GivenPath
from kvprobe.commands._reading import WindowOptions, window_options
from kvprobe.output import STATS

if TYPE_CHECKING:
    from kvprobe.output.recorded import StatsJson
    from kvprobe.reporting.summaries import SummaryTable

__all__ = ["command", "document"]


@click.command(short_help="Print tables of a recording: calls, kernels, copies, sizes, ranges, streams.")
@click.argument("inputs", nargs=-1, metavar="INPUT...", type=GivenPath())
@click.option("-r", "--report", "reports", help="Tables to print, comma-separated; default: all. `help` lists them.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with the columns of `nsys stats --format csv`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: tables, findings, machine.")
@click.option(
    "--rows", default=0, help="Print at most this many rows of a table; 0 prints all.", type=click.IntRange(0)
)
@window_options
def command(
    inputs: tuple[Path, ...], reports: str | None, as_csv: bool, as_json: bool, rows: int, window: WindowOptions
) -> None:
    """Print what a recording holds, in numbers.

    The tables cuda_api_sum, cuda_gpu_kern_sum, cuda_gpu_mem_time_sum, cuda_gpu_mem_size_sum and nvtx_sum have the
    columns and the figures that `nsys stats` prints for the same recording. Names of calls have no version:
    `cudaMemcpyAsync`, not `cudaMemcpyAsync_v3020`. The figures are of the whole recording, unless --from, --to or
    --range name a part. In a narrow terminal, kvprobe leaves columns out and says which; --csv
    prints all columns.
    """
    from kvprobe.errors import UsageError
    from kvprobe.reporting.summaries import REPORTS, summary

    wanted = list(REPORTS) if not reports else [one.strip() for one in reports.split(",") if one.strip()]
    if wanted == ["help"]:
        click.echo("\n".join(f"{name:24}{(make.__doc__ or '').splitlines()[0]}" for name, make in REPORTS.items()))
        return
    if not inputs:
        raise UsageError("no INPUT was given: name a recording, or a folder with one")
    unknown = [one for one in wanted if one not in REPORTS]
    if not wanted:
        raise UsageError(f"--report {reports}: no table is named; there are {', '.join(REPORTS)}")
    if unknown:
        raise UsageError(f"no table {unknown[0]!r}; there are {', '.join(REPORTS)}")
    if as_csv and as_json:
        raise UsageError("choose one of --csv and --json")
    from kvprobe.commands._reading import cropped, opened, plain

    if as_json:
        STATS.print(document(inputs, window, wanted, rows))
        return
    recording = cropped(opened(inputs), window)
    made = [summary(recording, one) for one in wanted]
    if as_csv:
        click.echo("\n".join(_csv(one, rows) for one in made), nl=False)
    else:
        _print(made, rows)
    from kvprobe.diagnosis.failed_calls import failures
    from kvprobe.diagnosis.verdict import missing

    for failed in failures(recording)[:3]:
        click.echo(plain(f"Failed: {failed.said}"), err=True)
    for one in missing(recording)[:3]:
        click.echo(plain(f"Undecided: {one.what}; {one.how}"), err=True)


def document(
    inputs: Sequence[Path], window: WindowOptions, wanted: Sequence[str], rows: int, *, quiet: bool = False
) -> StatsJson:
    """What `--json` prints of recordings: the tables that are `wanted`, at most `rows` rows of each, 0: all."""
    from kvprobe.commands._reading import cropped, diagnosed
    from kvprobe.reporting.documents import stats
    from kvprobe.reporting.summaries import summary

    recording, findings, _ = diagnosed(inputs, quiet=quiet, window=window)
    recording = cropped(recording, window)
    return stats(recording, findings, [summary(recording, one) for one in wanted], rows)


def _csv(table: SummaryTable, limit: int) -> str:
    from kvprobe.commands._reading import plain

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name for name, _ in table.columns])
    writer.writerows(map(plain, table.text(row)) for row in table.rows[: limit or None])
    return out.getvalue()


def _print(tables: Sequence[SummaryTable], limit: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvprobe.commands._reading import plain

    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal
    for one in tables:
        console.print(Text(f"\n{one.title} ({one.report})", style="bold"))
        if not one.rows:
            console.print(Text(one.note or "nothing of this kind is in this recording", style="dim"))
            continue
        shown = one.rows[: limit or None]
        texts = [[plain(cell) for cell in one.text(row, ",")] for row in shown]
        widths = [max(len(name), *(len(line[i]) for line in texts)) for i, (name, _) in enumerate(one.columns)]
        wide = sum(widths) + 2 * len(widths)
        columns = list(range(len(widths)))
        if console.is_terminal:  # figures are never cut: whole columns are left out, and names are shortened
            columns = fitting(one.columns, widths, console.width)
            wide = min(wide, console.width)
        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for i in columns:
            name, kind = one.columns[i]
            text = kind == "text"
            grid.add_column(
                Text(name), justify="left" if text else "right", no_wrap=True, min_width=None if text else widths[i]
            )
        for line in texts:
            grid.add_row(*(Text(line[i]) for i in columns))
        Console(highlight=False, width=wide, no_color=console.no_color).print(grid)
        left_out = [name for i, (name, _) in enumerate(one.columns) if i not in columns]
        narrow = f"This terminal is too narrow for {', '.join(left_out)}; --csv prints them." if left_out else ""
        for note in filter(None, (one.note, narrow, _left_out(one, len(shown)))):
            console.print(Text(note, style="dim"))


# Columns that a narrow terminal does without, the first ones first, by how their headings begin.
_SPARED = ("StdDev", "Bursts", "P10", "P90", "Min", "Runs", "Merging", "Avg", "Med", "Time (%)", "Max", "Copies")
_SHORTEST_NAME = 24


def fitting(columns: Sequence[tuple[str, str]], widths: Sequence[int], wide: int) -> list[int]:
    """The columns that fit into `wide` characters, by number, while names keep some `_SHORTEST_NAME` of theirs."""

    def needed(kept: Sequence[int]) -> int:
        return sum(2 + (min(widths[i], _SHORTEST_NAME) if columns[i][1] == "text" else widths[i]) for i in kept)

    kept = list(range(len(columns)))
    for heading in _SPARED:
        for i in [i for i in kept if columns[i][0].startswith(heading)]:
            if needed(kept) <= wide:
                return kept
            kept.remove(i)
    return kept


def _left_out(table: SummaryTable, shown: int) -> str:
    rest = len(table.rows) - shown
    return f"{rest:,} more row{'s' if rest > 1 else ''}" if rest > 0 else ""
