"""`kvprobe top`: a live view of running, watched processes, or the same figures once, or for Prometheus."""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvprobe.commands._device import Seconds
from kvprobe.durations import time_text
from kvprobe.environment import RUN
from kvprobe.errors import KvprobeError, UsageError, plain
from kvprobe.output import TOP

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvprobe.account import Line
    from kvprobe.diagnosis.offload_benefit import Benefit
    from kvprobe.output.machine import BenefitJson, LiveProcessJson, TopJson
    from kvprobe.output.requests import LiveRequestsJson
    from kvprobe.probe.live import CallTime, ProcessView
    from kvprobe.requests.live import WaitsNow

__all__ = ["command"]

NOTHING = (
    "no recorded process found: start one with `kvprobe run -- COMMAND`, or name its run folder (`kvprobe top FOLDER`)"
)
NO_CALL = (
    "no call was seen yet. After `kvprobe attach`, calls through addresses that a library looked up before are not seen"
)
WAITING = "{run} is being recorded: {processes}, and none has made a CUDA call that kvprobe records yet"
EVENTS_BYTES = 4 << 20  # of a process's events, read at most in one look: the newest
ENDED = "{run} has ended, and top shows running processes only: see `kvprobe report {run}` or `kvprobe stats {run}`"


@click.command(short_help="Show recorded processes live.")
@click.argument("target", required=False, metavar="[PID|NAME|FOLDER]")
@click.option("--interval", default=1.0, show_default=True, type=Seconds(0.05, 3600), help="Seconds between updates.")
@click.option("--once", is_flag=True, help="Measure for one interval, print, and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --once: one JSON object instead of a table.")
@click.option(
    "--prometheus",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Serve http://127.0.0.1:PORT/metrics while top runs; only this machine can reach it.",
)
def command(target: str | None, interval: float, once: bool, as_json: bool, prometheus: int | None) -> None:
    """Watch submissions while they happen: rate, p50 and p99, blocked time, GB/s, the longest call that still runs.

    For vLLM, SGLang and any program that calls `kvprobe.mark` at each step, top also shows the time to the first token
    and between tokens, where that time went, and which request waited longest.

    FOLDER is the run folder that `kvprobe run` or `kvprobe attach` printed. PID is a recorded process, and NAME is a
    part of its command line. Without a target, top shows whichever of these exist: the run folder in $KVPROBE_RUN, the
    newest run folder ./kvprobe-*/, and running processes that copy with kvprobe's own `OffloadEngine`. The streams that
    block their threads longest come first.

    top marks a stream with "full?" if its submissions have become several times slower and block their thread for much
    of the time. Submissions behave so when a launch queue is full. top does not see what the GPU does: only `kvprobe
    report` can say whether the queue was full.

    top only reads files, so you can start and stop it at any time; `q` or Ctrl-C ends it. If the run has ended, the
    exit code is 2: use `kvprobe report` or `kvprobe stats`. With --once, the exit code is 1 if there is nothing to
    show.
    """
    from kvprobe.probe.exposed import served
    from kvprobe.probe.live import Live

    if as_json and not once:
        raise UsageError("--json needs --once: a live view has no end")
    run_folder = None if target is None else find_target(target)
    live, told = Live(run_folder), Told()
    live.look()
    told.look_first(run_folder)
    _refuse_ended(run_folder)
    if once:
        with served(run_folder, prometheus) if prometheus else nullcontext():
            time.sleep(interval)
            views = live.look()
            if not views:  # it may have ended meanwhile, all its calls seen by the first look
                _refuse_ended(run_folder)
                if run_folder is not None and run_folder.is_dir() and not (run_folder / "run.json").exists():
                    raise UsageError(f"nothing is recorded in {run_folder}: name a folder that `kvprobe run` printed")
                raise KvprobeError(_waiting(run_folder) or NOTHING)
            if as_json:
                TOP.print(as_object(views, *told.look(views)))
            else:
                _print(views, *told.look(views))
        return
    if not sys.stdout.isatty() and not prometheus and not live.look() and not _waiting(run_folder):
        raise KvprobeError(NOTHING)  # whoever reads a pipe would wait without end
    with suppress(KeyboardInterrupt), served(run_folder, prometheus) if prometheus else nullcontext():
        _watch(live, interval, told)


