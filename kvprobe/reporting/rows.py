"""GPUs, threads and streams on one time axis: calls above, executions below, fences and waits drawn between them.

However many calls there are, the page gets a row of digits a thread and stream (how busy each slice of time was) and
the calls worth looking at one by one: the longest, and those that findings name with what lies around them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvprobe.recordings.assemble import among, codes, pairs, positions
from kvprobe.recordings.intervals import distinct, in_time
from kvprobe.recordings.model import SUBMITTING, CallKind, Engine, Recording, Table
from kvprobe.reporting import streams
from kvprobe.reporting.lanes import MEMORY, STYLES, WAIT, WORK, Lane, copy_text, engine_styles, gpu_lanes, range_lanes
from kvprobe.reporting.units import count_text, duration, percent, size_text
from kvprobe.reporting.views import Chart, table
from kvprobe.reporting.waits import waited_for

if TYPE_CHECKING:
    from kvprobe.account import Account
    from kvprobe.diagnosis.finding import Finding
    from kvprobe.reporting.recorded import Submissions

__all__ = ["rows_chart"]

Array = npt.NDArray[Any]

SLICES = 16384  # of the whole time: a zoom of a hundred times still finds ten to a pixel's neighbourhood
MOST_ROWS = 12  # threads, and streams; the busiest
LONGEST = 4000  # calls, and half as many executions, that are kept one by one
EACH = 150  # of them at least for each row
AROUND = 150  # calls before and behind each that a finding names
NAMED = 24  # calls of findings whose neighbourhood is kept
FENCES = 1500
WAITS = 1500  # of which the page knows what they waited for; the longest


@dataclass(frozen=True)
class _Row:
    """A thread, a stream, a GPU or a thread's ranges: what it did, ascending by start."""

    label: str
    times: tuple[Array, Array]  # starts and ends of all `calls` or `executions`; there may be millions, so no copy
    style: Array  # of what it did, an index into `lanes.STYLES`
    rows: Array  # the same, in `times`; of a lane of its own, in `text` as well
    thread: bool
    text: Callable[[int], str] | None = None  # what each is called, of a lane of its own
    own: bool = False  # of kvprobe, not of the program

    @property
    def start(self) -> Array:
        """Of what it did, ns; not kept."""
        begins: Array = self.times[0][self.rows]
        return begins

    @property
    def end(self) -> Array:
        """As `start`."""
        ends: Array = self.times[1][self.rows]
        return ends

    @property
    def wait(self) -> Array:
        """Bool: it waits, allocates or frees."""
        waits: Array = (self.style == WAIT) | (self.style == MEMORY)
        return waits


def rows_chart(
    recording: Recording, found: Submissions, findings: Sequence[Finding], account: Account | None = None
) -> Chart | None:
    """The chart; None where no call was kept. `account` gives the GPUs their lanes."""
    if not recording.calls.rows:
        return None
    start, end = found.span
    span = max(end - start, 1.0)
    threads, more_threads = _threads(recording, findings)
    streams, more_streams = _streams(recording)
    gpus = [_lane(lane) for lane in gpu_lanes(account)]
    ranges = [_lane(lane) for lane in range_lanes(recording)]
    shown = [*gpus, *ranges, *threads, *streams]
    edges = np.linspace(start, end, SLICES + 1)
    names: dict[str, int] = {}
    items, stacks, waits = _items(recording, shown, findings, start, names)
    drawn = sorted({style for row in shown for style in distinct(row.style).tolist()})
    spec = {
        "kind": "rows",
        "group": "time",
        "x": {"unit": "ns", "span": span},
        "slices": SLICES,
        "rows": [
            {
                "label": row.label,
                "thread": row.thread,
                "lane": row.text is not None,
                "layers": _busy(row, edges),
            }
            for row in shown
        ],
        "styles": [[style, STYLES[style]] for style in drawn],
        "waits": waits,
        "names": list(names),
        "items": items,
        "stacks": stacks,
        "fences": _fences(recording, shown, findings, start),
    }
    more = [
        _many(count, what) for count, what in ((more_threads, "more thread"), (more_streams, "more stream")) if count
    ]
    words = _many(len(threads), "thread")
    words += f" and {_many(len(streams), 'stream')}" if streams else "; what streams executed was not recorded"
    words += f"; {' and '.join(more)} not shown" if more else ""
    listed = [_listed(row, found.span) for row in shown[len(gpus) :]]
    of_program = [not row.own for row in (*threads, *streams)]
    program = [one for one, own in zip(listed[len(ranges) :], of_program, strict=True) if own] or listed
    busiest, _, work, share, *_ = max(program, key=lambda row: float(row[2][1]))
    columns = ["Row", "Calls or executions", "Busy", "Share of the recording", "Waits and allocations", "Longest"]
    kept = count_text(len(items["t"]))
    spans = (
        f"The page keeps {kept} calls and executions one by one: the longest, and those around the findings."
        if any(one.calls for one in findings)
        else f"The page keeps the {kept} longest calls and executions one by one."
    )
    return Chart(
        "rows",
        "Threads and streams",
        f"{words}. Busiest: {busiest}, for {work[0]}, {share[0]} of the recording.",
        spec,
        table("Threads and streams", columns, listed, _LISTED),
        "Zoom in to see single calls. Until then, each bar stands for a stretch of time, and its height shows how "
        f"busy the thread or stream was in the busiest part of it. {spans} Click one to see its stack. A line connects "
        "a stream's wait with the work that it waits for. An arrow ends where a blocked call returned. It begins at "
        "the last operation that ended before this return. The address in the browser contains the zoom and the call "
        "that you clicked: copy it to come back to them. To get all calls, use kvprobe export.",
    )


