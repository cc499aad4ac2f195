"""What timing events in a program's streams told `kvprobe run` of the device: spans, and where they are complete."""

from __future__ import annotations

import numpy as np

from kvprobe.probe.ring import COVERAGE, GRAPH, SPAN
from kvprobe.recordings.assemble import among, sorted_table
from kvprobe.recordings.intervals import Cover, union
from kvprobe.recordings.mixed_runs import (
    KERNEL,
    LONGEST,
    PACE,
    PACE_NS,
    SHORTEST,
    Runs,
    divide,
    is_late,
    quantile,
    runs_of,
)
from kvprobe.recordings.model import Array, CallKind, Direction, Engine, Recording, Table
from kvprobe.recordings.run_events import RingRecords, known_codes
from kvprobe.recordings.vocabulary import Names

__all__ = ["PAUSED", "bytes_of_copies", "marks"]

# enum mark_kind of marks.h -> what runs; 0: several things, which cannot be told apart
ENGINES = np.array(
    [
        Engine.OTHER,
        Engine.KERNEL,
        Engine.COPY,
        Engine.COPY,
        Engine.COPY,
        Engine.MEMSET,
        Engine.OTHER,  # a graph in one piece: what it holds is not known
        Engine.WAIT,
        Engine.FUNCTION,
    ],
    dtype=np.uint8,
)
OF_A_GRAPH, WAITS = 6, (7, 8)  # from here on nothing of the stream runs
# enum mark_reason: why spans are not complete
REASONS = (
    "",
    "the budget of marks was spent",
    "a graph was being captured",
    "the process or its context ended",
    "a call for a mark failed",
    "when a run ended could not be seen",
    "too many marks or streams at once",
    "work was submitted that no timing event followed",
    "several kinds of work that could not be told apart",
)
PAUSED = 2  # of `stopped`: a pause that ends when enough is saved up, whatever the program does then
STOPPED = np.array([0, PAUSED, 1, 1, 1, 0, 1, 0, 0], dtype=np.uint8)  # by reason: nothing was marked meanwhile
MOST_PIECES = 256
MOST_ROWS = 400_000
# Between two of a run the device does nothing for so long: seen by CUPTI on an H200, of 3,800 kernels and 8,500 copies.
GAPS_NS = np.array([0, 1_000, 1_300, 1_300, 1_300, 1_000, 0, 0, 0], dtype=np.int64)
# A mark is reached so long after what stands in front of it: 2,000 copies with a wait each, on the same device.
MARK_NS = 2_300
UNSEEN = 5
SAMPLED = 8  # launches in a run of which one is looked at by itself
FEWEST = 4  # copies one by one that tell how long one of theirs takes
LEAST = 0.02  # of a span without work that makes it worth while to cut the span


def marks(recording: Recording, told: RingRecords, names: Names) -> None:
    """Fills `spans`, `coverage` and `graphs`.

    Args:
        recording: the one to fill, which has its calls.
        told: records of the calls SPAN, COVERAGE and GRAPH; kvp.h says what their words hold.
        names: where reasons go.
    """
    records, process = told.records, told.process
    start = records["start_ns"].astype(np.int64) + told.shift
    end = start + records["dur_ns"].astype(np.int64)
    device = records["transfer"].astype(np.int32)
    is_span = records["call"] == SPAN
    part = is_span & (records["dst"] == 0)
    is_span &= ~part
    mixed = is_span & (records["result"] == 0) & (end > start)
    spans = np.flatnonzero(is_span & ~mixed & (end > start))
    seen = records[spans].copy()
    seen["bytes"] = bytes_of_copies(recording, seen, process[spans], told.stream[spans])
    alone = _alone(seen, process[spans])
    columns = _spans(seen, start[spans], process[spans], device[spans], told.stream[spans], alone)
    if part.any():
        rows, more = _mixed(told, start, (np.flatnonzero(mixed), np.flatnonzero(part)), (spans, seen))
        mixed[rows] = False
        columns = {name: np.concatenate((column, more[name])) for name, column in columns.items()}
    recording.tables["spans"] = sorted_table("spans", columns)
    end = _ended(records, start, end, process, spans, alone)
    says = np.flatnonzero(((records["call"] == COVERAGE) | mixed) & (end > start))
    recording.tables["coverage"] = _coverage(
        start[says],
        end[says],
        process[says],
        device[says],
        np.where(mixed[says], len(REASONS) - 1, np.minimum(records["result"][says], len(REASONS) - 1)),
        names,
    )
    recording.tables["marks"] = _queue_marks(
        records[is_span & (end > start)],
        start[is_span & (end > start)],
        process[is_span & (end > start)],
        told.stream[is_span & (end > start)],
    )
    _graphs(recording, records[records["call"] == GRAPH], process[records["call"] == GRAPH])