def find_target(target: str) -> Path:
    """The run folder or ring file that a pid, a name or a path stands for.

    Raises:
        UsageError: it stands for none, or for several.
    """
    from kvprobe.instrument.attach import rings_of
    from kvprobe.probe.processes import named, pid_in

    if not target:
        raise UsageError("the text after `kvprobe top` is empty: name a pid, a part of a command line, or a run folder")
    if Path(target).exists():
        return Path(target)
    pid = pid_in(target)
    if pid is not None:
        shown = _shown(rings_of(pid))
        if shown is None:
            raise UsageError(f"process {target} is not being recorded: `kvprobe attach {target}` records it")
        return shown
    if "/" in target:
        raise UsageError(f"{target} does not exist")
    found: dict[Path, int] = {}
    for other in named(target):
        if (shown := _shown(rings_of(other))) is not None:
            found[shown] = other
    if not found:
        raise UsageError(
            f"no recorded process has {target} in its command line: `kvprobe attach {target}` records one that runs"
        )
    if len(found) > 1:
        several = ", ".join(f"{pid} ({folder})" for folder, pid in found.items())
        raise UsageError(f"several recordings match {target}: name one of {several}")
    return next(iter(found))


def _shown(rings: dict[str, Path]) -> Path | None:
    """What to look at of a process's ring files: the run folder, or its engine's file alone."""
    return rings["interposer"].parent if "interposer" in rings else rings.get("engine")


def _waiting(target: Path | None) -> str:
    """What to say of a run whose processes have made no call yet; "" where none goes on."""
    from kvprobe.probe import processes
    from kvprobe.probe.live import over
    from kvprobe.runfolder.folder import RunFolder

    folders = [target] if target is not None else [Path(RUN.text or "."), *Path().glob("kvprobe-*/")]
    runs = [folder for folder in folders if (folder / "run.json").exists() and not over(folder)]
    if not runs:
        return ""
    newest = max(runs, key=lambda folder: (folder / "run.json").stat().st_mtime)
    first = RunFolder(newest).run().get("pid", 0)
    named = str(newest.absolute())
    pids = {pid for pid in processes.children() if (processes.environment(pid) or {}).get(RUN.name) == named}
    pids |= {first} if first and processes.alive(first) else set()
    number = f"{len(pids)} processes run" if len(pids) != 1 else "1 process runs"
    return WAITING.format(run=newest, processes=number)


def _refuse_ended(run: Path | None) -> None:
    from kvprobe.probe.live import over

    if run is not None and over(run):
        raise UsageError(ENDED.format(run=run))


class Offloads:
    """What offloads have brought so far, from the events that a run's adapters write.

    An event holds the sums since the server began, so of many the newest are enough.
    """

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}  # bytes of each file that were read
        self._last: dict[tuple[Path, str], dict[str, Any]] = {}

    def look(self, views: list[ProcessView]) -> list[Benefit]:
        """Reads what is new in the run folders of these processes."""
        from kvprobe.diagnosis.offload_benefit import of_events
        from kvprobe.runfolder import files

        folders = {Path(view.path).parent for view in views}
        for path in sorted(path for folder in folders for path in folder.glob("events-*.jsonl")):
            try:
                begin, new = files.read_new(path, self._read.get(path, 0), EVENTS_BYTES)
            except OSError:
                continue
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = begin + len(whole)
            for line in whole.splitlines():
                if b'"kind":"offload"' in line:
                    with suppress(ValueError, RecursionError):
                        event = json.loads(line)
                        if isinstance(event, dict):
                            self._last[path, str(event.get("source"))] = event
        return of_events(self._last.values())