_LISTED = "A thread is busy in calls that submit, record events or do other work; a stream while it executes."


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _lane(lane: Lane) -> _Row:
    return _Row(lane.label, (lane.start, lane.end), lane.style, np.arange(len(lane.start)), False, lane.text)


def _busy(row: _Row, edges: Array) -> dict[int, str]:
    """How busy each slice was, by style."""
    start, end = row.times
    out = {}
    styles = distinct(row.style).tolist()
    for style in styles:
        mine = row.rows if len(styles) == 1 else row.rows[row.style == style]
        out[style] = _short(_digits(start[mine], end[mine], edges))
    return out


def _short(digits: str) -> str:
    """Runs of a digit as "0x120,": most of a thread's time is alike."""
    return re.sub(r"(\d)\1{5,}", lambda run: f"{run[1]}x{len(run[0])},", digits)


def _covered(start: Array, end: Array) -> float:
    """Time in which at least one was under way: calls nest, and transfers of a stream overlap."""
    if not len(start):
        return 0.0
    own = np.empty_like(end)  # in place: there may be millions
    own[0] = start[0]
    np.maximum.accumulate(end[:-1], out=own[1:])
    np.maximum(start, own, out=own)
    np.subtract(end, own, out=own)
    return float(np.maximum(own, 0, out=own).sum())


def _listed(row: _Row, whole: tuple[float, float]) -> list[Any]:
    """A row of the table; what lies outside of the recording's calls and executions, as the rest of a range, is cut."""
    start, end = row.start, row.end
    if len(start) and (start.min() < whole[0] or end.max() > whole[1]):
        start, end = np.clip(start, *whole), np.clip(end, *whole)
    spent, span = end - start, max(whole[1] - whole[0], 1.0)
    waits = row.wait
    work, wait = _covered(start, end), 0.0
    if waits.any():
        work, wait = (_covered(start[mask], end[mask]) for mask in (~waits, waits))
    return [
        row.label,
        (count_text(len(spent)), len(spent)),
        (duration(work), work),
        (percent(work / span), work / span),
        (duration(wait), wait),
        (duration(float(spent.max(initial=0))), float(spent.max(initial=0))),
    ]


def _busiest(
    parts: list[Array], start: Array, end: Array, wanted: Callable[[Array], bool] = lambda _: False
) -> tuple[list[Array], int]:
    """The parts that are wanted, then those with most time in them; how many were left out."""
    parts.sort(key=lambda part: (not wanted(part), -float((end[part] - start[part]).sum())))
    return parts[:MOST_ROWS], max(len(parts) - MOST_ROWS, 0)


_WORK = (*SUBMITTING, CallKind.OTHER, CallKind.EVENT)
_MEMORY = (CallKind.CREATE, CallKind.ALLOC, CallKind.FREE)


