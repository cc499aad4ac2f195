"""`kvprobe demo`: fill a launch queue, notice, switch, prove it, and leave a report."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import numpy as np

    from kvprobe.cuda import Runtime
    from kvprobe.offload import OffloadEngine
    from kvprobe.workload import Measured, Server

HOST_BYTES_PER_S = 1.5e9  # slow enough that two cores move and compare every byte beside the loop
QUIET_S, PHASE_S = 0.8, (3.5, 5.0)
PARTS = {"build": "build", "submit": "submit", "wait": "queue_wait", "copy": "copy", "poll": "poll_delay"}


@click.command()
@click.option("--device", type=click.Choice(["auto", "host", "cuda"]), default="auto", show_default=True,
              help="The GPU, the embedded host runtime, or whichever there is.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), default=Path("kvprobe-demo.html"),
              show_default=True, help="Where the HTML report goes.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(1, 600), default=sum(PHASE_S), show_default=True,
              help="Length of both phases together.")  # fmt: skip
def command(device: str, as_json: bool, report: Path, seconds: float) -> None:
    """Fill a launch queue, watch kvprobe notice and switch, get a report.

    Hundreds of requests with shared prefixes load their KV blocks from CPU memory beside a model-like loop whose step
    time is the victim: first over one shared stream, then under auto.
    """
    from kvprobe.reporting import check_writable

    check_writable(report)
    if device != "host":
        with contextlib.suppress(ImportError):  # the runtime must be the one that torch has loaded
            import torch  # noqa: F401
    from kvprobe.cuda import find_runtime

    outcome = play(find_runtime(device), seconds, progress=not as_json)
    outcome["report"] = str(report)
    write(outcome, report)
    public = {name: value for name, value in outcome.items() if not name.startswith("_")}
    click.echo(json.dumps(public, indent=1)) if as_json else show(public)


def play(runtime: Runtime, seconds: float, progress: bool) -> dict[str, Any]:
    """Runs the phases and returns the figures; names that begin with "_" are for the report alone."""
    from kvprobe.cuda.hostruntime import HostRuntime
    from kvprobe.launchqueue import calibrate
    from kvprobe.workload import Machine, Server, shape_for

    if isinstance(runtime, HostRuntime) and "KVHOST_H2D_GBPS" not in os.environ:
        runtime.configure(h2d_bytes_per_s=HOST_BYTES_PER_S, d2h_bytes_per_s=HOST_BYTES_PER_S)
    limits = calibrate(runtime, cache=False)
    shape = shape_for(runtime, limits)
    machine = Machine(runtime, shape)
    scale = seconds / sum(PHASE_S)
    phases = {"shared": PHASE_S[0] * scale, "auto": PHASE_S[1] * scale}
    with _bar(progress, QUIET_S + seconds) as tick:
        _, calls, _ = _phase(Server(machine, limits, "shared", "off", concurrency=1), QUIET_S, tick,
                             "quiet: one request at a time")  # fmt: skip
        baseline = _percentile(calls["dur_ns"], 50)
        outcome: dict[str, Any] = {
            "device": _device_name(runtime),
            "provider": runtime.provider,
            "queue_depth": limits.depth,
            "channels": limits.channels,
            "baseline_submit_ns": baseline,
            "copy_bytes": shape.piece_bytes,
            "link_bytes_per_s": shape.link_bytes_per_s,
        }
        kept: dict[str, tuple[Measured, np.ndarray, OffloadEngine]] = {}
        for name, length in phases.items():
            dedup = "auto" if name == "auto" else "off"
            said = "everything on one shared stream" if name == "shared" else "auto: kvprobe may switch"
            server, calls, measured = _phase(Server(machine, limits, name, dedup), length, tick, f"{name}: {said}")
            kept[name] = (measured, calls, server.engine)
            outcome[name] = _figures(server, measured, calls)
    machine.close()
    _add_auto(outcome, server, kept)
    outcome["_kept"], outcome["_dedup"] = kept, server.dedup.stats
    return outcome


def _phase(
    server: Server, seconds: float, tick: Callable[[float, str], None], text: str
) -> tuple[Server, np.ndarray, Measured]:
    """One server's life: its measurements, and every submission of a copy as the native ring recorded it."""
    from kvprobe.probe.ring import read_ring

    try:
        measured = server.run(seconds, lambda share: tick(share * seconds, text))
        path = server.engine.recorder.path
        calls = read_ring(path).records() if path else _no_calls()
    finally:
        server.close()
    tick(-1, text)
    return server, _costs(calls[calls["call"] == 1], server, measured), measured