class Told:
    """What servers tell of themselves in a run: what offloads brought, and how long requests wait for tokens."""

    def __init__(self) -> None:
        from kvprobe.requests.live import LiveRequests

        self._offloads, self._requests = Offloads(), LiveRequests()

    def look_first(self, run: Path | None) -> None:
        """What is usual of the steps so far, so that the first interval can be compared."""
        from kvprobe.probe.exposed import folders

        self._requests.look(folders(run))

    def look(self, views: list[ProcessView]) -> tuple[list[Benefit], list[WaitsNow]]:
        """What is new of the processes shown."""
        return self._offloads.look(views), self._requests.look({Path(view.path).parent for view in views})


def _split(views: list[ProcessView], one: WaitsNow) -> dict[str, int]:
    """The mean time between tokens, as the thread that makes the steps was in calls and outside, by the line's key."""
    here = [view for view in views if Path(view.path).parent == one.folder]
    here.sort(key=lambda view: view.pid != one.pid)
    threads = [(view, thread) for view in here for thread in view.threads]
    own = [both for both in threads if both[1].tid in one.threads]
    chosen = next(iter(own or sorted(threads, key=lambda both: -both[1].submissions)), None)
    if chosen is None or not one.between:
        return {}
    lines = lines_of(*chosen)
    whole = max(sum(lines.values()), 1)
    return {line.key: round(one.between_ns * ns / whole) for line, ns in sorted(lines.items()) if ns}


def _requests_objects(views: list[ProcessView], requests: list[WaitsNow]) -> list[LiveRequestsJson]:
    return [one.to_json(_split(views, one)) for one in requests]


def _requests_line(one: LiveRequestsJson) -> str:
    """What a process's requests waited for, in one line."""
    from kvprobe.account import Line
    from kvprobe.reporting.account import THREAD_TITLES
    from kvprobe.reporting.units import duration, percent

    titles = {line.key: title for line, title in THREAD_TITLES.items()}
    assert set(one["lines_ns"]) <= {line.key for line in Line}
    steps = ", ".join(f"{count:,} {phase}" for phase, count in one["steps"].items())
    said = [f"process {one['pid']}: {steps} steps"]
    if one["between_p50_ns"] is not None and one["between_p99_ns"] is not None:
        whole = max(sum(one["lines_ns"].values()), 1)
        lines = sorted(one["lines_ns"].items(), key=lambda line: -line[1])
        split = ", ".join(f"{percent(ns / whole)} {titles[key]}" for key, ns in lines if ns >= 0.005 * whole)
        between = f"between tokens p50 {duration(one['between_p50_ns'])}, p99 {duration(one['between_p99_ns'])}"
        said.append(f"{between} ({split})" if split else between)
    if one["first_p50_ns"] is not None and one["first_p99_ns"] is not None:
        said.append(f"to first token p50 {duration(one['first_p50_ns'])}, p99 {duration(one['first_p99_ns'])}")
    if one["tokens"]:
        late = f"{percent(one['late_tokens'] / one['tokens'])} of {one['tokens']:,} tokens late"
        if one["worst_ns"] is not None:
            late += f", longest: request {one['worst_request']}, {duration(one['worst_ns'])}"
            late += f" in step {one['worst_step']}" if one["worst_step"] not in (None, -1) else ""
        said.append(late)
    return "; ".join(said)


def as_object(
    views: list[ProcessView], offloads: list[Benefit] | None = None, requests: list[WaitsNow] | None = None
) -> TopJson:
    """What `--json` prints; a stream has its name, and its handle as hexadecimal text."""
    processes = []
    for view in views:
        one = asdict(view)
        for told in [*one["streams"], *([one["longest"]] if one["longest"] else [])]:
            told["name"] = _title(told.pop("number"), told["stream"])
            told["stream"] = f"{told['stream']:#x}"
        del one["threads"]
        one["account"] = [_account_object(view, thread) for thread in view.threads]
        processes.append(one)
    told = [{**asdict(one), "conclusion": one.conclusion, "sentence": one.sentence} for one in offloads or ()]
    return {
        "time_ns": time.monotonic_ns(),
        "processes": cast("list[LiveProcessJson]", processes),
        "offload": cast("list[BenefitJson]", told),
        "requests": _requests_objects(views, requests or []),
    }


