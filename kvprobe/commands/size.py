"""`kvprobe size`: how large the pool in CPU memory should be, from one recording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvprobe.commands._paths import GivenPath
from kvprobe.output import SIZE

if TYPE_CHECKING:
    from kvprobe.output.recorded import SizeJson
    from kvprobe.sizing import Sizing

__all__ = ["command", "document", "pools"]


@click.command(short_help="Say how large the pool in CPU memory should be, from one recording.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=GivenPath())
@click.option(
    "--prefill-rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="TOKENS/S",
    help="How many prompt tokens a second the model computes, if the recording does not show it.",
)
@click.option(
    "--block-tokens",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="How many tokens a block holds, if the recording does not show it.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: pools, each with the points of its curve."
)
def command(inputs: tuple[Path, ...], prefill_rate: float | None, block_tokens: float | None, as_json: bool) -> int:
    """Say what pools of other sizes in CPU memory would have found, moved and saved, and which size pays.

    The best recordings are those in which a server's adapter or a kvprobe cache named its blocks (`kvprobe run`,
    `kvprobe.recording_of(engine, caches=...)`). From other recordings kvprobe takes the addresses of copies. Addresses
    only show what a smaller pool would find. For a larger pool, record with `kvprobe run`, which compares the bytes.
    The exit code is 1 if no size can be decided.
    """
    found = pools(inputs, prefill_rate, block_tokens)
    if as_json:
        SIZE.print(document(found))
    elif not found:
        click.echo(
            "Undecided: the recording does not show which blocks were used. It names none, and shows no pool that "
            "copies store to and load from again. kvprobe run records the names for servers with an adapter; a "
            "cache of your own names its blocks with kvprobe.BlockCache"
        )
    else:
        _print(found)
    return 0 if any(one.advised for one in found) else 1


def pools(
    inputs: Sequence[Path], prefill_rate: float | None, block_tokens: float | None, *, quiet: bool = False
) -> list[Sizing]:
    """What recordings say of each pool; prefill_rate in tokens a second, both None where the recording has to tell."""
    from kvprobe.commands._reading import opened
    from kvprobe.sizing import of_recording

    return of_recording(opened(inputs, quiet=quiet), 1e9 / prefill_rate if prefill_rate else None, block_tokens)


def document(found: Sequence[Sizing]) -> SizeJson:
    """What `--json` prints of them."""
    return {"pools": [one.to_json() for one in found]}


def _print(found: Sequence[Sizing]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvprobe.commands._reading import plain
    from kvprobe.commands._tables import print_table
    from kvprobe.reporting.sized import COLUMNS, pool_name, rows, sentences

    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal
    for one in found:
        console.print(Text(plain(pool_name(one)), style="bold"))
        for sentence in sentences(one):
            console.print(Text(plain(sentence)))
        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in COLUMNS:
            grid.add_column(Text(name), justify="right" if name else "left")
        for row in rows(one):
            grid.add_row(*(Text(plain(cell)) for cell in row))
        print_table(console, grid, wrapped=("",), spared=COLUMNS[:0:-1], rest="--json")