def _costs(calls: np.ndarray, server: Server, measured: Measured) -> np.ndarray:
    """What each copy cost the model's thread: its submitting call, and after the switch its share of handing over."""
    import numpy as np

    since = max((one.time_ns for one in server.engine.auto.decisions), default=0)
    if not since:
        return calls
    own = calls[calls["start_ns"] < since]
    handed = [one for one in measured.handed if one[0] >= since]
    after = np.zeros(len(handed), calls.dtype)
    after["start_ns"] = [start for start, _, _ in handed]
    after["dur_ns"] = [ns / copies for _, ns, copies in handed]
    return np.concatenate([own, after])


def _no_calls() -> np.ndarray:
    import numpy as np

    from kvprobe.probe.ring import RECORD

    return np.zeros(0, RECORD)


def _figures(server: Server, measured: Measured, calls: np.ndarray) -> dict[str, Any]:
    """The figures of one phase; of auto, those after its last switch."""
    import numpy as np

    since = max((one.time_ns for one in server.engine.auto.decisions), default=0)
    steps = np.array(measured.steps, dtype=np.int64).reshape(-1, 2)
    durations, step_ns = calls["dur_ns"][calls["start_ns"] >= since], steps[steps[:, 0] >= since, 1]
    handed = [ns for start, ns, _ in measured.handed if start >= since]
    copies = sum(count for start, _, count in measured.handed if start >= since)
    return {
        "submit_p50_ns": _percentile(durations, 50),
        "submit_p99_ns": _percentile(durations, 99),
        "longest_call_ns": max(handed, default=0),
        "step_p50_ns": _percentile(step_ns, 50),
        "step_p99_ns": _percentile(step_ns, 99),
        "bytes_per_s": round(measured.bytes_loaded / ((measured.end_ns - measured.start_ns) / 1e9)),
        "bytes": measured.bytes_loaded,
        "copies": copies,
        "requests": measured.requests,
        "redundant_bytes": server.dedup.stats.redundant_bytes,
    }


def _add_auto(outcome: dict[str, Any], server: Server, kept: dict[str, Any]) -> None:
    engine = server.engine
    first = engine.detector.saturations[0] if engine.detector.saturations else None
    outcome["onset_ms"] = (first.noticed_ns - first.onset_ns) / 1e6 if first else None
    outcome["blocked_calls_before_switch"] = first.blocked_calls if first else None
    outcome["switches"] = len(engine.auto.decisions)
    outcome["switch_log"] = [
        {"before": one.before, "after": one.after, "reason": one.reason, "gain": round(one.gain, 1)}
        for one in engine.auto.decisions
    ]
    outcome["bytes_verified"] = sum(measured.bytes_verified for measured, _, _ in kept.values())
    outcome["redundant_bytes_avoided"] = server.dedup.stats.avoided_bytes


def write(outcome: dict[str, Any], path: Path) -> None:
    """The report of a played demo."""
    import numpy as np

    from kvprobe.reporting import Story, Switch, write_report

    kept = outcome["_kept"]
    calls = np.concatenate([rows for _, rows, _ in kept.values()])
    steps = np.array([step for measured, _, _ in kept.values() for step in measured.steps], dtype=np.int64)
    decisions = kept["auto"][2].auto.decisions
    dedup = outcome["_dedup"]
    story = Story(
        device=outcome["device"],
        provider=outcome["provider"],
        queue_depth=outcome["queue_depth"],
        channels=outcome["channels"],
        baseline_submit_ns=outcome["baseline_submit_ns"],
        phases={name: {**outcome[name], "link_bytes_per_s": outcome["link_bytes_per_s"]} for name in kept},
        calibrated="counted in this process: small copies behind a closed gate until one blocked",
        switches=[Switch(one.time_ns, one.before, one.after, one.reason, one.gain) for one in decisions],
        onset_ms=outcome["onset_ms"],
        blocked_calls_before_switch=outcome["blocked_calls_before_switch"],
        bytes_verified=outcome["bytes_verified"],
        redundant_bytes_avoided=outcome["redundant_bytes_avoided"],
        submit_time_ns=calls["start_ns"].astype(np.int64),
        submit_dur_ns=calls["dur_ns"].astype(np.int64),
        submit_phase=np.concatenate([np.full(len(rows), i) for i, (_, rows, _) in enumerate(kept.values())]),
        phase_names=tuple(kept),
        step_time_ns=steps[:, 0],
        step_dur_ns=steps[:, 1],
        occupancy=dict(_occupancy(kept)),
        split={
            name: {PARTS[part]: float(ns) for part, ns in measured.splits.items()}
            for name, (measured, _, _) in kept.items()
        },
        dedup=_dedup_sentence(dedup.switches),
        command=shlex.join(["kvprobe", *sys.argv[1:]]),
    )
    write_report(None, path, story=story, title=f"kvprobe demo on {outcome['device']}")