def _threads(recording: Recording, findings: Sequence[Finding]) -> tuple[list[_Row], int]:
    """Threads whose calls findings name come before busier ones: links lead to those calls."""
    calls = recording.calls
    owners, place = pairs(calls["process"], calls["thread"])
    named = streams.thread_names(recording)
    everybody = [part.astype(np.int32) for part in positions(place, len(owners))]
    program = [part for part in everybody if not streams.recorders_thread(named.get(_owner(calls, part), ""))]
    told = set(place[[call.row for finding in findings for call in finding.calls]].tolist())
    parts, more = _busiest(
        program or everybody, calls["start_ns"], calls["end_ns"], lambda part: int(place[part[0]]) in told
    )
    several = recording.processes.rows > 1
    times = calls["start_ns"], calls["end_ns"]
    out = []
    for part in parts:
        process, thread = _owner(calls, part)
        name = streams.thread_title(named.get((process, thread), ""))
        label = name if name.startswith("thread ") else f"thread {thread}" + (f" ({name})" if name else "")
        label += f" of {streams.process_name(recording, process)}" if several else ""
        style = np.where(among(calls["kind"][part], _WORK), WORK, WAIT).astype(np.uint8)
        style[among(calls["kind"][part], _MEMORY)] = MEMORY
        own = streams.submitters_thread(named.get((process, thread), ""))
        out.append(_Row(label, times, style, part, True, own=own))
    return out, more


def _owner(calls: Table, part: Array) -> tuple[int, int]:
    return int(calls["process"][part[0]]), int(calls["thread"][part[0]])


def _ran(recording: Recording) -> Table:
    """What the device did, as closely as it was recorded: operations, else runs of them, else transfers."""
    wanted = (recording.executions, recording.spans, recording.transfers)
    return next((one for one in wanted if one.rows), recording.transfers)


def _streams(recording: Recording) -> tuple[list[_Row], int]:
    """What each stream executed; where the device was not recorded, the transfers on it."""
    ran = _ran(recording)
    start, end, stream = ran["start_ns"], ran["end_ns"], ran["stream"]
    copies = np.broadcast_to(np.uint8(Engine.COPY), (ran.rows,))
    style = engine_styles(ran.get("engine", copies), ran["direction"])
    if ran.kind == "transfers":  # what a transfer did on the device; before it, it stood in a queue
        end = end - np.maximum(ran["poll_ns"], 0)
        start = np.maximum(end - np.maximum(ran["copy_ns"], 0), start)
    values, place = codes(stream)
    known = [part for value, part in zip(values.tolist(), positions(place, len(values)), strict=True) if value >= 0]
    parts, more = _busiest(known, start, end)
    out = []
    for part in parts:
        part = in_time(part.astype(np.int32), start)
        label = streams.stream_name(recording, int(stream[part[0]]))
        out.append(_Row(label, (start, end), style[part], part, False))
    return out, more


def _digits(start: Array, end: Array, edges: Array) -> str:
    """How busy each slice was, 0 to 9, as text; anything at all is at least 1."""
    if not len(start):
        return "0"
    until = np.zeros(len(start) + 1, dtype=np.int64)
    np.cumsum(np.maximum(end - start, 0), out=until[1:])
    reach = np.maximum.accumulate(end)
    begun = np.searchsorted(start, edges, side="left")  # those that began before each edge
    last = np.maximum(begun - 1, 0)
    spent = until[begun] - np.where(begun > 0, np.clip(reach[last] - edges, 0, end[last] - start[last]), 0)
    busy = np.clip(np.diff(spent) / max(edges[1] - edges[0], 1), 0, 1)
    level = np.ceil(busy * 9).astype(np.uint8)
    some = np.diff(begun) > 0  # something begins in the slice; what begins outside counts for the slice beside it
    some[0] |= begun[0] > 0
    some[-1] |= begun[-1] < len(start)
    level[some] = np.maximum(level[some], 1)
    return bytes(level + ord("0")).decode()


