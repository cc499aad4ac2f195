"""`kvprobe causes`: what each cause that kvprobe names means, how it is told, and what its cure saves."""

from __future__ import annotations

import click


@click.command()
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the causes that a report names, or explain one.

    NAME is what a report, `kvprobe triage` or `kvprobe check` prints, such as launch_queue_saturation.
    """
    from kvprobe.diagnosis import CAUSES
    from kvprobe.diagnosis.described import describe

    if name is None:
        for cause in sorted(CAUSES):
            click.echo(f"{cause:24}{describe(cause).summary}")
        click.echo("\nkvprobe causes NAME explains one.")
        return
    found = describe(name)
    click.echo(found.summary)
    for heading, text in found.parts:
        click.echo()
        click.echo(click.wrap_text(f"{heading}: {text}" if heading else text, 100, preserve_paragraphs=True))
