"""`kvprobe patches`: which adapters apply in this environment, and why the others do not."""

from __future__ import annotations

import json

import click


@click.command("patches")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of a table.")
@click.option("--server", "servers", multiple=True, metavar="NAME", help="Only this server (repeatable).")
@click.option("-v", "--verbose", is_flag=True, help="Also say what each does and which functions it touches.")
def command(as_json: bool, servers: tuple[str, ...], verbose: bool) -> None:
    """Which server adapters apply in this environment, and why. Imports no server."""
    from kvprobe.instrument import table

    rows = table(servers or None)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("adapter", "installed", "for", "state"):
        grid.add_column(name, no_wrap=name == "adapter", overflow="fold")
    for row in rows:
        installed = f"{row['distribution']} {row['version']}" if row["version"] else "-"
        state = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
        grid.add_row(row["adapter"], installed, row["versions"], state)
    console.print(grid)
    if verbose:
        for row in rows:
            console.print(f"\n[bold]{row['adapter']}[/bold]\n{row['summary']}", highlight=False)
            if row["changes"]:
                console.print(f"Under --fix auto: {row['changes']}", highlight=False)
            for target in row["targets"]:
                console.print(f"  touches {target['target']}", highlight=False, soft_wrap=True)
