"""`kvprobe weights`: run a model with its weights partly in CPU memory, and say what each window gives."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvprobe.commands._device import device_option
from kvprobe.commands._paths import GivenPath
from kvprobe.durations import time_text
from kvprobe.output import WEIGHTS

if TYPE_CHECKING:
    from kvprobe.output.machine import LoadTimeJson, WeightsJson
    from kvprobe.recordings.model import Recording
    from kvprobe.reporting.headline import PageHead
    from kvprobe.reporting.views import Section
    from kvprobe.weights import WeightOffload, WeightProfile

MEASURED = (0, 1, 2, 4)  # windows that are run, where the memory allowed holds them


@click.command(short_help="Run a model with its weights partly in CPU memory, and profile it.")
@click.argument("model", metavar="MODEL_DIR", type=GivenPath())
@click.option("--gpu-fraction", type=float, help="Share of the weights' bytes on the GPU; 1: no offload.")
@click.option("--gpu-bytes", type=int, help="The same in bytes.")
@click.option("--window", default="auto", show_default=True, help="Layers copied ahead: auto, a number, or 512MiB.")
@device_option
@click.option("--tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens of a forward pass.")
@click.option(
    "--forwards", type=click.IntRange(2, 1000), default=6, show_default=True, help="Forward passes with each window."
)
@click.option(
    "--report",
    type=GivenPath(dir_okay=False),
    default=Path("kvprobe-weights.html"),
    show_default=True,
    help="Where the HTML report goes.",
)
@click.option(
    "--predict", is_flag=True, help="Only predict what coding the weights would save, from the checkpoint's own bytes."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables.")
def command(
    model: Path,
    gpu_fraction: float | None,
    gpu_bytes: int | None,
    window: str,
    device: str,
    tokens: int,
    forwards: int,
    report: Path,
    predict: bool,
    as_json: bool,
) -> None:
    """Run a local transformers checkpoint with its weights partly in CPU memory, and profile it.

    The command prints for each layer how long it took to load the weights and how long it took to compute. The window
    is the number of layers that are copied ahead: the command also prints what other windows would give. If you name a
    recording of any tool in place of MODEL_DIR, the command prints the load time and the computation time.
    """
    if predict:
        _predict(model, as_json)
        return
    from kvprobe.reporting import check_writable

    if model.is_file() or (model.is_dir() and not (model / "config.json").exists() and _is_recording(model)):
        from kvprobe.recordings import open_recording

        _show_recorded(load_times(open_recording(model)), as_json)
        return
    from kvprobe.errors import UsageError

    if not model.exists():
        raise UsageError(f"{model}: no such folder or file")
    check_writable(report)
    from kvprobe.weights import load

    if gpu_fraction is None and gpu_bytes is None:
        raise UsageError("say how much of the weights may be on the GPU: --gpu-fraction 0.5, or --gpu-bytes")
    with load(model, gpu_fraction=gpu_fraction, gpu_bytes=gpu_bytes, window=window, device=device) as held:
        outcome = _run(held, tokens, forwards)
        if held.active:
            profile = held.profile()
            outcome |= {"profile": profile.to_dict(), "report": str(report)}
            _write(held, profile, outcome, report, str(model))
        if as_json:
            WEIGHTS.print(cast("WeightsJson", outcome))
        elif not held.active:
            click.echo(
                f"Nothing is offloaded: all weights fit. A forward pass of {tokens} tokens takes "
                f"{time_text(outcome['forward_ns'])}."
            )
        else:
            _show(outcome, profile)


def _predict(model: Path, as_json: bool) -> None:
    """What coding would make of the weights: nothing is started."""
    from kvprobe.errors import UsageError
    from kvprobe.weights.checkpoint import shares

    if not model.is_dir():
        raise UsageError(f"{model}: no such folder")
    found = shares(model)
    total, coded = sum(one.bytes for one in found), sum(one.coded_bytes for one in found)
    looked = sum(one.sample_bytes for one in found)
    if as_json:
        from kvprobe.output.machine import CodedShareJson

        each: list[CodedShareJson] = [
            {"dtype": one.dtype, "bytes": one.bytes, "sample_bytes": one.sample_bytes, "share": one.share}
            for one in found
        ]
        WEIGHTS.print({"total_bytes": total, "coded_bytes": coded, "share": coded / total, "dtypes": each})
        return
    from rich.console import Console
    from rich.table import Table

    from kvprobe.commands._tables import print_table

    console = Console()
    console.print(
        f"Coded, {_mib(coded)} of these {_mib(total)} of weights would travel: {coded / total:.3f}. Predicted from "
        f"{_mib(looked)} of the checkpoint's own bytes; coding has not been tried here, and no copy is coded yet.",
        highlight=False,
    )
    table = Table(title="Weights by dtype")
    for name in ("dtype", "size", "looked at", "would travel"):
        table.add_column(name, justify="left" if name == "dtype" else "right")
    for one in found:
        if one.sample_bytes:
            table.add_row(one.dtype, _mib(one.bytes), _mib(one.sample_bytes), f"{one.share:.3f}")
        else:
            table.add_row(one.dtype, _mib(one.bytes), "not coded", "as it is")
    print_table(console, table, wrapped=("", "layer"))


def _is_recording(folder: Path) -> bool:
    """Whether a folder holds one, or the traces of several ranks."""
    from kvprobe.errors import RecordingError
    from kvprobe.recordings import expand, sniff

    try:
        return all(sniff(path) for path in expand(folder))
    except (RecordingError, OSError):
        return False


def _run(held: WeightOffload, tokens: int, forwards: int) -> dict[str, Any]:
    """Forwards under every window that fits, the one asked for last; the plan and the times that need no profile."""
    import time

    import torch

    from kvprobe.errors import KvprobeError, UsageError

    first = next(parameter for parameter in held.model.parameters())
    cuda = torch.cuda.is_available() and (held.runtime.provider == "cuda" if held.active else first.is_cuda)
    limit = getattr(held.model.config, "max_position_embeddings", None) or tokens
    if tokens > limit:
        raise UsageError(f"--tokens {tokens} is more than the {limit} that this model takes")
    threads = torch.get_num_threads()
    if not cuda:  # the host runtime's copy engine is a thread that needs a processor of its own
        torch.set_num_threads(max(threads - 1, 1))
    ids = torch.randint(0, held.model.config.vocab_size, (1, tokens), device="cuda" if cuda else "cpu")

    def forward() -> float:
        began = time.perf_counter_ns()
        try:
            held.model(ids)
            if cuda:
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise KvprobeError(f"the forward pass failed: {str(error).splitlines()[0]}") from None
        return time.perf_counter_ns() - began

    plan = held.plan
    with torch.inference_mode():
        times = []
        own = plan.slots - 1
        widths = [own]
        if held.active:
            widths = [
                width
                for width in MEASURED
                if width != own
                and width + 1 <= len(plan.units)
                and plan.device_bytes + (width - own) * plan.slot_bytes <= plan.limit_bytes
            ]
            for width in (*widths, own):
                if width == own:
                    with held.without_copies():  # what computation takes that waits for nothing
                        for _ in range(min(forwards, 3)):
                            forward()
                held.set_window(width)
                for _ in range(forwards):
                    forward()
        else:
            times = sorted(forward() for _ in range(forwards))
    torch.set_num_threads(threads)
    return {
        "tokens": tokens,
        "total_bytes": plan.total_bytes,
        "limit_bytes": plan.limit_bytes,
        "gpu_bytes": held.gpu_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "offloaded_layers": len(plan.units),
        "grain": plan.grain,
        "pinned_bytes": held.pinned_bytes,
        "pin_ns": held.pin_ns,
        "notes": held.notes,
        **({"forward_ns": times[len(times) // 2]} if times else {}),
    }


def _write(held: WeightOffload, profile: WeightProfile, outcome: dict[str, Any], path: Path, model: str) -> None:
    from kvprobe.diagnosis import diagnose
    from kvprobe.reporting import write_report
    from kvprobe.weights import recording_of

    # Of its own window alone: a finding about forwards that only measured another one would contradict the verdict.
    recording = recording_of(held, model, shlex.join(["kvprobe", *sys.argv[1:]]), profile.window)
    title = f"Weights of {Path(model).name}: {held.gpu_bytes / held.plan.total_bytes:.0%} on the GPU"
    write_report(
        recording,
        path,
        findings=diagnose(recording),
        title=title,
        extra=[section(profile, outcome)],
        lead_verdict=verdict(profile),
    )


def verdict(profile: WeightProfile) -> PageHead:
    """Copying or computing, which window, and what it gives: the top of the report and of what is printed."""
    from kvprobe.reporting.headline import Fact, PageHead

    copying = profile.copy_ns > profile.compute_ns
    what = "copying weights" if copying else "computing"
    own = str(profile.window)
    # Of one column of the table: what was run is compared with what was run; a window that was not run may not fit.
    ran = {name: ns for name, ns in profile.measured.items() if name != "all"}
    known, times = ("measured", ran) if own in ran and len(ran) > 1 else ("predicted", dict(profile.predicted))
    widths = sorted((name for name in times if name != "all"), key=int)
    least = min(times[name] for name in widths)
    best = next(name for name in widths if times[name] <= 1.01 * least)  # of equal ones the one that takes least memory
    now = times.get(own, profile.forward_ns)
    gain = now - times[best]
    if best != own and gain > 0.01 * now:
        state = "warning"
        headline = f"Most of the work is {what}; a window of {best} saves {time_text(gain)} of {time_text(now)}."
        action = f"use --window {best}"
    else:
        state, best = "info", own if own in times else best
        headline = f"Most of the work is {what}; no window is faster than {profile.window} by more than 1%."
        action = "keep this window"
    without = profile.measured.get("all", profile.predicted["all"])
    left = max(times[best] - without, 0.0)
    detail = (
        f"Copies take {time_text(profile.copy_ns)} and computation {time_text(profile.compute_ns)} of a forward pass, "
        f"{profile.hidden:.0%} of the copies hidden. "
    )
    detail += (
        "A window can hide no more than the computation is long: fewer bytes (a higher --gpu-fraction) or more "
        "tokens a forward pass would help."
        if copying
        else f"The computation is long enough to hide all copies; with a window of {best}, {time_text(left)} more than "
        "without any copy remain."
    )
    unknown = {name: ns for name, ns in profile.predicted.items() if name not in {*ran, "all"}}
    beyond = [name for name, ns in unknown.items() if ns < 0.99 * least]
    if known == "measured" and beyond:
        detail += (
            f" A window of {beyond[0]} is predicted to take {time_text(unknown[beyond[0]])}; it was not run, because "
            "it does not fit into the GPU memory allowed."
        )
    facts = [
        Fact("Window", f"{profile.window}", f"{time_text(profile.forward_ns)} a forward pass"),
        Fact("Best window", best, f"{time_text(times[best])} a forward pass, {known}: {action}"),
        Fact(
            "Exposed wait for copies", time_text(profile.wait_ns), f"{profile.wait_ns / profile.forward_ns:.0%} of it"
        ),
        Fact("Without any copy", time_text(without), "measured" if "all" in profile.measured else "predicted"),
    ]
    return PageHead(state, headline, detail, facts)


def section(profile: WeightProfile, outcome: dict[str, Any]) -> Section:
    """The report's part on weights: load time beside computation, windows, layers."""
    from kvprobe.reporting.views import Section, table

    windows = [[name, (time_text(ns), ns), _cell(profile.measured.get(name))] for name, ns in profile.predicted.items()]
    layers = [
        [
            one.name,
            (_mib(one.bytes), one.bytes),
            (time_text(one.copy_ns), one.copy_ns),
            (time_text(one.compute_ns), one.compute_ns),
            (time_text(one.wait_ns), one.wait_ns),
            (f"{one.hidden:.0%}", one.hidden),
        ]
        for one in profile.layers
    ]
    lead = (
        f"{outcome['offloaded_layers']} {'layers' if outcome['grain'] == 'blocks' else 'leaf modules'} of "
        f"{_mib(outcome['offloaded_bytes'])} live in CPU memory and are copied in each forward; "
        f"{_mib(outcome['gpu_bytes'])} of GPU memory hold the rest and the window."
    )
    return Section(
        "weights",
        "Weights",
        lead,
        tables=[
            table("A forward pass", ["", "Time", "Of the forward pass"], _summary(profile)),
            table(
                "Windows",
                ["Layers ahead", "Predicted", "Measured"],
                windows,
                f"predicted from the copies and computation of each layer with window {profile.window}; "
                "all: every weight on the GPU",
            ),
            table("Layers in CPU memory", ["Layer", "Size", "Copy", "Computation", "Exposed wait", "Hidden"], layers),
        ],
    )


