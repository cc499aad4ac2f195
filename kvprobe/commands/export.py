"""`kvprobe export`: writes a recording as Parquet files or as a Perfetto trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from kvprobe.commands._paths import GivenPath, refuse_input

__all__ = ["command"]


@click.command(short_help="Write a recording as Parquet or Perfetto.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=GivenPath())
@click.option("--to", "form", required=True, type=click.Choice(["parquet", "perfetto"]))
@click.option("-o", "--output", required=True, type=GivenPath(), help="Folder (parquet) or file.")
@click.option("-f", "--force", is_flag=True, help="Overwrite what is there.")
@click.option(
    "--limit",
    type=click.IntRange(10_000, 1_000_000_000),
    help="Maximum number of events in a Perfetto trace; blocked calls are kept first.",
)
def command(inputs: tuple[Path, ...], form: str, output: Path, force: bool, limit: int | None) -> None:
    """Write recordings for other tools.

    --to parquet writes a folder with one file for each table, for polars, pandas and DuckDB. --to perfetto writes a
    trace for ui.perfetto.dev, with a counter of outstanding submissions for each stream.
    """
    from kvprobe.commands._reading import progress_bar
    from kvprobe.errors import UsageError
    from kvprobe.recordings import open_recording

    if limit is not None and form != "perfetto":
        raise UsageError("--limit is for --to perfetto: Parquet files hold everything")
    if form == "perfetto":
        from kvprobe.reporting import check_writable

        check_writable(output)
    elif output.exists() and not output.is_dir():
        raise UsageError(f"{output} is not a folder; name one for the Parquet files")
    refuse_input(output, inputs)
    if output.exists() and not force and (output.is_file() or any(output.iterdir())):
        raise UsageError(f"{output} exists; use -f to overwrite it")
    with progress_bar() as progress:
        recording = open_recording(inputs, progress=lambda what, fraction: progress(what, fraction / 2))
        if form == "parquet":
            from kvprobe.recordings import parquet

            files = parquet.write(
                recording, output, overwrite=force, progress=lambda what, done: progress(what, 0.5 + done / 2)
            )
            said = [f"{output}: {len(files)} files"]
        else:
            from kvprobe.recordings import perfetto

            write = perfetto.write if limit is None else partial(perfetto.write, limit=limit)
            thinned = write(
                recording, output, overwrite=force, progress=lambda what, done: progress(what, 0.5 + done / 2)
            )
            said = [f"{output}: open it at https://ui.perfetto.dev", *thinned]
    for line in said:
        click.echo(line)
