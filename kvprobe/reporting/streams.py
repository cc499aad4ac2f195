"""Who did it: tables and charts by stream, thread and process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvprobe.recordings.assemble import among, codes, pairs, pieces, positions
from kvprobe.recordings.model import SUBMITTING, Engine, Recording
from kvprobe.recordings.occupancy import Occupancy, StreamOccupancy, depth_series
from kvprobe.reporting import charts, series
from kvprobe.reporting.charts import Mark, Points
from kvprobe.reporting.units import NONE, duration, moved_text, percent
from kvprobe.reporting.views import Chart, TableView, left_out, numbers, table

if TYPE_CHECKING:
    from kvprobe.reporting.recorded import Submissions

__all__ = [
    "occupancy_charts",
    "process_name",
    "processes",
    "recorders_thread",
    "stream_name",
    "stream_table",
    "submitters_thread",
    "thread_names",
    "thread_table",
    "thread_title",
]

Array = npt.NDArray[Any]


def stream_name(recording: Recording, row: int) -> str:
    """A stream as it is called everywhere; streams of several processes say whose they are."""
    name = recording.stream_title(row)
    if recording.processes.rows < 2 or not 0 <= row < recording.streams.rows:
        return name
    return f"{name} of {process_name(recording, int(recording.streams['process'][row]))}"


def process_name(recording: Recording, row: int) -> str:
    """A process: its rank where it has one, else its pid."""
    processes = recording.processes
    if not 0 <= row < processes.rows:
        return "process" if row < 0 else f"process {row}"
    rank, pid = int(processes["rank"][row]), int(processes["pid"][row])
    return f"rank {rank}" if rank >= 0 else f"process {pid}"


SUBMITTER = "kvprobe-submit"  # makes the copies that the program asked for
_RECORDERS = ("kvprobe-", "[NSys", "CUPTI worker")


def thread_names(recording: Recording) -> dict[tuple[int, int], str]:
    """(row of the process, thread) -> the thread's name as it was recorded."""
    known = recording.threads
    owners = zip(known["process"].tolist(), known["thread"].tolist(), strict=True)
    return {owner: recording.text(name) for owner, name in zip(owners, known["name"].tolist(), strict=True)}


def _bare(name: str) -> str:
    """The name alone, of "thread 12 (name)"."""
    return name.partition("(")[2].removesuffix(")") if name.startswith("thread ") else name


def recorders_thread(name: str) -> bool:
    """Whether a thread of this name is the recorder's own, and none of the program's."""
    bare = _bare(name)
    return bare.startswith(_RECORDERS) and bare != SUBMITTER


def submitters_thread(name: str) -> bool:
    """Whether a thread of this name is kvprobe's submitter."""
    return _bare(name) == SUBMITTER


def thread_title(name: str) -> str:
    """A thread's name as it is shown, without its number; kvprobe's submitter is no thread of the program."""
    return name.replace(SUBMITTER, "kvprobe's submitter") if submitters_thread(name) else _bare(name)


@dataclass(frozen=True)
class _Group:
    """The submissions that share a stream, a thread or a process.

    Attributes:
        key: values of the columns it was grouped by.
        part: positions in `Submissions.rows` of the calls that were kept one by one.
        calls, bytes: of all its calls, also of those that were only counted.
        times: host time in all, median, p99, longest; nanoseconds, NaN where calls were counted and not timed.
    """

    key: tuple[int, ...]
    part: Array
    calls: int
    bytes: float
    times: tuple[float, float, float, float]