def load_times(recording: Recording) -> list[dict[str, Any]]:
    """Copies to the GPU beside computation, of each process of any recording that saw the device; times in ns.

    Which copies are weights a recording does not say: these are all copies to the GPU. `hidden` is the share of their
    time during which the same process computed.

    Raises:
        RecordingError: the recording has no executions of copies to the GPU.
    """
    import numpy as np

    from kvprobe.errors import RecordingError
    from kvprobe.recordings.intervals import Cover
    from kvprobe.recordings.model import Direction, Engine

    table, out = recording.executions, []
    loads = (table["engine"] == Engine.COPY) & (table["direction"] == Direction.H2D)
    if not loads.any():
        raise RecordingError(
            "this recording holds no copy to the GPU as the device ran it: record with nsys -t cuda, "
            "with the PyTorch profiler, or run kvprobe weights on the model"
        )
    for process in np.unique(table["process"][loads]):
        mine = table["process"] == process
        copies, kernels = (
            Cover(table["start_ns"][rows], table["end_ns"][rows])
            for rows in (loads & mine, (table["engine"] == Engine.KERNEL) & mine)
        )
        both = int(kernels.within(copies.start, copies.end).sum())
        alone = copies.total_ns - both
        out.append(
            {
                "process": int(process),
                "copies": int((loads & mine).sum()),
                "bytes": int(table["bytes"][loads & mine].sum()),
                "copy_ns": copies.total_ns,
                "compute_ns": kernels.total_ns,
                "exposed_ns": alone,
                "hidden": both / max(copies.total_ns, 1),
                "busy_ns": alone + kernels.total_ns,
                "bound_ns": max(copies.total_ns, kernels.total_ns),
            }
        )
    return out