def render(
    views: list[ProcessView],
    note: str = "",
    nothing: str = NOTHING,
    width: int = 120,
    offloads: list[Benefit] | None = None,
    requests: list[WaitsNow] | None = None,
) -> RenderableType:
    """One table a process, for a terminal of `width` columns; `nothing` is what to say where there is none."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for view in views:
        if view.threads:
            parts.append(Text(plain(_account_line(view, view.threads[0]))))
        parts.append(_process_table(view, width) if view.streams else Text(f"{_heading(view, width)}\n  {NO_CALL}"))
        if view.longest and view.longest.age_ns > 1_000_000:
            call = view.longest
            parts.append(
                Text(
                    f"  in flight: {call.call} on {_title(call.number, call.stream)}, thread {call.tid}, "
                    f"for {time_text(call.age_ns)}"
                )
            )
    parts += [Text(plain(_requests_line(one))) for one in _requests_objects(views, requests or [])]
    parts += [Text(plain(one.sentence)) for one in offloads or ()]
    if not views:
        parts.append(Text(nothing))
    if note:
        parts.append(Text(note, style="dim"))
    return Group(*parts)


def lines_of(view: ProcessView, thread: CallTime) -> dict[Line, int]:
    """Where a thread's time went in the last interval, ns: in calls by their kind, and outside of them."""
    from kvprobe.account import Line
    from kvprobe.account.lines import line_of_kind

    out: dict[Line, int] = {}
    for (kind, pageable), ns in thread.spent_ns.items():
        line = line_of_kind(kind, pageable)
        out[line] = out.get(line, 0) + ns
    outside = int(view.interval_s * 1e9) - sum(out.values())
    out[Line.ELSEWHERE] = out.get(Line.ELSEWHERE, 0) + max(outside, 0)
    return out


def _account_object(view: ProcessView, thread: CallTime) -> dict[str, Any]:
    lines = {f"{line.key}_ns": ns for line, ns in sorted(lines_of(view, thread).items())}
    return {"thread": thread.tid, "name": thread.name, "window_ns": sum(lines.values()), **lines}


def _account_line(view: ProcessView, thread: CallTime) -> str:
    """The thread that submits most, in one line."""
    from kvprobe.reporting.account import THREAD_TITLES
    from kvprobe.reporting.units import duration, percent

    lines = lines_of(view, thread)
    total = max(sum(lines.values()), 1)
    shown = sorted((one for one in lines.items() if one[1] >= 0.0005 * total), key=lambda one: -one[1])
    said = ", ".join(f"{percent(ns / total)} {THREAD_TITLES[line]}" for line, ns in shown)
    named = f"thread {thread.tid}" + (f" ({thread.name})" if thread.name else "")
    return f"{named}, of {duration(total)}: {said}"


def _title(number: int, handle: int) -> str:
    return f"stream {number}" if number >= 0 else f"stream {handle:#x}"


IDLE = 3  # streams without a submission that are listed; more are counted
NARROW = 100  # columns of a terminal below which the table is cut to what one watches


