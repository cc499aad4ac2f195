"""`kvprobe bench`: stream policies and copy methods of this machine, compared in one run, interleaved, as ratios."""

from __future__ import annotations

import contextlib
import ctypes as ct
import logging
import shlex
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from kvprobe.commands._device import Seconds, device_option, runtime_of
from kvprobe.commands._paths import GivenPath
from kvprobe.errors import KvprobeError, UsageError
from kvprobe.output import BENCH, OVERHEAD

if TYPE_CHECKING:
    from kvprobe.cuda import Runtime
    from kvprobe.launchqueue import QueueLimits
    from kvprobe.output.machine import BenchJson, OverheadJson
    from kvprobe.recordings.model import Recording
    from kvprobe.workload import WorkloadFigures

__all__ = ["command", "copy_methods", "policies"]

POLICIES = ("shared", "pooled", "auto")
FIGURES = {  # figure of a round -> what it is called in the table; of all but the last two, less is better
    "submit_ns": "a copy's submission",
    "submit_p99_ns": "submission p99",
    "longest_call_ns": "longest call",
    "step_p50_ns": "step p50",
    "step_p99_ns": "step p99",
    "bytes_per_s": "GB/s",
    "requests_per_s": "requests/s",
}
BLOCKS = (4096, 16384, 65536, 262144, 1048576)
BATCH_BYTES = 32 << 20  # moved by one measurement of a copy method, or BATCH_COPIES if that is less
BATCH_COPIES = 512  # fewer than a queue holds: the copying is measured, not the waiting
RECORDS = 1 << 19  # of a thread, over all rounds
ROUNDS = 3  # at least: a spread needs them


@click.group(short_help="Compare stream policies and copy methods on this machine.", invoke_without_command=True)
@device_option
@click.option("--seconds", default=20.0, show_default=True, type=Seconds(2, 3600), help="About how long.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--report", type=GivenPath(dir_okay=False), help="Write what the policies did as one HTML page.")
@click.pass_context
def command(context: click.Context, device: str, seconds: float, as_json: bool, report: Path | None) -> None:
    """Run the workload of `kvprobe demo` under shared, pooled and auto in turn, and copies in a loop and in batches.

    shared, pooled and auto are stream policies: one stream for all copies, a stream from a pool for each transfer, and
    kvprobe's own choice. Every figure is a median over rounds. Each ratio compares two runs of one round, so that
    whatever slows the machine for a while slows both. The range is from the lowest to the highest ratio of a round.
    """
    from kvprobe.launchqueue import calibrate

    if context.invoked_subcommand:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise UsageError(f"options of `bench {context.invoked_subcommand}` come after its name")
        return
    if report is not None:
        from kvprobe.reporting import check_writable

        check_writable(report)
    runtime = runtime_of(device)
    limits = calibrate(runtime, cache=False)
    with _quiet():
        outcome: dict[str, Any] = {"provider": runtime.provider, **asdict(limits)}
        outcome["copy_methods"] = copy_methods(runtime, seconds * 0.2)
        outcome["policies"], recording = policies(runtime, limits, seconds * 0.8)
    if report is not None:
        _write(outcome, recording, report)
    BENCH.print(cast("BenchJson", outcome)) if as_json else _show(outcome)