def _show_recorded(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        WEIGHTS.print({"processes": cast("list[LoadTimeJson]", found)})
        return
    from rich.console import Console
    from rich.table import Table

    from kvprobe.commands._tables import print_table

    for one in found:
        table = Table(
            title=f"Process {one['process']}: {one['copies']:,} copies to the GPU, {_mib(one['bytes'])}, "
            f"{one['hidden']:.0%} of their time hidden"
        )
        table.add_column("")
        table.add_column("time", justify="right")
        for text, name in (
            ("load (copies to the GPU)", "copy_ns"),
            ("computation", "compute_ns"),
            ("load that no computation hid", "exposed_ns"),
            ("device busy", "busy_ns"),
            ("bound: max(load, computation)", "bound_ns"),
        ):
            table.add_row(text, time_text(one[name]))
        print_table(Console(), table, wrapped=("",))


def _summary(profile: WeightProfile) -> list[list[Any]]:
    """Weight load time beside computation time."""

    def share(ns: float) -> tuple[str, float]:
        return f"{ns / profile.forward_ns:.0%}", ns / profile.forward_ns

    rows = (
        ("weight load (copies)", profile.copy_ns),
        ("computation", profile.compute_ns),
        ("exposed wait for weights", profile.wait_ns),
        ("whole forward", profile.forward_ns),
        ("bound: max(copies, computation)", profile.bound_ns),
    )
    return [[text, (time_text(ns), ns), share(ns)] for text, ns in rows]


def _show(outcome: dict[str, Any], profile: WeightProfile) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvprobe.commands._tables import print_table

    console = Console()
    found = verdict(profile)
    console.print(found.headline, found.detail, sep="\n", highlight=False)
    table = Table(
        title=f"A forward pass of {outcome['tokens']} tokens, window {profile.window}: "
        f"{_mib(profile.bytes)} copied at {profile.link_bytes_per_s / 1e9:.1f} GB/s, "
        f"{profile.hidden:.0%} of the copy time hidden"
    )
    for name in ("", "time", "of the forward pass"):
        table.add_column(name, justify="left" if not name else "right")
    for text, (time, _), (share, _) in _summary(profile):
        table.add_row(text, time, share)
    print_table(console, table, wrapped=("", "layer"))
    table = Table(title="Windows: forward time")
    for name in ("layers ahead", "predicted", "measured"):
        table.add_column(name, justify="right")
    for name, ns in profile.predicted.items():
        table.add_row(name, time_text(ns), _cell(profile.measured.get(name))[0])
    print_table(console, table, wrapped=("", "layer"))
    table = Table(title=f"{outcome['offloaded_layers']} {outcome['grain']} in CPU memory")
    for name in ("layer", "size", "copy", "computation", "exposed wait", "hidden"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for one in profile.layers:
        table.add_row(
            one.name,
            _mib(one.bytes),
            time_text(one.copy_ns),
            time_text(one.compute_ns),
            time_text(one.wait_ns),
            f"{one.hidden:.0%}",
        )
    print_table(console, table, wrapped=("", "layer"))
    console.print(
        f"GPU memory for weights: {_mib(outcome['gpu_bytes'])} of {_mib(outcome['limit_bytes'])} allowed; "
        f"pinned: {_mib(outcome['pinned_bytes'])}, allocated in {time_text(outcome['pin_ns'])}",
        highlight=False,
    )
    for note in outcome["notes"]:
        console.print(note, highlight=False)
    console.print(f"report: {outcome['report']}", highlight=False)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _cell(ns: float | None) -> tuple[str, float | None]:
    return (time_text(ns), ns) if ns is not None else ("not run", None)