def _grouped(recording: Recording, found: Submissions, *columns: str) -> list[_Group]:
    """Submissions grouped by columns of `calls`, most host time first; by exact totals where single calls were lost."""
    calls = recording.calls
    every = len(found.rows) == calls.rows  # then nothing is copied: a recording may have millions of them
    picked = [calls[column] if every else calls[column][found.rows] for column in columns]
    kinds, place = codes(picked[0]) if len(picked) == 1 else pairs(*picked)
    del picked
    out: dict[tuple[int, ...], _Group] = {}
    for part in positions(place, len(kinds)) if len(found.rows) else []:
        durations, rows = found.dur_ns[part], part if every else found.rows[part]
        half, high, top = charts.quantiles(durations, 0.5, 0.99, 1.0)
        named = tuple(int(calls[column][rows[0]]) for column in columns)
        payload = float(calls["bytes"][rows].sum())
        out[named] = _Group(named, part, len(part), payload, (float(durations.sum()), half, high, top))
    if found.calls > len(found.rows):
        out |= _counted(recording, out, columns)
    return sorted(out.values(), key=lambda group: (math.isnan(group.times[0]), -group.times[0], -group.calls))


def _counted(
    recording: Recording, kept: Mapping[tuple[int, ...], _Group], columns: Sequence[str]
) -> dict[tuple[int, ...], _Group]:
    """The same from the recording's totals; quantiles are the middle of a histogram bucket, a quarter octave wide."""
    totals = recording.totals
    if len(recording.histograms) != totals.rows:
        return {}
    rows = np.flatnonzero(among(totals["kind"], SUBMITTING))
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in rows.tolist():
        groups.setdefault(tuple(int(totals[column][row]) for column in columns), []).append(row)
    out = {}
    for key, members in groups.items():
        counts = np.cumsum(recording.histograms[members].sum(axis=0))
        part = kept[key].part if key in kept else np.zeros(0, dtype=np.int64)
        size = float(totals["bytes"][members].sum())
        times = (math.nan,) * 4
        if counts[-1]:
            at = np.minimum(np.searchsorted(counts, np.array([0.5, 0.99]) * counts[-1]), 126)
            half, high = (float(series.bucket_floor_ns(i) + series.bucket_floor_ns(i + 1)) / 2 for i in at)
            top = float(totals["max_ns"][members].max())
            times = (float(totals["dur_ns"][members].sum()), min(half, top), min(high, top), top)
        out[key] = _Group(key, part, int(totals["calls"][members].sum()), size, times)
    return out


def _timed(times: Sequence[float], span_ns: float, threads: int = 1) -> list[Any]:
    total, *single = times
    part = total / (span_ns * max(threads, 1))
    return [(duration(total), total), (percent(part), part), *((duration(t), t) for t in single)]


def _threads(recording: Recording, found: Submissions, group: _Group) -> int:
    """How many threads made these calls: a share of time is one of theirs together."""
    calls, rows = recording.calls, found.rows[group.part]
    return max(len(pairs(calls["process"][rows], calls["thread"][rows])[0]), 1)


TIMED = ["Time in these calls", "Share of its threads' time", "Median", "p99", "Longest"]
OF_THREAD = ["Time in these calls", "Share of the thread's time", *TIMED[2:]]
SUBMISSIONS = (
    "Submissions are copies, launches, graphs and memsets. Calls that record events or wait are not counted here. "
    "Shares are of the whole recording, with start-up."
)