def _process_table(view: ProcessView, width: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    narrow = width < NARROW
    title = Text(plain(_heading(view, width)))
    table = Table(title=title, title_justify="left", padding=(0, 0) if narrow else (0, 1), box=_box(narrow))
    names: tuple[str, ...] = ("stream", "subm/s", "p50", "p99", "baseline", "blocked", "outstanding", "h2d", "d2h")
    if narrow:
        names = ("stream", "subm/s", "p50 µs", "p99 µs", "blocked", "GB/s")
    names += ("queue",)
    for name in names:
        table.add_column(name, justify="left" if name in ("stream", "queue") else "right", no_wrap=narrow)
    ordered = sorted(view.streams, key=lambda stream: (-stream.blocked_share, -stream.submissions_per_s))
    idle = [one for one in ordered if not one.submissions_per_s and not one.blocked_share]
    if len(idle) > IDLE:
        ordered = [one for one in ordered if one not in idle]
        table.caption, table.caption_justify = Text(f"{len(idle)} more streams idle"), "left"
    for one in ordered:
        if narrow:
            figures = ["-" if ns is None else f"{ns / 1e3:,.1f}" for ns in (one.p50_ns, one.p99_ns)]
            table.add_row(
                _title(one.number, one.stream),
                f"{one.submissions_per_s:,.0f}",
                *figures,
                f"{one.blocked_share:.0%}",
                _gigabytes(sum(one.bytes_per_s.values())),
                "full?" if one.suspected else "",
            )
            continue
        rates = {name: f"{_gigabytes(rate)} GB/s" for name, rate in one.bytes_per_s.items()}
        table.add_row(
            _title(one.number, one.stream),
            f"{one.submissions_per_s:,.0f}",
            _us(one.p50_ns),
            _us(one.p99_ns),
            _us(one.baseline_ns),
            f"{one.blocked_share:.0%}",
            "-" if one.outstanding is None else f"<= {one.outstanding:,}",
            rates.get("h2d", "-"),
            rates.get("d2h", "-"),
            "full?" if one.suspected else "",
        )
    return table


def _heading(view: ProcessView, width: int) -> str:
    """Pid and command of a process, on one line: a program's folder says less than its arguments."""
    ended = "" if view.state == "running" else f", {view.state}"
    which = f" ({view.first_error})" if view.first_error else ""
    errors = f", {view.errors} calls failed{which}" if view.errors else ""
    program, _, arguments = view.command.partition(" ")
    command = f"{program.rpartition('/')[2]} {arguments}".strip()
    about = f" ({view.producer}{ended}{errors})"
    room = max(width - len(f"{view.pid} ") - len(about) - 1, 12)
    return f"{view.pid} {command if len(command) <= room else command[: room - 3] + '...'}{about}"


def _gigabytes(rate: float) -> str:
    """Bytes per second in GB/s; what is little keeps a digit."""
    return f"{rate / 1e9:.2f}" if rate >= 1e7 or not rate else f"{rate / 1e9:.4f}"


def _box(narrow: bool) -> Any:
    from rich import box

    return box.SIMPLE_HEAD if narrow else box.HEAVY_HEAD


def _us(ns: float | None) -> str:
    return "-" if ns is None else time_text(ns)


def _print(views: list[ProcessView], offloads: list[Benefit], requests: list[WaitsNow]) -> None:
    from rich.console import Console

    from kvprobe.commands._tables import width_limit

    console = Console()
    width = console.width = width_limit(console)
    console.print(render(views, width=width, offloads=offloads, requests=requests))


def _watch(live: Any, interval: float, told: Told) -> None:
    from rich.console import Console
    from rich.live import Live as Screen

    from kvprobe.probe.live import over

    console = Console()
    keys = console.is_terminal and sys.stdin.isatty()
    note = "q ends" if keys else "Ctrl-C ends"
    with _single_keys(keys), Screen(render([], note), console=console, auto_refresh=False, screen=keys) as screen:
        while True:
            if keys:
                if select.select([sys.stdin], [], [], interval)[0] and sys.stdin.read(1) in ("q", "Q", "\x1b", ""):
                    return
            else:
                time.sleep(interval)
            views = live.look()
            ended = live.target is not None and not views and over(live.target)
            nothing = ENDED.format(run=live.target) if ended else "" if views else _waiting(live.target) or NOTHING
            shown = render(views, note, nothing, console.width, *told.look(views))
            screen.update(shown, refresh=True)
            if not views and not console.is_terminal and nothing in (NOTHING, ENDED.format(run=live.target)):
                return
            if console.is_dumb_terminal:  # it cannot draw over what it showed, so nothing was drawn
                console.print(shown)


@contextmanager
def _single_keys(wanted: bool) -> Iterator[None]:
    """A terminal that gives keys as they are pressed, and does not print them."""
    if not wanted:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
