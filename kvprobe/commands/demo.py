"""`kvprobe demo`: fill a launch queue, notice, switch, prove it, and leave a report."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvprobe.commands._device import Seconds, device_option, runtime_of
from kvprobe.commands._paths import GivenPath
from kvprobe.errors import KvprobeError, plain
from kvprobe.output import DEMO

if TYPE_CHECKING:
    import numpy as np

    from kvprobe.cuda import Runtime
    from kvprobe.diagnosis import Examination
    from kvprobe.output.machine import DemoJson
    from kvprobe.recordings.model import Recording
    from kvprobe.workload import WorkloadServer

HOST_BYTES_PER_S = 1.5e9  # slow enough that two cores move and compare every byte beside the loop
QUIET_S, SECONDS = 0.8, 8.5
RECORDS = 1 << 19  # of a thread, over all phases


@click.command()
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option(
    "--report",
    type=GivenPath(dir_okay=False),
    default=Path("kvprobe-demo.html"),
    show_default=True,
    help="Where the HTML report goes.",
)
@click.option(
    "--seconds",
    type=Seconds(1, 600),
    default=SECONDS,
    show_default=True,
    help="About how long both phases take together.",
)
def command(device: str, as_json: bool, report: Path, seconds: float) -> None:
    """Fill a launch queue, see how kvprobe notices it and switches, and write a report.

    The demo simulates a server. Dozens of requests with shared prefixes load their KV blocks from CPU memory, while a
    loop runs steps like those of a model. First, all copies use one shared stream, and the steps become slower. Then
    the same number of requests run under the policy auto: kvprobe may give each transfer a stream of its own, and may
    skip loads of blocks that are already being loaded. A short demo has few steps, so their median and p99 are rough.
    """
    from kvprobe.reporting import check_writable

    check_writable(report)
    outcome, recording = play(runtime_of(device), seconds, progress=not as_json)
    outcome["report"] = str(report)
    findings = write(outcome, recording, report)
    DEMO.print(cast("DemoJson", outcome)) if as_json else show(exact(outcome, recording), findings)


def play(runtime: Runtime, seconds: float, progress: bool) -> tuple[dict[str, Any], Recording]:
    """Runs the phases; the figures, and the recording that they come from."""
    from kvprobe.commands._own_waits import own_waits
    from kvprobe.cuda.hostruntime import HostRuntime
    from kvprobe.launchqueue import calibrate
    from kvprobe.probe.recorder import Recorder
    from kvprobe.workload import Machine, WorkloadServer, recorded, shape_for

    if isinstance(runtime, HostRuntime) and "KVHOST_H2D_GBPS" not in os.environ:
        runtime.configure(h2d_bytes_per_s=HOST_BYTES_PER_S, d2h_bytes_per_s=HOST_BYTES_PER_S)
    limits = calibrate(runtime, cache=False)
    shape = shape_for(runtime, limits)
    machine = Machine(runtime, shape)
    recorder = Recorder("copies", RECORDS)  # one ring file for all phases: it stays while an engine goes
    try:
        if recorder.path is None:
            raise KvprobeError("the demo could not be recorded: its ring file cannot be written")
        with own_waits(recorder.path) as waits, _bar(progress, QUIET_S + seconds) as tick:
            quiet = WorkloadServer(machine, limits, "shared", "off", concurrency=1)
            servers = {"quiet": _phase(quiet, QUIET_S, tick, "quiet: one request at a time")}
            shared = WorkloadServer(machine, limits, "shared", "off")
            said = "shared: everything on one shared stream"
            servers["shared"] = _phase(shared, seconds / 2, tick, said)
            auto = WorkloadServer(machine, limits, "auto", "auto")
            said = "auto: the same requests, kvprobe may switch"
            servers["auto"] = _phase(auto, seconds / 2, tick, said, requests=shared.measured.requests)
        recording = recorded(servers, recorder.path, "kvprobe demo", shlex.join(["kvprobe", *sys.argv[1:]]))
        waits.add_to(recording)
    finally:
        recorder.close()
        machine.close()
    recording.machine["device"] = _device_name(runtime)
    recording.machine_how["device"] = f"CUDA runtime interface, provider “{runtime.provider}”"
    return _outcome(recording, servers), recording


def _phase(
    server: WorkloadServer, seconds: float, tick: Callable[[float, str], None], text: str, requests: int = 0
) -> WorkloadServer:
    """One server's life."""
    try:
        server.run(seconds, lambda share: tick(share * seconds, text), requests)
    finally:
        server.close()
    tick(-1, text)
    return server