@command.command("overhead", short_help="Measure what recording costs on this machine, at each level of detail.")
@device_option
@click.option(
    "--rounds", default=15, show_default=True, type=click.IntRange(ROUNDS), help="How often each is measured."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def overhead_command(device: str, rounds: int, as_json: bool) -> None:
    """Measure a copy, a transfer and a step without recording, and at each level of `kvprobe run --detail`.

    The interposer is attached to this process and detached in turn. A round takes about 4 s, because each level first
    records copies for a second: a recording costs more in its first second. A ratio is taken within a round; the range
    is from the lowest to the highest ratio of a round.
    """
    from kvprobe.commands._overhead import overhead

    with _quiet():
        runtime = runtime_of(device)
        outcome = {"device": device, "provider": runtime.provider, **overhead(runtime, rounds)}
    OVERHEAD.print(cast("OverheadJson", outcome)) if as_json else _show_overhead(outcome)


def _show_overhead(outcome: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvprobe.commands._overhead import LEVELS, WORK
    from kvprobe.commands._tables import print_table
    from kvprobe.reporting.units import duration

    where = "the embedded host runtime" if outcome["provider"] == "host" else "the GPU"
    table = Table(
        title=f"cost of recording on {where}, {outcome['rounds']} rounds: multiples of the unwatched time (range)"
    )
    table.add_column("")
    table.add_column("unwatched", justify="right")
    for level in LEVELS[1:]:
        table.add_column(level, justify="right")
    for name, text in WORK.items():
        figures = outcome["figures"][name]
        table.add_row(text, duration(figures["off"]["median"]), *(_ratio(figures[level]) for level in LEVELS[1:]))
    print_table(Console(), table, wrapped=("", *LEVELS[1:]))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a line for each switch of a policy."""
    log = logging.getLogger("kvprobe")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def summary(rounds: dict[str, list[float]], floor: str) -> dict[str, Any]:
    """Medians and, against `floor`, the medians and ranges of the ratios within each round."""
    result: dict[str, Any] = {}
    for name, values in rounds.items():
        ratios = [value / base for value, base in zip(values, rounds[floor], strict=True) if base]
        result[name] = {"median": statistics.median(values)}
        if ratios:
            result[name].update(ratio=statistics.median(ratios), ratio_low=min(ratios), ratio_high=max(ratios))
    return result


# -- policies --------------------------------------------------------------------------------------------------------


def policies(runtime: Runtime, limits: QueueLimits, seconds: float) -> tuple[dict[str, Any], Recording]:
    """Rounds of shared, pooled, auto on one machine; a figure -> policy -> median, ratio to shared, and its range.

    And the recording that they come from, a range for each turn.
    """
    from kvprobe.probe.recorder import Recorder
    from kvprobe.workload import Machine, WorkloadServer, recorded, shape_for

    shape = shape_for(runtime, limits)
    machine = Machine(runtime, shape)
    rounds = max(int(seconds / (len(POLICIES) * 1.5)), ROUNDS)
    length = seconds / rounds / len(POLICIES)
    figures: dict[str, dict[str, list[float]]] = {name: {policy: [] for policy in POLICIES} for name in FIGURES}
    turns: dict[str, WorkloadServer] = {}
    recorder = Recorder("copies", RECORDS)  # one ring file for all rounds: it stays while an engine goes
    try:
        if recorder.path is None:
            raise KvprobeError("nothing could be recorded: the ring file cannot be written")
        for number in range(rounds):
            for place in range(len(POLICIES)):  # ABC, BCA, CAB: nobody always comes after the same neighbour
                policy = POLICIES[(number + place) % len(POLICIES)]
                server = turns[f"{policy}, round {number + 1}"] = WorkloadServer(machine, limits, policy, "off")
                try:
                    server.run(length)
                finally:
                    server.close()
        recording = recorded(turns, recorder.path, "kvprobe bench", shlex.join(["kvprobe", *sys.argv[1:]]))
    finally:
        recorder.close()
        machine.close()
    for turn, server in turns.items():
        for name, value in _round(recording, server.measured).items():
            figures[name][turn.partition(",")[0]].append(value)
    return {
        "rounds": rounds,
        "seconds_a_round": length,
        "copy_bytes": shape.piece_bytes,
        "link_bytes_per_s": shape.link_bytes_per_s,
        "figures": {name: summary(values, "shared") for name, values in figures.items()},
    }, recording


def _round(recording: Recording, measured: WorkloadFigures) -> dict[str, float]:
    """One policy's turn."""
    import numpy as np

    from kvprobe.recordings.model import CallKind

    calls = recording.calls
    inside = (calls["start_ns"] >= measured.start_ns) & (calls["start_ns"] <= measured.end_ns)
    rows = np.flatnonzero(inside & (calls["kind"] == CallKind.COPY))
    spent = calls["end_ns"][rows] - calls["start_ns"][rows]
    steps = np.array([duration for _, duration in measured.steps])
    length_s = (measured.end_ns - measured.start_ns) / 1e9
    return {
        "submit_ns": float(spent.mean()) if len(rows) else 0.0,
        "submit_p99_ns": float(np.percentile(spent, 99)) if len(rows) else 0.0,
        "longest_call_ns": float(spent.max(initial=0)),
        "step_p50_ns": float(np.percentile(steps, 50)),
        "step_p99_ns": float(np.percentile(steps, 99)),
        "bytes_per_s": measured.bytes_loaded / length_s,
        "requests_per_s": measured.requests / length_s,
    }


def _write(outcome: dict[str, Any], recording: Recording, path: Path) -> None:
    """The page: the recording of all turns, and the table of the policies."""
    from kvprobe.diagnosis import diagnose
    from kvprobe.reporting import write_report
    from kvprobe.reporting.views import Section, table

    rows: list[list[str]] = []
    for name, text in FIGURES.items():
        figures = outcome["policies"]["figures"][name]
        cells = [(_amount(name, figures[policy]["median"]), _ratio(figures[policy])) for policy in POLICIES]
        rows.append([text, cells[0][0], *cells[1], *cells[2]])
    columns = ["Figure, median", "shared", "pooled", "of shared (range)", "auto", "of shared (range)"]
    said = f"{outcome['policies']['rounds']} rounds of all policies in turn; ratios are taken within a round."
    shown = Section("policies", "Policies compared", said, [], [table("Policies", columns, rows)])
    write_report(recording, path, findings=diagnose(recording), title="kvprobe bench", extra=[shown])


# -- copy methods ----------------------------------------------------------------------------------------------------


def copy_methods(runtime: Runtime, seconds: float) -> dict[str, Any]:
    """GB/s and host time a copy of scattered blocks: one call each, and one batch, against one large copy."""
    import numpy as np

    from kvprobe.cuda.memory import Buffer
    from kvprobe.native.library import core

    methods = ("loop", "batch") if runtime.address("cudaMemcpyBatchAsync") else ("loop",)
    size = 2 * BATCH_BYTES
    device, host = Buffer(runtime, size, "device"), Buffer(runtime, size, "pinned")
    stream, start, end = runtime.stream_create(), runtime.event_create(True), runtime.event_create(True)
    random = np.random.default_rng(1)
    result: dict[str, Any] = {"link_bytes_per_s": {}, "link_how": {}, "blocks": []}
    rounds = max(min(int(seconds / (2 * len(BLOCKS) * len(methods) * 0.02)), 25), ROUNDS)
    now = core().kvp_now_ns
    try:
        for kind in ("h2d", "d2h"):
            to, source = (device, host) if kind == "h2d" else (host, device)
            rates = []
            for _ in range(ROUNDS + 1):  # the first one wakes the link
                runtime.event_record(start, stream)
                runtime.memcpy_async(to.address, source.address, size, kind, stream)
                runtime.event_record(end, stream)
                runtime.event_synchronize(end)
                rates.append(size / (runtime.event_elapsed_ms(start, end) * 1e-3))
            result["link_bytes_per_s"][kind] = max(rates)
            for block in BLOCKS:
                count = min(BATCH_COPIES, BATCH_BYTES // block)
                speed: dict[str, list[float]] = {method: [] for method in methods}
                submit: dict[str, list[float]] = {method: [] for method in methods}
                for number in range(rounds):
                    for place in range(len(methods)):
                        method = methods[(number + place) % len(methods)]
                        dst = to.address + block * random.permutation(size // block)[:count].astype(np.uint64)
                        src = source.address + block * random.permutation(size // block)[:count].astype(np.uint64)
                        begin = now()
                        taken = _submit(runtime, method, kind, stream, dst, src, block)
                        runtime.stream_synchronize(stream)
                        speed[method].append(count * block / (now() - begin) * 1e9)
                        submit[method].append(taken / count)
                result["blocks"].append(
                    {
                        "direction": kind,
                        "block_bytes": block,
                        "copies": count,
                        "rounds": rounds,
                        "bytes_per_s": summary(speed, "loop"),
                        "submit_ns_a_copy": summary(submit, "loop"),
                    }
                )
            result["link_how"][kind] = _raise_link(result, kind)
    finally:
        runtime.synchronize()
        for event in (start, end):
            runtime.event_destroy(event)
        runtime.stream_destroy(stream)
        device.close()
        host.close()
    return result


def _raise_link(result: dict[str, Any], kind: str) -> str:
    """How the link's rate in one direction is known: the fastest copies, where they beat the one large copy.

    They cross the link as it does, so that one did not show all that the link carries.
    """
    large = result["link_bytes_per_s"][kind]
    rates = [
        (one["median"], row["block_bytes"], method)
        for row in result["blocks"]
        if row["direction"] == kind
        for method, one in row["bytes_per_s"].items()
    ]
    best, block, method = max(rates)
    if best <= large:
        return "one large copy"
    result["link_bytes_per_s"][kind] = best
    return f"copies of {block >> 10:,} KiB, {method}; one large copy: {large / 1e9:.1f}"


def _submit(runtime: Runtime, method: str, kind: str, stream: int, dst: Any, src: Any, block: int) -> int:
    """Issues the copies; host time inside the calls, in ns."""
    from kvprobe.cuda import MEMCPY_KIND
    from kvprobe.native.library import SubmitOptions, SubmitResult, core

    options = SubmitOptions(copy=runtime.address("cudaMemcpyAsync"), stream=stream, kind=MEMCPY_KIND[kind])
    result, now = SubmitResult(), core().kvp_now_ns
    arguments = (len(dst), dst.ctypes.data, src.ctypes.data, None, block, ct.byref(result))
    begin = now()
    if method == "loop":
        code = core().kvp_submit(ct.byref(options), *arguments)
    else:
        batch = runtime.address("cudaMemcpyBatchAsync")
        code = core().kvp_submit_batch(ct.byref(options), batch, int(runtime.version < 13000), *arguments)
    if code:
        raise runtime.error("cudaMemcpyAsync" if method == "loop" else "cudaMemcpyBatchAsync", code)
    return int(now() - begin)


# -- tables ----------------------------------------------------------------------------------------------------------


def _show(outcome: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvprobe.commands._tables import print_table

    console = Console()
    ran = outcome["policies"]
    what = "the embedded host runtime" if outcome["provider"] == "host" else "the GPU"
    table = Table(
        title=f"policies on {what}: queue depth {outcome['depth']:,}, {outcome['channels']} channels, "
        f"{ran['rounds']} rounds of {ran['seconds_a_round']:.1f} s each"
    )
    table.add_column("")
    for policy in POLICIES:
        table.add_column(policy, justify="right")
        if policy != "shared":
            table.add_column("of shared (range)", justify="right")
    for name, text in FIGURES.items():
        cells = []
        for policy in POLICIES:
            one = ran["figures"][name][policy]
            cells.append(_amount(name, one["median"]))
            if policy != "shared":
                cells.append(_ratio(one))
        table.add_row(text, *cells)
    print_table(console, table, wrapped=("", "of shared (range)"))
    most = max(one["median"] for one in ran["figures"]["bytes_per_s"].values())
    slow = "; it carries more, as the policies show" if most > ran["link_bytes_per_s"] else ""
    console.print(
        f"link: {ran['link_bytes_per_s'] / 1e9:.1f} GB/s in one large copy{slow}; "
        f"copies of {ran['copy_bytes'] >> 10:,} KiB",
        highlight=False,
    )
    methods = outcome["copy_methods"]
    for kind, link in methods["link_bytes_per_s"].items():
        console.print(f"link, {kind}: {link / 1e9:.1f} GB/s ({methods['link_how'][kind]})", highlight=False)
    table = Table(title="copy methods, scattered blocks")
    for name in (
        "block",
        "",
        "loop GB/s",
        "of link",
        "batch GB/s",
        "of link",
        "batch/loop (range)",
        "µs a copy: loop",
        "batch",
    ):
        table.add_column(name, justify="right")
    for row in methods["blocks"]:
        link = methods["link_bytes_per_s"][row["direction"]]
        speed, submit = row["bytes_per_s"], row["submit_ns_a_copy"]
        cells = [f"{row['block_bytes'] >> 10:,} KiB", row["direction"]]
        for method in ("loop", "batch"):
            rate = speed.get(method, {}).get("median")
            cells += ["-", "-"] if rate is None else [f"{rate / 1e9:.2f}", f"{rate / link:.0%}"]
        cells.append(_ratio(speed["batch"]) if "batch" in speed else "-")
        cells += [f"{submit[method]['median'] / 1e3:.2f}" if method in submit else "-" for method in ("loop", "batch")]
        table.add_row(*cells)
    print_table(console, table, wrapped=("batch/loop (range)", "µs a copy: loop"))


def _amount(name: str, value: float) -> str:
    if name == "bytes_per_s":
        return f"{value / 1e9:.2f}"
    if not name.endswith("_ns"):
        return f"{value:,.0f}"
    from kvprobe.reporting.units import duration

    return duration(value) if value else "-"  # nothing of the kind happened


_RATIO = ("ratio_low", "ratio", "ratio_high")


def _ratio(one: dict[str, float]) -> str:
    if "ratio" not in one or not one["ratio"]:
        return "-"
    low, middle, high = (f"{one[name]:.2g}" if one[name] < 1 else f"{one[name]:.2f}" for name in _RATIO)
    return f"{middle} ({low} to {high})"