def stream_table(recording: Recording, found: Submissions, queues: Occupancy | None) -> tuple[TableView, str]:
    """Submissions by stream, with the device's side where the recorder saw it."""
    span_ns = max(found.span[1] - found.span[0], 1.0)
    busy: dict[int, float] = {}
    moved: dict[int, float] = {}
    executions = recording.executions
    if executions.rows:
        known = max(int(executions["stream"].max()) + 1, 0)
        spent, total = np.zeros(known), np.zeros(known)
        for piece in pieces(executions.rows):
            names = ("stream", "engine", "start_ns", "end_ns", "bytes")
            stream, engine, start, end, size = (executions[name][piece] for name in names)
            on_one, copy = np.flatnonzero(stream >= 0), np.flatnonzero((engine == Engine.COPY) & (stream >= 0))
            spent += np.bincount(stream[on_one], weights=(end - start)[on_one], minlength=known)
            total += np.bincount(stream[copy], weights=size[copy], minlength=known)
        busy, moved = dict(enumerate(spent.tolist())), dict(enumerate(total.tolist()))
    queue_of = {row: queue for queue in (queues.streams if queues else ()) for row in queue.streams}
    rows: list[list[Any]] = []
    groups = _grouped(recording, found, "stream")
    for group in groups[:200]:
        row = group.key[0]
        payload = moved.get(row) or group.bytes
        name = stream_name(recording, row) if row >= 0 else "unknown"
        queue = queue_of.get(row)
        depth = int(queue.depth.max(initial=0)) if queue else -1
        blocked = float(queue.blocked_ns.sum()) if queue else 0.0
        channel = int(recording.streams["channel"][row]) if 0 <= row < recording.streams.rows else -1
        rows.append(
            [
                name,
                (str(channel) if channel >= 0 else NONE, channel),
                (f"{group.calls:,}", group.calls),
                *_timed(group.times, span_ns, _threads(recording, found, group)),
                (f"{depth:,}" if depth >= 0 else NONE, depth),
                (duration(blocked) if queue else NONE, blocked),
                (moved_text(payload), payload),
                (percent(busy.get(row, 0) / span_ns) if busy else NONE, busy.get(row, 0) / span_ns),
            ]
        )
    lead = (
        ""
        if recording.has_executions
        else "The recorder did not record each operation of the device, so device time is not known. "
    )
    if found.calls > len(found.rows):
        lead += (
            f"Of {found.calls:,} submissions {len(found.rows):,} were kept one by one; calls, host time, longest and "
            "bytes are exact for all, medians and p99 come from histograms. Depth and blocked time are of those kept."
        )
    columns = ["Stream", "Channel", "Calls", *TIMED, "Most outstanding", "Blocked by full queue"]
    columns += ["Bytes", "Device busy"]
    return table("Submissions by stream", columns, rows, left_out(200, len(groups))), lead + SUBMISSIONS


def thread_table(recording: Recording, found: Submissions, queues: Occupancy | None) -> TableView:
    """Submissions by thread: who paid."""
    span_ns = max(found.span[1] - found.span[0], 1.0)
    names = thread_names(recording)
    rows = []
    groups = [
        group
        for group in _grouped(recording, found, "process", "thread")
        if not recorders_thread(names.get((group.key[0], group.key[1]), ""))
    ]
    for group in groups[:200]:
        row, thread = group.key
        blocked = float(queues.blocked_ns[found.rows[group.part]].sum()) if queues else 0.0
        rows.append(
            [
                process_name(recording, row),
                str(thread),
                thread_title(names.get((row, thread), "")) or NONE,
                (f"{group.calls:,}", group.calls),
                *_timed(group.times, span_ns),
                (duration(blocked) if queues else NONE, blocked),
            ]
        )
    columns = ["Process", "Thread", "Name", "Calls", *OF_THREAD, "Blocked by full queue"]
    return table("Submissions by thread", columns, rows, left_out(200, len(groups)))


BARS = 32  # processes that are drawn


def processes(
    recording: Recording, found: Submissions, queues: Occupancy | None
) -> tuple[list[Chart | None], list[TableView | None]]:
    """Processes side by side; nothing for a recording of one."""
    if recording.processes.rows < 2:
        return [], []
    table_ = recording.processes
    span_ns = max(found.span[1] - found.span[0], 1.0)
    rows: list[dict[str, Any]] = []
    listed: list[list[Any]] = []
    for group in sorted(_grouped(recording, found, "process"), key=lambda one: one.key):
        row = group.key[0]
        total, _, high, _ = group.times
        total = 0.0 if math.isnan(total) else total
        blocked = float(queues.blocked_ns[found.rows[group.part]].sum()) if queues else 0.0
        name = process_name(recording, row)
        rows.append({"label": name, "values": [blocked, total - blocked], "note": f"p99 {duration(high)}"})
        listed.append(
            [
                name,
                str(int(table_["pid"][row])),
                recording.text(int(table_["node"][row])) or NONE,
                recording.text(int(table_["state"][row])) or NONE,
                (f"{group.calls:,}", group.calls),
                *_timed(group.times, span_ns, _threads(recording, found, group)),
                (duration(blocked) if queues else NONE, blocked),
            ]
        )
    if not rows:
        return [], []
    worst = max(rows, key=lambda one: float(one["values"][0]))
    summary = (
        f"Host time inside submitting calls. Blocked longest by a full queue: {worst['label']}, "
        f"{duration(worst['values'][0])}."
        if worst["values"][0]
        else "Host time inside submitting calls"
        + ("; none was blocked by a full queue." if queues else "; how full the queues were is not known.")
    )
    columns = ["Process", "pid", "Node", "State", "Calls", *TIMED, "Blocked by full queue"]
    if len(rows) > BARS:
        least = sorted((one["values"] for one in rows), reverse=True)[BARS - 1]
        rows = [one for one in rows if one["values"] >= least][:BARS]
        summary += f" Drawn are the {BARS} of {len(listed):,} that were blocked longest or else took most."
    spec = {"kind": "bars", "unit": "ns", "parts": ["blocked by a full queue", "the rest"], "rows": rows}
    made = table("Processes", columns, listed[:1024], left_out(1024, len(listed)))
    return [Chart("ranks-chart", "Host time in submissions", summary, spec, made)], []