def _outcome(recording: Recording, servers: dict[str, WorkloadServer]) -> dict[str, Any]:
    """The figures, of the recording and of what the servers counted."""
    from kvprobe.reporting.demo import costs, load_costs

    cost, loads = costs(recording), load_costs(recording)
    shape = servers["auto"].shape
    engine = servers["auto"].engine
    first = engine.detector.saturations[0] if engine.detector.saturations else None
    return {
        "device": recording.machine["device"],
        "provider": servers["auto"].runtime.provider,
        "queue_depth": recording.machine["queue_depth"],
        "channels": recording.machine["channels"],
        "baseline_submit_ns": _percentile(cost["quiet"].ns, 50),
        "copy_bytes": shape.piece_bytes,
        "link_bytes_per_s": shape.link_bytes_per_s,
        "shared": {**_submitting(cost["shared"].ns), **_figures(servers["shared"], loads["shared"].ns)},
        "auto": _figures(servers["auto"], loads["auto"].ns),
        "onset_ms": (first.noticed_ns - first.onset_ns) / 1e6 if first else None,
        "blocked_calls_before_switch": first.blocked_calls if first else None,
        "switches": len(engine.auto.decisions),
        "switch_log": [
            {
                "before": one.before.policy,
                "after": one.after.policy,
                "reason": recording.text(int(why)),
                "gain": round(one.gain, 1),
            }
            for one, why in zip(engine.auto.decisions, recording.decisions["reason"], strict=True)
        ],
        "bytes_verified": sum(server.measured.bytes_verified for server in servers.values()),
        "redundant_bytes_avoided": servers["auto"].dedup.stats.avoided_bytes,
        "dedup": _dedup_sentence(servers["auto"].dedup.stats.switches),
    }


def _submitting(call_ns: np.ndarray) -> dict[str, int]:
    """The submitting calls of a thread that submits for itself."""
    return {"submit_p50_ns": _percentile(call_ns, 50), "submit_p99_ns": _percentile(call_ns, 99)}


def _figures(server: WorkloadServer, load_ns: np.ndarray) -> dict[str, Any]:
    """The figures of one phase; of auto, times are those after its last switch, and what was moved is of all of it.

    `load_ns` is the time of each load divided by its copies.
    """
    import numpy as np

    measured = server.measured
    since = max((one.time_ns for one in server.engine.auto.decisions), default=0)
    steps = np.array(measured.steps, dtype=np.int64).reshape(-1, 2)
    step_ns = steps[steps[:, 0] >= since, 1]
    times = [ns for start, ns, _, _ in measured.loads if start >= since]
    seconds = (measured.end_ns - measured.start_ns) / 1e9
    return {
        "load_p50_ns": _percentile(load_ns, 50),
        "load_p99_ns": _percentile(load_ns, 99),
        "longest_call_ns": max(times, default=0),
        "step_p50_ns": _percentile(step_ns, 50),
        "step_p99_ns": _percentile(step_ns, 99),
        "seconds": round(seconds, 3),
        "bytes_per_s": round(measured.bytes_loaded / seconds),
        "requests_per_s": round(measured.requests / seconds, 1),
        "bytes": measured.bytes_loaded,
        "copies": sum(count for _, _, count, _ in measured.loads),
        "requests": measured.requests,
        "redundant_bytes": server.dedup.stats.redundant_bytes,
    }


def exact(outcome: dict[str, Any], recording: Recording) -> dict[str, Any]:
    """The same figures for people: those per copy are not cut to whole ns, as they are in JSON."""
    import numpy as np

    from kvprobe.reporting.demo import load_costs

    costs, out = load_costs(recording), dict(outcome)
    for name in ("shared", "auto"):
        if len(costs[name].ns):
            p50, p99 = np.percentile(costs[name].ns, (50, 99)).tolist()
            out[name] = {**outcome[name], "load_p50_ns": p50, "load_p99_ns": p99}
    return out


