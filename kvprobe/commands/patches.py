"""`kvprobe patches`: which adapters apply in this environment, and why the others do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from kvprobe.output import PATCHES

if TYPE_CHECKING:
    from kvprobe.output.machine import AdapterJson


def _check_newest(servers: tuple[str, ...]) -> int:
    from kvprobe.errors import KvprobeError
    from kvprobe.instrument import compatibility

    misfits = 0
    for server in servers:
        try:
            version, found = compatibility.newest(server)
        except KvprobeError as error:
            misfits += 1
            click.echo(f"{server}  cannot tell: {error}")
            continue
        for adapter, why in found.items():
            upstream = why.startswith("not needed")
            misfits += bool(why) and not upstream
            mark = "does not fit" if why and not upstream else why or "fits"
            more = f": {why.removeprefix('does not fit: ')}" if why and not upstream else ""
            click.echo(f"{server} {version}  {adapter}  {mark}{more}")
    return 1 if misfits else 0


def _versions(servers: tuple[str, ...]) -> int:
    from kvprobe.instrument import compatibility

    click.echo("| adapter | fits | does not fit |\n|---|---|---|")
    for server in servers:
        for adapter, good, bad in compatibility.table(server):
            click.echo(f"| `{adapter}` | {good or '-'} | {bad or '-'} |")
    return 0


@click.command("patches")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--server", "servers", multiple=True, metavar="NAME", help="Only this server (repeatable).")
@click.option(
    "--check-newest",
    is_flag=True,
    help="Fetch the newest release of each server from the package index; exit code 1 if an adapter does not fit it.",
)
@click.option(
    "--versions", is_flag=True, help="Print which releases on the package index each adapter fits, as Markdown."
)
@click.option("-v", "--verbose", is_flag=True, help="Also say what each adapter does and which functions it changes.")
def command(as_json: bool, servers: tuple[str, ...], check_newest: bool, versions: bool, verbose: bool) -> None:
    """List the server adapters that apply in this environment, and why. No server is imported."""
    from kvprobe.errors import UsageError
    from kvprobe.instrument import registry, table

    if as_json + check_newest + versions > 1:
        raise UsageError("choose one of --json, --check-newest and --versions")
    if check_newest or versions:
        names = registry.check_servers(servers or None)
        raise SystemExit(_check_newest(names) if check_newest else _versions(names))
    rows = table(servers or None)
    everything = as_json or verbose or bool(servers)
    absent = {} if everything else {row["server"]: None for row in rows if not row["version"]}
    if as_json:
        PATCHES.print({"adapters": cast("list[AdapterJson]", rows)})
        return
    from rich.console import Console
    from rich.table import Table

    from kvprobe.commands._tables import print_table

    console = Console()
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("adapter", "installed", "for", "state"):
        grid.add_column(name)
    for row in rows:
        if row["server"] in absent:
            continue
        installed = f"{row['distribution']} {row['version']}" if row["version"] else "-"
        state = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
        grid.add_row(row["adapter"], installed, row["versions"], state)
    if grid.row_count:
        print_table(console, grid, wrapped=("installed", "for", "state"), spared=("for",), rest="--json")
    if absent:
        console.print(
            f"not installed in this environment: {', '.join(absent)} (-v lists their adapters). A server of another "
            "environment gets them by `kvprobe run`; `python -m kvprobe patches` there says which.",
            highlight=False,
        )
    if not servers:
        console.print("\n[bold]no adapter for[/bold]")
        for what, seen in registry.NOT_COVERED.items():
            console.print(f"  {what}; seen: {seen}", highlight=False, soft_wrap=True)
    if verbose:
        for row in rows:
            console.print(f"\n[bold]{row['adapter']}[/bold]\n{row['summary']}", highlight=False)
            if row["changes"]:
                console.print(f"Under --fix auto: {row['changes']}", highlight=False)
            for target in row["targets"]:
                console.print(f"  touches {target['target']}", highlight=False, soft_wrap=True)
