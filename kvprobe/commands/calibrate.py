"""`kvprobe calibrate`: what each method of copying does on this machine, for the engine's chooser and for people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvprobe.commands._device import device_option, runtime_of
from kvprobe.commands._paths import GivenPath
from kvprobe.commands._reading import plain, progress_bar
from kvprobe.durations import time_text
from kvprobe.output import CALIBRATE

if TYPE_CHECKING:
    from kvprobe.output.machine import CalibrateJson

__all__ = ["command"]


@click.command(short_help="Measure the launch queue and every method of copying on this machine.")
@device_option
@click.option(
    "--quick", is_flag=True, help="Measure only what the engine needs to choose a method: about two seconds on a GPU."
)
@click.option(
    "--cached", "use_cached", is_flag=True, help="Show what was measured before on this machine, if anything."
)
@click.option("--report", type=GivenPath(), metavar="FILE", help="Write the curves as an HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def command(device: str, quick: bool, use_cached: bool, report: Path | None, as_json: bool) -> None:
    """Measure the depth and channels of the launch queue, and each method of copying.

    For each method, calibrate measures the bandwidth, what a submission costs, and how much the copies slow down
    compute. kvprobe keeps the result for this GPU, driver, CUDA version and link. kvprobe's offload engine on this
    machine chooses its method by the result. The measurement takes well under a minute. Nothing else should use the GPU
    or the link meanwhile.
    """
    from kvprobe.offload import method_cache, method_calibration
    from kvprobe.offload.methods import copier_for

    if report is not None:
        from kvprobe.reporting.page import check_writable

        check_writable(report)
    runtime = runtime_of(device)
    result = method_cache.cached(runtime) if use_cached else None
    if result is None:
        with progress_bar(as_json) as progress:
            result = method_calibration.measure(runtime, copier_for(runtime), quick=quick, progress=progress)
        why = method_cache.store(runtime, result)
        if why:
            click.echo(plain(f"kvprobe: not kept for engines on this machine: {why}; set XDG_CACHE_HOME"), err=True)
    if report is not None:
        from kvprobe.reporting import calibrated
        from kvprobe.reporting.page import write_report

        write_report(
            None,
            report,
            title=calibrated.title(result),
            extra=calibrated.sections(result),
            lead_verdict=calibrated.verdict(result),
        )
    CALIBRATE.print(cast("CalibrateJson", result)) if as_json else _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvprobe.commands._tables import print_table
    from kvprobe.reporting.calibrated import way

    console, link, queue = Console(), result["link_bytes_per_s"], result["queue"]
    console.print(
        f"{result['gpu'] or 'GPU'}: queue depth {queue['depth']:,}, {queue['channels']} channels, "
        f"a submission {time_text(queue['baseline_ns'])}; measured in {time_text(result['seconds'] * 1e9)}",
        highlight=False,
    )
    for name, why in result["missing"].items():
        if name != "staged":
            console.print(f"no {name}: {why}", highlight=False)
    for kind, word in (("h2d", "loads"), ("d2h", "stores")):
        rows = [row for row in result["rows"] if row["direction"] == kind]
        sizes = [one["copy_bytes"] for one in rows[0]["measured"]]
        shown = [size for size in sizes if size in (1024, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20)]
        table = Table(title=f"{word}, scattered copies, GB/s (one large copy: {link[kind] / 1e9:.1f})")
        table.add_column("KiB")
        for name in (*(f"{size >> 10:,}" for size in shown), "memory", "products"):
            table.add_column(name, justify="right")
        for row in rows:
            rates = {one["copy_bytes"]: one["bytes_per_s"] / 1e9 for one in row["measured"]}
            name = f"{row['method']} x{row['ctas']}" if row["ctas"] else row["method"]
            price = [f"{row[one]:.1%}" if row["ctas"] else "-" for one in ("slowdown", "product")]
            table.add_row(name, *(f"{rates[size]:.1f}" for size in shown), *price)
        print_table(console, table, spared=("1", "4,096", "4", "256", "1,024"), rest="--json")
        chosen = [one for one in result["choices"] if one["direction"] == kind and one["copy_bytes"] in shown]
        console.print(
            "kernel x2: 2 CTAs; memory, products: what a memory-bound kernel and matrix products lose beside it",
            highlight=False,
        )
        console.print(
            "chosen: "
            + "; ".join(f"{one['copy_bytes'] >> 10:,} KiB {way(one['method'], one['ctas'])}" for one in chosen),
            highlight=False,
        )