def write(outcome: dict[str, Any], recording: Recording, path: Path) -> Examination:
    """The report of a played demo; its findings."""
    from kvprobe.diagnosis import diagnose
    from kvprobe.reporting import demo, write_report

    outcome = exact(outcome, recording)
    findings = diagnose(recording)
    write_report(
        recording,
        path,
        findings=findings,
        title=f"kvprobe demo on {outcome['device']}",
        extra=demo.sections(recording, outcome),
        lead_verdict=demo.verdict(outcome, findings),
    )
    return findings


def _dedup_sentence(switches: list[tuple[int, bool, str]]) -> str:
    if not switches:
        return ""
    _, on, reason = switches[-1]
    return f"redundant-load dedup was switched {'on' if on else 'off'}: {reason}"


def show(outcome: dict[str, Any], findings: Examination) -> None:
    """The table at the end, and the first change as `kvprobe report` prints it."""
    from rich.console import Console
    from rich.table import Table

    from kvprobe.commands._tables import print_table
    from kvprobe.diagnosis.finding import singular
    from kvprobe.reporting.headline import change_lines
    from kvprobe.reporting.units import duration, link_share

    shared, auto = outcome["shared"], outcome["auto"]
    table = Table(
        title=f"{outcome['device']}: queue depth {outcome['queue_depth']:,}, {outcome['channels']} channels, "
        f"{outcome['copy_bytes'] >> 10:,} KiB a copy"
    )
    for name, side in (("", "left"), ("shared stream", "right"), ("auto, after the switch", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for text, key in (
        ("load() time per copy, p50", "load_p50_ns"),
        ("load() time per copy, p99", "load_p99_ns"),
        ("longest load(), all copies together", "longest_call_ns"),
        ("model step, p50", "step_p50_ns"),
        ("model step, p99", "step_p99_ns"),
    ):
        table.add_row(text, duration(shared[key]), duration(auto[key]))
    link = outcome["link_bytes_per_s"]
    table.add_row(
        "GB/s (share of the link)",
        *(f"{one['bytes_per_s'] / 1e9:.2f} ({link_share(one['bytes_per_s'] / link)})" for one in (shared, auto)),
    )
    table.add_section()  # of whole phases, before the switch and after it
    table.add_row("GB moved in the whole phase", *(f"{one['bytes'] / 1e9:.2f}" for one in (shared, auto)))
    console = Console()
    print_table(console, table, wrapped=("",))
    console.print(
        f"one submission (median): {duration(outcome['baseline_submit_ns'])} with one request at a time, "
        f"{duration(shared['submit_p50_ns'])} on the shared stream",
        highlight=False,
    )
    for one in outcome["switch_log"]:
        console.print(f"switched from {one['before']} to {one['after']}: {one['reason']}", highlight=False)
    if outcome["onset_ms"] is not None:
        console.print(
            f"kvprobe noticed this {duration(outcome['onset_ms'] * 1e6)} after the first blocked call, when "
            + singular(f"{outcome['blocked_calls_before_switch']:,} calls")
            + " had blocked",
            highlight=False,
        )
    if avoided := outcome["redundant_bytes_avoided"]:  # how many overlap depends on how fast loads are asked for
        console.print(
            f"under auto, requests loaded {auto['redundant_bytes'] / 1e9:.2f} GB that another request was loading "
            f"already; auto then switched dedup on, which avoided another {avoided / 1e9:.2f} GB of such loads",
            highlight=False,
        )
    memory = "simulated GPU memory" if outcome["provider"] == "host" else "GPU memory"
    console.print(
        f"compared each block that a request loaded, in CPU memory and in {memory}: "
        f"all {outcome['bytes_verified'] / 1e9:.2f} GB are equal (a block counts each time it was loaded)",
        highlight=False,
    )
    named = [one for one in findings if not one.abstains and one.severity != "info"]
    of = ", mainly of the time before the switch" if outcome["switch_log"] else ""
    for line in [f"first finding{of}: {named[0].title}", *change_lines(named[0])] if named else []:
        console.print(plain(line), highlight=False, markup=False, soft_wrap=True)
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
