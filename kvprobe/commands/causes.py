"""`kvprobe causes`: what each cause that kvprobe names means, how it is told, and what its cure saves."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvprobe.output import DESCRIBED

if TYPE_CHECKING:
    from kvprobe.output.recorded import CausesJson

__all__ = ["command", "document"]

_NO_LIMIT = 1 << 16
_WIDEST = 100  # columns: longer lines are hard to read


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: each cause, or the one that is named.")
def command(name: str | None, as_json: bool) -> None:
    """List the causes that a report names, or explain one.

    NAME is what a report, `kvprobe triage` or `kvprobe check` prints, such as launch_queue_saturation.
    """
    from kvprobe.diagnosis import CAUSES
    from kvprobe.diagnosis.described import describe

    if as_json:
        DESCRIBED.print(document([name] if name is not None else sorted(CAUSES)))
        return
    if name is None:
        fits = sys.stdout.isatty() or "COLUMNS" in os.environ  # a pipe has no width
        list_width = shutil.get_terminal_size().columns if fits else _NO_LIMIT
        for cause in sorted(CAUSES):
            line = f"{cause:24}{describe(cause).summary}"
            click.echo(textwrap.fill(line, list_width, subsequent_indent=24 * " ", break_long_words=False))
        click.echo("\nkvprobe causes NAME explains one.")
        return
    found = describe(name)
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    click.echo(_wrapped(found.summary, width))
    for heading, text in found.parts:
        click.echo()
        click.echo(_wrapped(f"{heading}: {text}" if heading else text, width))


def document(names: Sequence[str]) -> CausesJson:
    """What `--json` prints of causes."""
    from kvprobe.diagnosis.described import describe

    return {"causes": [describe(name).to_json() for name in names]}


def _wrapped(text: str, width: int) -> str:
    """Text at this width; each line of it that is an item of a list stands by itself, indented."""
    out = []
    for line in text.splitlines():
        begin, later = ("  - ", "    ") if line.startswith("- ") else ("", "")
        said = " ".join(line.removeprefix("- ").split())
        out.append(
            textwrap.fill(
                said,
                width,
                initial_indent=begin,
                subsequent_indent=later,
                break_on_hyphens=False,
                break_long_words=False,  # names of files and variables
            )
        )
    return "\n".join(out)