def _dedup_sentence(switches: list[tuple[int, bool, str]]) -> str:
    if not switches:
        return ""
    _, on, reason = switches[-1]
    return f"redundant-load dedup was switched {'on' if on else 'off'}: {reason}"


def _occupancy(kept: dict[str, Any]) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Outstanding operations of each load stream, named by its use."""
    import numpy as np

    for phase, (measured, _, engine) in kept.items():
        times = np.array([time for time, _ in measured.occupancy], dtype=np.int64)
        named = {engine.streams["shared"][0]: f"{phase}: shared stream"} if engine.streams["shared"] else {}
        seen = sorted({stream for _, streams in measured.occupancy for stream in streams})
        for number, stream in enumerate(seen):
            counts = np.array([streams.get(stream, 0) for _, streams in measured.occupancy], dtype=np.int64)
            yield named.get(stream, f"{phase}: stream {number}"), (times, counts)


def show(outcome: dict[str, Any]) -> None:
    """The table at the end."""
    from rich.console import Console
    from rich.table import Table

    def us(ns: float) -> str:
        return f"{ns / 1e3:,.2f} us" if ns < 10_000 else f"{ns / 1e3:,.1f} us"

    shared, auto = outcome["shared"], outcome["auto"]
    table = Table(title=f"{outcome['device']}: queue depth {outcome['queue_depth']:,}, {outcome['channels']} channels, "
                        f"{outcome['copy_bytes'] >> 10:,} KiB a copy")  # fmt: skip
    for name, side in (("", "left"), ("shared stream", "right"), ("auto, after the switch", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    table.add_row("submission, quiet", us(outcome["baseline_submit_ns"]), "")
    for text, key in (("a copy costs the model's thread, p50", "submit_p50_ns"), ("p99", "submit_p99_ns"),
                      ("longest load() of the model's thread", "longest_call_ns"), ("step p50", "step_p50_ns"),
                      ("step p99", "step_p99_ns")):  # fmt: skip
        table.add_row(text, us(shared[key]), us(auto[key]))
    link = outcome["link_bytes_per_s"]
    table.add_row("GB/s (of the link)", *(f"{one['bytes_per_s'] / 1e9:.2f} ({one['bytes_per_s'] / link:.0%})"
                                          for one in (shared, auto)))  # fmt: skip
    table.add_row("GB moved", *(f"{one['bytes'] / 1e9:.2f}" for one in (shared, auto)))
    table.add_row("GB loaded twice", *(f"{one['redundant_bytes'] / 1e9:.2f}" for one in (shared, auto)))
    table.add_row("redundant loads avoided (GB)", "", f"{outcome['redundant_bytes_avoided'] / 1e9:.2f}")
    console = Console()
    console.print(table)
    for one in outcome["switch_log"]:
        gain = f"; a copy became {one['gain']:.0f} times cheaper for the model's thread" if one["gain"] else ""
        console.print(f"{one['before']} -> {one['after']}: {one['reason']}{gain}", highlight=False)
    if outcome["onset_ms"] is not None:
        console.print(f"noticed {outcome['onset_ms']:.1f} ms after the first blocked call, "
                      f"{outcome['blocked_calls_before_switch']} blocked calls", highlight=False)  # fmt: skip
    console.print(f"{outcome['bytes_verified'] / 1e9:.2f} GB compared on both sides, all equal", highlight=False)
    console.print(f"report: {outcome['report']}", highlight=False)


@contextlib.contextmanager
def _bar(visible: bool, total_s: float) -> Iterator[Callable[[float, str], None]]:
    """A progress bar on stderr; its callback takes seconds into the current phase, -1 at the phase's end."""
    if not visible:
        yield lambda seconds, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as progress:
        task = progress.add_task("calibrating", total=total_s)
        done, newest = 0.0, 0.0

        def tick(seconds: float, text: str) -> None:
            nonlocal done, newest
            if seconds < 0:
                done, newest = done + newest, 0.0
            else:
                newest = seconds
            progress.update(task, completed=done + newest, description=text)

        yield tick


def _device_name(runtime: Runtime) -> str:
    if runtime.provider == "host":
        return "embedded host runtime"
    import torch

    return str(torch.cuda.get_device_name())


def _percentile(values: np.ndarray, q: float) -> int:
    import numpy as np

    return int(np.percentile(values, q)) if len(values) else 0
