"""`kvprobe reduce`: many ranks, each reduced where it lies, merged to one report that compares them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from kvprobe.commands._paths import GivenPath
from kvprobe.output import REDUCE

if TYPE_CHECKING:
    from kvprobe.output.recorded import BlockedJson, RankJson, ReduceJson, WaitingJson
    from kvprobe.recordings.ranks import RankComparison, RankRow
    from kvprobe.recordings.summary import Summary

__all__ = ["command"]


@click.command(short_help="Reduce the recordings of many ranks to one report that compares them.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--ray", "ray_address", metavar="ADDRESS", help="A Ray cluster: auto, ray://HOST:10001, or local.")
@click.option(
    "--workers", type=click.IntRange(1), metavar="N", help="Processes to use without Ray. Default: one a core."
)
@click.option("-o", "--output", type=GivenPath(), help="Write the summary; NAME.kvsum can be merged again.")
@click.option("--top", default=10, show_default=True, type=click.IntRange(1), help="How many ranks to list.")
@click.option("--json", "as_json", is_flag=True, help="Print every rank as one JSON object.")
def command(
    inputs: tuple[str, ...], ray_address: str | None, workers: int | None, output: Path | None, top: int, as_json: bool
) -> int:
    """Reduce recordings to small summaries, merge them, and say which rank lost most and which made the others wait.

    INPUT is a recording, a folder with recordings anywhere in it, a URL (s3://bucket/run/*.json.gz), or a summary that
    an earlier reduce wrote (.kvsum). Summaries merge to the same bytes in any order. With --ray, every machine of the
    cluster reduces the recordings that it has at these paths. If a worker is killed, its recordings are reduced again.
    The exit code is 1 if a recording could not be read.
    """
    from kvprobe.diagnosis.reduced import summarize
    from kvprobe.errors import UsageError
    from kvprobe.recordings.many import SUMMARY_SUFFIX, reduce_inputs
    from kvprobe.recordings.ranks import compare
    from kvprobe.reporting import check_writable
    from kvprobe.reporting.page import write_whole

    if "" in inputs:
        raise UsageError("an INPUT is empty; name a recording, a folder or a summary")
    if output is not None:
        if output.suffix != SUMMARY_SUFFIX:
            raise UsageError(
                f"--output {output}: a summary's name ends in {SUMMARY_SUFFIX}, so that reduce knows it again"
            )
        check_writable(output)
    summary = reduce_inputs(inputs, ray_address, workers=workers, summarize=summarize)
    if output is not None:
        write_whole(output, summary.to_bytes())
    found = compare(summary)
    if as_json:
        REDUCE.print(_json(summary, found))
    else:
        for line in _lines(summary, found, top):
            click.echo(line)
    from kvprobe.errors import plain

    for path, reason in sorted(summary.failed.items())[:20]:
        click.echo(plain(f"kvprobe: {reason if path in reason else f'{path}: {reason}'}"), err=True)
    if len(summary.failed) > 20:
        click.echo(f"kvprobe: and {len(summary.failed) - 20:,} more inputs that could not be read", err=True)
    return 1 if summary.failed else 0


def _json(summary: Summary, found: RankComparison) -> ReduceJson:
    return {
        "inputs": summary.inputs,
        "account": [
            {"rank": rank, "gpu": gpu, "window_ns": one.window_ns, "lines_ns": one.lines}
            for (rank, gpu), one in sorted(summary.gpus.items())
        ],
        "ranks": [cast("RankJson", vars(row)) for row in found.rows],
        "waiting": cast("WaitingJson", vars(found.waiting)),
        "top": [cast("BlockedJson", vars(one)) for one in summary.top],
        "failed": summary.failed,
    }


def _shares(row: RankRow) -> tuple[float, float, float]:
    return row.computing, row.waiting_for_copies, row.waiting_for_host


def _lines(summary: Summary, found: RankComparison, top: int) -> list[str]:
    from collections import Counter

    from kvprobe.diagnosis.finding import singular
    from kvprobe.errors import plain
    from kvprobe.reporting.units import duration, percent

    verdicts = Counter(row.verdict for row in found.rows)
    counted = ", ".join(f"{verdicts[word]:,} {word}" for word in ("found", "undecided", "healthy") if verdicts[word])
    lines = [singular(f"{len(found.rows):,} ranks of {summary.inputs:,} recordings: {counted}"), ""]

    seen = any(row.computing >= 0 for row in found.rows)

    def table(rows: list[RankRow]) -> list[str]:
        head = (
            "rank",
            "verdict",
            "lost",
            "share",
            "submissions",
            "p50",
            "p99",
            "longest",
            "made others wait",
            "waited",
            *(("GPU computed", "waited for copies", "for the host") if seen else ()),
        )
        cells = [
            (
                plain(row.rank),
                row.verdict,
                duration(row.lost_ns),
                percent(row.share),
                f"{row.submissions:,}",
                duration(row.p50_ns),
                duration(row.p99_ns),
                duration(row.max_ns),
                "-" if row.made_wait_ns < 0 else duration(row.made_wait_ns),
                "-" if row.waited_ns < 0 else duration(row.waited_ns),
                *(("-" if share < 0 else percent(share) for share in _shares(row)) if seen else ()),
            )
            for row in rows
        ]
        widths = [max(len(line[column]) for line in [head, *cells]) for column in range(len(head))]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [head, *cells]
        ]

    losing = [row for row in found.rows if row.lost_ns]
    if losing:
        lines += ["Lost most to full launch queues:", *table(losing[:top])]
        if len(losing) > top:
            lines.append(
                f"and {len(losing) - top:,} more that lost time, {duration(sum(row.lost_ns for row in losing[top:]))}"
            )
    else:
        lines += ["No rank lost time to a full launch queue.", *table(found.rows[:top])]
    lines.append("")
    waiting = found.waiting
    if waiting.missing:
        lines.append(f"It is not known which rank made the others wait: {waiting.missing}")
        return lines
    blamed = sorted((row for row in found.rows if row.made_wait_ns > 0), key=lambda row: -row.made_wait_ns)
    left = f"; {waiting.left_out:,} ranks are left out: another number of collectives" if waiting.left_out else ""
    lines.append(f"Made the others wait, in {waiting.collectives:,} collectives of {waiting.ranks:,} ranks{left}:")
    lines += table(blamed[:top]) if blamed else ["nobody"]
    return lines