def _mixed(
    told: RingRecords, start: Array, several: tuple[Array, Array], single: tuple[Array, Array]
) -> tuple[Array, dict[str, Array]]:
    """Which records of runs of several kinds are told by their parts, and the columns of `spans` for them.

    Args:
        told: all records.
        start: of each, ns.
        several: the numbers of those of runs of several kinds, and of their parts.
        single: the numbers of those of runs of one kind, and the records with their bytes as `bytes_of_copies` says.
    """
    records, process, stream = told.records, told.process, told.stream
    runs, parts = several
    of_all = records[np.concatenate((single[0], parts))].copy()
    of_all["tid"][len(single[0]) :] = np.iinfo(np.uint32).max  # none of them stood alone
    alone = _alone(of_all, process[np.concatenate((single[0], parts))])[len(single[0]) :]
    rows = np.concatenate((runs, parts))
    mixed, of = runs_of(records[runs], records[parts], start[rows], (process[rows], stream[rows]), alone, MARK_NS)
    late = is_late(single[1])
    seen, rows = single[1][late], single[0][late]
    length = np.maximum(seen["dur_ns"].astype(np.int64) - MARK_NS, 1)
    count = np.maximum(seen["count"].astype(np.int64), 1)
    size = seen["bytes"].astype(np.int64)
    ones = Runs(length, MARK_NS, process[rows], stream[rows], seen["result"], count, size)
    most = max(1, min(MOST_PIECES, MOST_ROWS // max(1, len(runs))))
    known, columns = divide(mixed, ones, most)
    return runs[of[known]], columns


def bytes_of_copies(recording: Recording, records: Array, process: Array, stream: Array) -> Array:
    """Bytes of each span without those of memsets: no copy has more than the largest call of its stream; (spans,).

    Memsets are too short to be told apart, and recordings made until now count their bytes with those of the copies
    beside them. Where calls were lost, the largest is not known.
    """
    calls, size = recording.calls, records["bytes"].astype(np.int64)
    direction = known_codes(records["direction"] & 15, Direction)
    copies = ENGINES[np.minimum(records["result"], len(ENGINES) - 1)] == Engine.COPY
    rows = np.flatnonzero(copies & np.isin(direction, (Direction.H2D, Direction.D2H)))
    rows = rows[~np.isin(process[rows], [one for one, many in recording.lost.items() if many])]
    made = np.flatnonzero(among(calls["kind"], (CallKind.COPY, CallKind.COPY_SYNC, CallKind.BATCH)))
    if not len(rows) or not len(made):
        return size
    spans = process[rows], stream[rows], direction[rows]
    called = calls["process"][made], calls["stream"][made], calls["direction"][made]
    keys = np.concatenate([np.stack(one, axis=1).astype(np.int64) for one in (spans, called)])
    where, which = np.unique(keys, axis=0, return_inverse=True)
    which, largest = which.ravel(), np.full(len(where), -1, dtype=np.int64)
    np.maximum.at(largest, which[len(rows) :], calls["bytes"][made])
    most = largest[which[: len(rows)]] * np.maximum(records["count"][rows].astype(np.int64), 1)
    size[rows] = np.where(most >= 0, np.minimum(size[rows], most), size[rows])
    return size


def _queue_marks(records: Array, start: Array, process: Array, stream: Array) -> Table:
    """One row a mark that told how many slots its stream had been given; those of graphs do not."""
    kept = np.flatnonzero((records["tid"] > 0) & (records["result"] != OF_A_GRAPH))
    done = start + records["dur_ns"].astype(np.int64)
    return sorted_table(
        "marks",
        {
            "given_ns": (done - records["tid"].astype(np.int64) + 1)[kept],
            "begun_ns": start[kept],
            "done_ns": done[kept],
            "process": process[kept],
            "stream": stream[kept],
            "slots": records["src"].astype(np.int64)[kept],
            "count": records["count"].astype(np.int64)[kept],
        },
    )


def _alone(records: Array, process: Array) -> Array:
    """How long a copy of each span would take by itself, by those that were seen one by one, ns (spans,); -1: unknown.

    It is told by those of the same direction and size, or else of the next larger one.
    """
    out = np.full(len(records), -1, dtype=np.int64)
    kind, count = records["result"], np.maximum(records["count"].astype(np.int64), 1)
    each = records["bytes"].astype(np.int64) // count
    lone = (count == 1) & (records["tid"] <= PACE_NS)
    copies = among(ENGINES[np.minimum(kind, len(ENGINES) - 1)], (Engine.COPY, Engine.MEMSET))
    for owner, one in np.unique(np.stack((process[copies], kind[copies])), axis=1).T.tolist():
        mine = np.flatnonzero((process == owner) & (kind == one))
        size, which, many = np.unique(each[mine[lone[mine]]], return_inverse=True, return_counts=True)
        length = records["dur_ns"][mine[lone[mine]]].astype(np.int64)
        took = [np.quantile(length[which == k], 0.25) for k in np.flatnonzero(many >= FEWEST)]  # some marks are late
        size = size[many >= FEWEST]
        at = np.searchsorted(size, each[mine])
        known = at < len(size)
        out[mine[known]] = np.array(took)[at[known]]
    return out


def _ended(records: Array, start: Array, end: Array, process: Array, spans: Array, alone: Array) -> Array:
    """Ends of records; where a run's end was not seen, what is missing ends when the run was over at the latest.

    Behind a wait nothing of its stream runs. Copies are over when all of them could have been done one by one.
    """
    out: Array = end.copy()
    count = np.maximum(records["count"].astype(np.int64), 1)
    each = np.full(len(records), -1, dtype=np.int64)
    each[spans] = np.where(np.isin(records["result"][spans], WAITS), 0, alone)
    holes = np.flatnonzero((records["call"] == COVERAGE) & (records["result"] == UNSEEN))
    order = spans[np.argsort(end[spans], kind="stable")]
    first = np.searchsorted(end[order], start[holes], "left")
    last = np.searchsorted(end[order], start[holes], "right")
    told = last - first == 1
    holes, run = holes[told], order[first[told]]
    known = (each[run] >= 0) & (process[run] == process[holes])
    holes, run = holes[known], run[known]
    over = np.maximum(start[run] + count[run] * each[run], start[holes] + each[run])
    over[each[run] == 0] = start[holes[each[run] == 0]]
    out[holes] = np.minimum(end[holes], over)
    return out


def _spans(
    records: Array, start: Array, process: Array, device: Array, stream: Array, alone: Array
) -> dict[str, Array]:
    """Columns, a row a span; where the device was ahead of the host, its submissions are spread over the span.

    A run of copies in a stream that keeps pace has been busy for no longer than its copies take one by one (`alone`);
    nor has one that takes as little as a mark may be late.
    """
    length = records["dur_ns"].astype(np.int64)
    count = np.maximum(records["count"].astype(np.int64), 1)
    kind = np.minimum(records["result"], len(ENGINES) - 1)
    between = np.minimum((count - 1) * GAPS_NS[kind], length // 2)
    busy = np.minimum(records["dst"].astype(np.int64), length - between)
    paced = np.where(count > 1, records["tid"] <= PACE_NS + PACE * length, alone <= PACE_NS)
    busy = np.where(paced & (alone > 0), np.minimum(busy, count * alone), busy)
    waits = np.isin(kind, WAITS)
    fed = busy < length - between  # by the host, one by one: each was as long as the one that a mark followed
    late = np.where(fed, MARK_NS * count, MARK_NS)
    busy = np.where(waits, length, np.maximum(busy - np.minimum(late, busy * 2 // 3), 1))
    computed, wrong = _launched_one_by_one(records, process, stream, length - between)
    busy = np.minimum(busy, computed)
    wrong = np.minimum(wrong, np.where(busy < length - between, busy, 0))
    most = max(1, min(MOST_PIECES, MOST_ROWS // max(1, len(records))))
    pieces = np.where(busy < (1 - LEAST) * length, np.minimum(count, most), 1)
    row = np.repeat(np.arange(len(records)), pieces)
    number = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    of = pieces[row]
    begins = start[row] + length[row] * number // of
    graph = np.where(kind == OF_A_GRAPH, records["src"].astype(np.int64), -1)

    def share(total: Array) -> Array:
        """Whole parts that add up to the total."""
        part: Array = total[row] * (number + 1) // of - total[row] * number // of
        return part

    return {
        "start_ns": begins,
        "end_ns": begins + np.maximum(busy[row] // of, 1),
        "process": process[row],
        "device": device[row],
        "stream": stream[row],
        "engine": ENGINES[kind][row],
        "direction": known_codes(records["direction"] & 15, Direction)[row],
        "bytes": share(records["bytes"].astype(np.int64)),
        "count": share(count),
        "graph": graph[row],
        "error_ns": share(wrong),
    }


def _launched_one_by_one(records: Array, process: Array, stream: Array, most: Array) -> tuple[Array, Array]:
    """How long the kernels of each span took, and how far that may be off, ns (spans,); `most` where nothing tells.

    A mark behind many launches shows when the last of them was over, not whether the device waited for each. In the
    middle of a run one launch stands between two marks at times, and tells how long one takes (`busy` of that run).
    From the newest launch of a run to its end the device had work: that much is certain.
    """
    count, tid = records["count"].astype(np.int64), records["tid"].astype(np.int64)
    told, kernels = records["dst"].astype(np.int64), records["result"] == KERNEL
    out, wrong = most.copy(), np.zeros(len(records), dtype=np.int64)
    sampled = kernels & (count >= SAMPLED) & (tid > 1) & (tid <= PACE_NS) & (told < records["dur_ns"].astype(np.int64))
    for owner, one in np.unique(np.stack((process[sampled], stream[sampled])), axis=1).T.tolist():
        mine = kernels & (process == owner) & (stream == one)
        some = np.flatnonzero(mine & sampled)
        if len(some) < FEWEST:
            continue
        each = told[some] / count[some]
        each = np.maximum(each - MARK_NS, each / 3)
        low, high = (quantile(each, count[some], part) for part in (SHORTEST, LONGEST))
        mean = float((each * count[some]).sum() / count[some].sum())
        rows = np.flatnonzero(mine & ~sampled & (count > 1))
        certain = np.minimum(np.maximum(tid[rows] - 1 - MARK_NS, 0), most[rows])
        took = np.minimum(certain + (count[rows] * mean).astype(np.int64), most[rows])
        out[rows] = took
        wrong[rows] = np.minimum(count[rows] * (high - low) / 2, most[rows] - certain).astype(np.int64)
    return out, wrong


def _coverage(start: Array, end: Array, process: Array, device: Array, reason: Array, names: Names) -> Table:
    """Disjoint intervals of each device in which nothing is missing, and those that were missed, with the reason."""
    parts: list[tuple[Array, Array, int, int, Array]] = []
    for one in np.unique(np.stack((process, device)), axis=1).T.tolist():
        mine = (process == one[0]) & (device == one[1])
        seen = mine & (reason == 0)
        holes = np.flatnonzero(mine & (reason != 0))
        if len(holes):
            parts.append((start[holes], end[holes], *one, reason[holes]))
        seen_from, seen_to = _without(start[seen], end[seen], start[holes], end[holes])
        parts.append((seen_from, seen_to, *one, np.zeros(len(seen_from), dtype=np.int64)))
    known = np.array([names.add(text) for text in REASONS], dtype=np.int32)

    def column(place: int) -> Array:
        return np.concatenate([np.zeros(0, np.int64), *(np.broadcast_to(p[place], p[0].shape) for p in parts)])

    return sorted_table(
        "coverage",
        {
            "start_ns": column(0),
            "end_ns": column(1),
            "process": column(2),
            "device": column(3),
            "reason": known[column(4).astype(np.int64)],
            "stopped": STOPPED[column(4).astype(np.int64)],
        },
    )


def _without(start: Array, end: Array, hole_start: Array, hole_end: Array) -> tuple[Array, Array]:
    """The union of intervals less the union of others."""
    start, end = union(start, end)
    hole_start, hole_end = union(hole_start, hole_end)
    edges = np.unique(np.concatenate((start, end, hole_start, hole_end)))
    begins, ends = edges[:-1], edges[1:]
    keep = (Cover(start, end).within(begins, ends) > 0) & (Cover(hole_start, hole_end).within(begins, ends) == 0)
    return union(begins[keep], ends[keep])


def _graphs(recording: Recording, records: Array, process: Array) -> None:
    """The newest record of each graph."""
    newest = {(row, int(r["src"])): r for row, r in zip(process.tolist(), records, strict=True)}
    rows = list(newest.values())

    def column(name: str) -> Array:
        return np.array([int(r[name]) for r in rows], dtype=np.int64)

    recording.tables["graphs"] = Table(
        "graphs",
        {
            "process": np.array([row for row, _ in newest], dtype=np.int32),
            "graph": column("src"),
            "kernels": column("count"),
            "copies": column("transfer"),
            "copy_bytes_h2d": column("stream"),
            "copy_bytes_d2h": column("dst"),
            "memsets": np.maximum(column("tid") - 1, 0),
            "host_nodes": column("result"),
            "several_streams": column("direction"),
            "launches": column("dur_ns"),
        },
    )