def occupancy_charts(
    recording: Recording, found: Submissions, queues: Occupancy | None, marks: Sequence[Mark]
) -> tuple[Chart | None, Chart | None]:
    """Outstanding submissions over time, and what a call costs by their number; None where nothing was submitted."""
    if queues is None or not queues.streams:
        return None, None
    deepest = sorted(queues.streams, key=lambda one: -int(one.depth.max(initial=0)))
    lines, words = [], []
    for one in deepest[:DRAWN]:
        times, level = _until_idle(recording, one, *depth_series(recording, one))
        lines.append(Points(_queue_name(recording, one), times, level, steps=True))
    top = deepest[0]
    count = int(top.depth.max(initial=0))
    most = f"{count:,} other{'s' if count != 1 else ''} outstanding"
    again = f"no call began with more than {most}"  # of which the rest is said in one sentence
    ends = queues.reason.removeprefix(again) if queues.reason.startswith(again) else ""
    words.append(f"Calls on {_queue_name(recording, top)} began with up to {most}{ends}.")
    if len(deepest) > DRAWN:
        rest = max(int(one.depth.max(initial=0)) for one in deepest[DRAWN:])
        more = len(deepest) - DRAWN
        words.append(
            f"{more} more streams are not drawn: they had at most {rest:,} outstanding."
            if more > 1
            else f"1 more stream is not drawn: it had at most {rest:,} outstanding."
        )
    if not queues.reason.startswith(again):
        words.append(queues.reason[:1].upper() + queues.reason[1:] + ".")
    ceilings = {one.ceiling for one in deepest[:DRAWN] if one.ceiling > 0}
    known = recording.machine.get("queue_depth")
    levels = [(float(c), f"full at {c:,}") for c in sorted(ceilings)]
    if not levels and isinstance(known, (int, float)) and known > 0:
        levels = [(float(known), f"depth {known:,.0f}")]
    chart = charts.timeline(
        ("occupancy", "Launch queue occupancy", " ".join(words)),
        lines,
        found.span,
        charts.Axis("submissions outstanding", "outstanding", "count"),
        charts.Besides(marks=marks, levels=levels),
        how=f"{_HOW[queues.how]} The chart counts the call itself as well, so it shows one more than "
        "the text, which counts only the others.",
    )
    return chart, _cliff(recording, found, queues)


DRAWN = 4  # streams drawn by themselves
_HOW = {
    "labels": "Counted from submissions and executions. The recorder labels the calls that were blocked.",
    "plateau": "Counted from submissions and executions. A queue counts as full if the number of outstanding "
    "submissions stops growing, calls that meet that many take longer, and they return when an operation ends.",
    "inferred": "Inferred from timing events, the ends of transfers or the pace of calls, because no device activity "
    "was recorded.",
}