def _items(
    recording: Recording, shown: Sequence[_Row], findings: Sequence[Finding], origin: float, names: dict[str, int]
) -> tuple[dict[str, list[Any]], list[str], list[list[int]]]:
    """Calls and executions that are kept one by one, as columns; `s` is the position of a stack, or -1.

    The last are pairs of positions: a call that waited, and the operation of the device that it waited for.
    """
    named = [call for finding in findings for call in finding.calls]
    depth = {call.row: call.depth for call in named}
    lost = {call.row: call.lost_ns for call in named}
    told = np.array(sorted(depth), dtype=np.int64)
    calls, executions = recording.calls, recording.executions
    stacks: dict[str, int] = {}
    of_call = {call.row: "\n".join(call.stack) for call in named if call.stack}
    columns: dict[str, list[Any]] = {name: [] for name in ("row", "t", "d", "n", "w", "id", "on", "depth", "lost", "s")}
    kept_calls: list[Array] = []
    many = max(sum(row.text is None for row in shown), 1)
    waiting, ends = _waits(recording, shown, told)
    at_call: dict[int, int] = {}
    at_execution: dict[int, int] = {}
    for number, row in enumerate(shown):
        spent = row.end - row.start
        budget = EACH if row.text is not None else max((LONGEST if row.thread else LONGEST // 2) // many, EACH)
        part = np.argpartition(spent, -budget)[-budget:] if len(spent) > budget else np.arange(len(spent))
        if row.text is not None:
            pass
        elif row.thread:
            mine = np.searchsorted(row.rows, told)
            mine = mine[(mine < len(row.rows)) & (row.rows[np.minimum(mine, len(row.rows) - 1)] == told)]
            near = (mine[:NAMED, None] + np.arange(-AROUND, AROUND + 1)).ravel()
            part = np.union1d(part, np.concatenate((mine, near[(near >= 0) & (near < len(row.rows))])))
            kept_calls.append(row.rows[part])
        elif executions.rows and kept_calls:
            asked = calls["correlation"][np.concatenate(kept_calls)]
            part = np.union1d(part, np.flatnonzero(np.isin(executions["correlation"][row.rows], asked[asked >= 0])))
        if row.text is None and len(ends):
            part = np.union1d(part, np.flatnonzero(np.isin(row.rows, waiting if row.thread else ends)))
        part = part[np.argsort(row.times[0][row.rows[part]], kind="stable")]
        where = row.rows[part]
        if row.text is None:
            (at_call if row.thread else at_execution).update(
                zip(where.tolist(), range(len(columns["t"]), len(columns["t"]) + len(part)), strict=True)
            )
        columns["row"] += [number] * len(part)
        columns["t"] += np.round(row.times[0][where] - origin).astype(np.int64).tolist()
        columns["d"] += spent[part].tolist()
        columns["w"] += row.style[part].tolist()
        columns["n"] += [names.setdefault(text, len(names)) for text in _texts(recording, row, where)]
        columns["id"] += where.tolist() if row.thread else [-1] * len(part)
        columns["on"] += _partner(recording, shown, row, where)
        columns["depth"] += [depth.get(one, -1) if row.thread else -1 for one in where.tolist()]
        columns["lost"] += [lost.get(one, 0) if row.thread else 0 for one in where.tolist()]
        seen = _stacks(recording, row, part) if row.thread else {}
        for position, one in zip(part.tolist(), where.tolist(), strict=True):
            text = (of_call.get(one) or seen.get(position, "")) if row.thread else ""
            columns["s"].append(stacks.setdefault(text, len(stacks)) if text else -1)
    waits = [
        [at_call[call], at_execution[one]]
        for call, one in zip(waiting.tolist(), ends.tolist(), strict=True)
        if call in at_call and one in at_execution
    ]
    return columns, list(stacks), waits


def _waits(recording: Recording, shown: Sequence[_Row], told: Array) -> tuple[Array, Array]:
    """Rows of the longest calls that waited, or that findings name, and of the executions they waited for."""
    calls = recording.calls
    rows = np.unique(np.concatenate([told, *(row.rows[row.wait] for row in shown if row.thread)])).astype(np.int64)
    if not recording.executions.rows or not len(rows):
        return rows[:0], rows[:0]
    spent = calls["end_ns"][rows] - calls["start_ns"][rows]
    rows = rows[np.argsort(-spent, kind="stable")[:WAITS]]
    ends = waited_for(recording, rows)
    return rows[ends >= 0], ends[ends >= 0]


def _texts(recording: Recording, row: _Row, where: Array) -> list[str]:
    if row.text is not None:
        return [row.text(one) for one in where.tolist()]
    if row.thread:
        return [recording.text(one) or "call" for one in recording.calls["name"][where].tolist()]
    ran = _ran(recording)
    if ran.kind == "transfers":
        counts = zip(ran["direction"][where].tolist(), ran["count"][where].tolist(), strict=True)
        return [f"{copy_text(direction)}, a transfer of {count} copies" for direction, count in counts]
    said = []
    names = ran["name"][where] if "name" in ran else np.zeros(len(where), dtype=np.int32)
    columns = (names, *(ran[column][where] for column in ("engine", "direction", "bytes", "count")))
    for name, engine, direction, size, count in zip(*(column.tolist() for column in columns), strict=True):
        if engine == Engine.COPY:
            text = copy_text(direction) + (f", {size_text(size)}" if size > 0 else "")
        else:
            text = recording.text(name) or Engine(engine).name.lower()
        said.append(f"{text} in {count:,} submissions" if ran.kind == "spans" and count > 1 else text)
    return said


def _partner(recording: Recording, shown: Sequence[_Row], row: _Row, where: Array) -> list[int]:
    """The row of the stream that a call goes to; -1: none that is shown."""
    if not row.thread:
        return [-1] * len(where)
    of = _places(recording, shown)
    return [of.get(stream, -1) for stream in recording.calls["stream"][where].tolist()]


def _stacks(recording: Recording, row: _Row, part: Array) -> dict[int, str]:
    """Position -> the stack that was taken while that call was blocked."""
    table_ = recording.stacks
    if not table_.rows:
        return {}
    calls = recording.calls
    process, thread = calls["process"][row.rows[0]], calls["thread"][row.rows[0]]
    mine = np.flatnonzero((table_["process"] == process) & (table_["thread"] == thread))
    at = np.searchsorted(row.start, table_["time_ns"][mine], side="right") - 1
    wanted, end = set(part.tolist()), row.end
    return {
        position: recording.text(int(table_["stack"][one]))
        for one, position in zip(mine.tolist(), at.tolist(), strict=True)
        if position in wanted and table_["time_ns"][one] <= end[position]
    }


def _fences(
    recording: Recording, shown: Sequence[_Row], findings: Sequence[Finding], origin: float
) -> list[list[float]]:
    """[when, stream that waits, stream it waits for], as positions among the rows that are shown."""
    calls = recording.calls
    recorded = np.array(["eventrecord" in name.lower() for name in recording.names], dtype=bool)
    waited = np.array(["streamwaitevent" in name.lower() for name in recording.names], dtype=bool)
    if not waited.any() or not recorded.any():
        return []
    asks = np.flatnonzero(waited[calls["name"]] & (calls["stream"] >= 0) & (calls["src"] > 0))
    if len(asks) > FENCES:
        times = [one.start_ns for finding in findings for one in finding.calls[:4]]
        gap = np.full(len(asks), np.inf)
        for time in times[:NAMED]:
            gap = np.minimum(gap, np.abs(calls["start_ns"][asks] - time))
        asks = np.sort(asks[np.argsort(gap, kind="stable")[:FENCES]])
    marks = np.flatnonzero(recorded[calls["name"]] & (calls["stream"] >= 0) & (calls["src"] > 0))
    marks = marks[np.isin(calls["src"][marks], calls["src"][asks])]
    if not len(marks):
        return []
    both = np.concatenate((asks, marks))
    _, event = pairs(calls["process"][both], calls["src"][both])  # a handle is another event in another process
    many = np.int64(calls.rows)
    asked, made = np.split(event.astype(np.int64) * many + both, [len(asks)])
    made = np.sort(made)  # by event, then by row
    before = np.searchsorted(made, asked) - 1
    fits = (before >= 0) & (made[np.maximum(before, 0)] // many == asked // many)
    place = _places(recording, shown)
    out: list[list[float]] = []
    for one, mark in zip(asks[fits].tolist(), (made[before[fits]] % many).tolist(), strict=True):
        to, of = place.get(int(calls["stream"][one]), -1), place.get(int(calls["stream"][mark]), -1)
        if to >= 0 and of >= 0 and to != of:
            out.append([float(calls["start_ns"][one] - origin), to, of])
    return out


def _places(recording: Recording, shown: Sequence[_Row]) -> dict[int, int]:
    """Row of `streams` -> position of its row in the chart."""
    named = {one.label: number for number, one in enumerate(shown) if not one.thread}
    titles = {stream: streams.stream_name(recording, stream) for stream in range(recording.streams.rows)}
    return {stream: named[title] for stream, title in titles.items() if title in named}