def _until_idle(recording: Recording, queue: StreamOccupancy, times: Array, level: Array) -> tuple[Array, Array]:
    """A series that knows no end of a copy: it falls to nothing where the last transfer of its streams has ended.

    Without such transfers, what was outstanding behind the last call is not known.
    """
    rows = recording.transfers
    mine = among(rows["stream"], queue.streams)
    if len(queue.ends) or not len(times):
        return times, level
    if not mine.any() or rows["end_ns"][mine].max() < times[-1]:
        return np.append(times, times[-1] + 1), np.append(level.astype(np.float64), np.nan)
    return np.append(times, rows["end_ns"][mine].max()), np.append(level, level.dtype.type(0))


def _queue_name(recording: Recording, queue: StreamOccupancy) -> str:
    name = stream_name(recording, queue.stream)
    return name if len(queue.streams) < 2 else f"{name} and {len(queue.streams) - 1} on its channel"


_CLIFF_HOW = "Along the axis: submissions outstanding when the call was entered."


def _cliff(recording: Recording, found: Submissions, queues: Occupancy) -> Chart | None:
    """Cost of a call by how many it found outstanding: flat where the queue is healthy, a step where it is full."""
    queue = (
        queues.streams[0]
        if queues.streams[0].blocked.any()
        else max(queues.streams, key=lambda one: int(one.depth.max(initial=0)))
    )
    top = int(queue.depth.max(initial=0))
    if top < 16 or (queues.how == "inferred" and queue.ceiling < 0):
        return None  # a depth that is only bounded from above would show a flat line whatever the queue did
    calls = recording.calls
    spent = np.maximum(calls["end_ns"][queue.calls] - calls["start_ns"][queue.calls], 0)
    width = max(1, -(-(top + 1) // 180))
    bins = queue.depth // width
    keys, place = codes(bins)
    parts = [np.sort(spent[rows]) for rows in positions(place, len(keys))]
    count = np.array([len(part) for part in parts])
    half = np.array([part[(len(part) - 1) // 2] for part in parts])
    high = np.array([part[-1] for part in parts])
    depth = keys * width + (width - 1) / 2
    shallow_ns = charts.quantiles(spent[bins < keys[-1] * 0.5], 0.5)[0]
    if queue.blocked.any():
        deep_ns = charts.quantiles(spent[queue.blocked], 0.5)[0]
        low, high_ = queue.plateau
        at = f"{low:,}" if low == high_ else f"{low:,} to {high_:,}"
        where = f"The {int(queue.blocked.sum()):,} blocked calls"
        where += f", with {at} outstanding, take" if low >= 0 else " take"
    else:
        deep_ns, where = (
            charts.quantiles(spent[bins >= keys[-1] * 0.95], 0.5)[0],
            "With the most outstanding, a call takes",
        )
    name = _queue_name(recording, queue)
    summary = (
        f"{name}: with at most half as many submissions outstanding as the most, a call takes {duration(shallow_ns)} "
        f"(median). {where} {duration(deep_ns)} (median). A step means a full queue; a flat line means a healthy one."
    )
    ceiling = [(float(queue.ceiling), f"full at {queue.ceiling:,}")] if queue.ceiling > 0 else []
    spec = {
        "kind": "timeline",
        "height": 240,
        "x": {"unit": "count", "span": top + 1, "label": "submissions outstanding"},
        "y": {"unit": "ns", "scale": "log", "label": "host time of one call, log scale", "short": "call took, log"},
        "series": [
            {"name": "median", "style": 0, "t": numbers(depth), "v": numbers(half), "line": True},
            {"name": "longest", "style": 1, "t": numbers(depth), "v": numbers(high)},
        ],
        "marks": [{"t": value, "label": label} for value, label in ceiling],
    }
    rows = [
        [(f"{int(key * width):,}", float(key)), (f"{int(n):,}", n), (duration(a), a), (duration(b), b)]
        for key, n, a, b in zip(keys, count, half, high, strict=True)
    ]
    listed = table("Cost by outstanding submissions", ["Outstanding, from", "Calls", "Median", "Longest"], rows)
    return Chart(
        "cliff", "What a call costs, by the number of outstanding submissions", summary, spec, listed, _CLIFF_HOW
    )
