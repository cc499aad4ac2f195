"""What a run folder holds beside calls: transfers, looks at bytes, adapters' events, stacks, waits, device samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvprobe.probe.ring import SANE, TRANSFER
from kvprobe.probe.ring_layout import WAITS
from kvprobe.recordings.adapter_events import AdapterEvents, ns_of
from kvprobe.recordings.assemble import sorted_table
from kvprobe.recordings.model import Array, Direction, Memory, Recording, Table
from kvprobe.recordings.run_processes import Process
from kvprobe.recordings.submitters import Submitters
from kvprobe.recordings.vocabulary import Names

__all__ = [
    "RingRecords",
    "contents",
    "destinations",
    "cpu_waits",
    "cpu_waits_table",
    "known_codes",
    "page_faults",
    "pauses",
    "samples",
    "stack_samples",
    "stacks",
    "transfers",
    "waits",
]


def known_codes(codes: Array, words: type[Direction] | type[Memory]) -> Array:
    """The codes, 0 (unknown) for those of a damaged file that stand for nothing."""
    return np.where(codes <= max(words), codes, 0)


@dataclass
class RingRecords:
    """Records of the ring files of all processes, (rows,) each.

    Attributes:
        records: RECORD, as kvp.h says.
        process: row of each one's process.
        shift: ns to add to its times.
        stream: row of its stream; -1: none.
    """

    records: Array
    process: Array
    shift: Array
    stream: Array

    def some(self, rows: Array) -> RingRecords:
        """Those at `rows`."""
        return RingRecords(self.records[rows], self.process[rows], self.shift[rows], self.stream[rows])


def transfers(
    recording: Recording,
    rings: RingRecords,
    processes: list[Process],
    shifts: list[int],
    names: Names,
    submitters: Submitters,
) -> None:
    """Transfers of engines, from ring files; those of servers, with calls and decisions, from events-<pid>.jsonl."""
    told = AdapterEvents(names)
    told.transfers |= _engine_transfers(rings.some(np.flatnonzero(rings.records["call"] == TRANSFER)))
    for row, (one, by) in enumerate(zip(processes, shifts, strict=True)):
        for event in one.files.events(one.pid):
            at = event.get("t_ns")
            if not isinstance(at, int) or not one.start_ns - 60_000_000_000 <= at:
                continue
            kind = event.get("kind")
            if kind == "transfer":
                submitters.event(row, event)
                told.transfer(event, row, at, by)
            elif kind == "decision":
                told.decision(event, row, at, by)
            elif kind == "call":
                told.call(event, row, at, by)
            elif kind == "offload":
                told.offload(event, row, at, by)
            elif kind == "blocks":
                told.blocks.event(event, row, at, by)
            elif kind == "state":
                told.state(event, one.pid)
    told.fill(recording)


def _engine_transfers(rings: RingRecords) -> dict[str, list[Any]]:
    """Columns of `transfers` from records of that call: two float32 of us in each address, the rest is polling."""
    r = rings.records
    parts = np.concatenate([r["src"].astype("<u8"), r["dst"].astype("<u8")]).view("<f4")
    with np.errstate(invalid="ignore"):  # bits of a damaged file may be a signalling NaN
        parts = parts.astype(np.float64) * 1e3
    parts = np.clip(np.nan_to_num(parts), 0.0, float(SANE))
    build, submit = parts[: 2 * len(r) : 2], parts[1 : 2 * len(r) : 2]
    wait, copy = parts[2 * len(r) :: 2], parts[2 * len(r) + 1 :: 2]
    total = r["dur_ns"].astype(np.int64)
    poll = np.clip(total - build - submit - wait - copy, 0.0, float(SANE))
    start = r["start_ns"].astype(np.int64) + rings.shift
    return {
        "start_ns": start.tolist(),
        "end_ns": (start + total).tolist(),
        "process": rings.process.tolist(),
        "thread": r["tid"].tolist(),
        "stream": rings.stream.tolist(),
        "direction": known_codes(r["direction"] & 15, Direction).tolist(),
        "bytes": np.minimum(r["bytes"], SANE).tolist(),
        "count": r["count"].tolist(),
        "transfer": r["transfer"].tolist(),
        "build_ns": build.astype(np.int64).tolist(),
        "submit_ns": submit.astype(np.int64).tolist(),
        "wait_ns": wait.astype(np.int64).tolist(),
        "copy_ns": copy.astype(np.int64).tolist(),
        "poll_ns": poll.astype(np.int64).tolist(),
        "ok": (r["result"] == 0).tolist(),
        "one_in": [1] * len(r),
    }


def contents(recording: Recording, looks: RingRecords) -> None:
    """What sampled copies carried, from notes of ring files."""
    records = looks.records
    recording.tables["contents"] = sorted_table(
        "contents",
        {
            "time_ns": records["start_ns"].astype(np.int64) + looks.shift,
            "process": looks.process,
            "thread": records["tid"].astype(np.int64),
            "stream": looks.stream,
            "direction": known_codes(records["direction"] & 15, Direction),
            "src": records["src"],
            "dst": records["dst"],
            "bytes": np.minimum(records["bytes"], SANE).astype(np.int64),
            "looked": records["count"].astype(np.int64),
            "hash": records["dur_ns"],
            "blank": (records["result"] != 0).astype(np.uint8),
        },
        by="time_ns",
    )


def destinations(recording: Recording, told: RingRecords) -> None:
    """What the device had where loads went, from notes of ring files."""
    records = told.records
    looked, result = records["count"].astype(np.int64), records["result"].astype(np.int64)
    recording.tables["destinations"] = sorted_table(
        "destinations",
        {
            "time_ns": records["start_ns"].astype(np.int64) + told.shift,
            "process": told.process,
            "dst": records["dst"],
            "looked": looked,
            "same": ((looked > 0) & (result == 1)).astype(np.uint8),
            "error": np.where(looked > 0, 0, result),
        },
        by="time_ns",
    )


def page_faults(recording: Recording, told: RingRecords) -> None:
    """Page faults in calls that pinned or copied, from notes of ring files."""
    records = told.records
    recording.tables["page_faults"] = sorted_table(
        "page_faults",
        {
            "time_ns": records["start_ns"].astype(np.int64) + told.shift,
            "process": told.process,
            "thread": records["tid"].astype(np.int64),
            "minor": records["count"].astype(np.int64),
            "major": records["transfer"].astype(np.int64),
            "nodes": records["result"].astype(np.int64),
        },
        by="time_ns",
    )


def pauses(recording: Recording, told: RingRecords) -> None:
    """What CPU time was used between two calls of a thread, from notes of ring files."""
    told = told.some(np.flatnonzero(told.records["result"] == 0))
    records = told.records
    recording.tables["pauses"] = sorted_table(
        "pauses",
        {
            **_of_threads(told),
            "thread_ns": np.minimum(records["src"], SANE).astype(np.int64),
            "process_ns": np.minimum(records["dst"], SANE).astype(np.int64),
            "more_ns": np.minimum(records["bytes"], SANE).astype(np.int64),
            "gave_up": records["transfer"].astype(np.int64),
        },
    )


def waits(recording: Recording, told: RingRecords, names: Names) -> None:
    """Where threads waited in pauses for somebody outside to ask for something, from notes of ring files."""
    known = told.some(np.flatnonzero((told.records["result"] > 0) & (told.records["result"] < len(WAITS))))
    if not len(known.records):
        return
    recording.tables["os_calls"] = sorted_table(
        "os_calls", {**_of_threads(known), "name": names.map(WAITS)[known.records["result"]]}
    )


def _of_threads(told: RingRecords) -> dict[str, Array]:
    """When these notes begin and end, and whose they are."""
    records = told.records
    start = records["start_ns"].astype(np.int64) + told.shift
    return {
        "start_ns": start,
        "end_ns": start + np.minimum(records["dur_ns"], SANE).astype(np.int64),
        "process": told.process,
        "thread": records["tid"].astype(np.int64),
    }


def stacks(recording: Recording, processes: list[Process], shifts: list[int], names: Names) -> None:
    """Python stacks of blocked calls, from stacks-<pid>.jsonl."""
    columns: dict[str, list[int]] = {n: [] for n in ("time_ns", "process", "thread", "blocked_ns", "gil", "stack")}
    how: set[str] = set()
    for row, (process, shift) in enumerate(zip(processes, shifts, strict=True)):
        for line in process.files.stacks(process.pid):
            at = ns_of(line.get("t_ns"))
            if not process.start_ns <= at <= process.end_ns + 60_000_000_000:
                continue
            how.add(str(line.get("how")))
            for thread in line.get("threads") or []:
                blocked = thread.get("thread") == line.get("thread")
                columns["time_ns"].append(at + shift)
                columns["process"].append(row)
                columns["thread"].append(ns_of(thread.get("thread")))
                columns["blocked_ns"].append(ns_of(line.get("blocked_ns")) if blocked else 0)
                columns["gil"].append(1 if thread.get("gil") else 0)
                columns["stack"].append(names.add("\n".join(map(str, thread.get("frames") or []))))
    if columns["time_ns"]:
        recording.tables["stacks"] = Table("stacks", {name: np.array(values) for name, values in columns.items()})
    if "in-process" in how:
        recording.notes.append(
            "stacks were taken by the processes themselves, because py-spy was not permitted: who "
            "holds the GIL is not known, and a process that holds it while blocked cannot answer"
        )


def stack_samples(recording: Recording, processes: list[Process], shifts: list[int], names: Names) -> None:
    """Python stacks of threads that make calls, from stack-samples-<pid>.jsonl."""
    rows: list[tuple[int, ...]] = []
    for row, (process, shift) in enumerate(zip(processes, shifts, strict=True)):
        for line in process.files.stack_samples(process.pid):
            at = ns_of(line.get("t_ns"))
            if process.start_ns <= at <= process.end_ns:
                for thread in line.get("threads") or []:
                    stack = names.add("\n".join(map(str, thread.get("frames") or [])))
                    rows.append((at + shift, row, ns_of(thread.get("thread")), stack))
    if rows:
        told = ("time_ns", "process", "thread", "stack")
        columns = dict(zip(told, map(np.array, zip(*sorted(rows), strict=True)), strict=True))
        recording.tables["stack_samples"] = Table("stack_samples", columns)


def cpu_waits(recording: Recording, processes: list[Process], shifts: list[int]) -> None:
    """Waits for a CPU, from cpu-waits-<pid>.jsonl."""
    rows: list[tuple[int, ...]] = []
    for row, (process, shift) in enumerate(zip(processes, shifts, strict=True)):
        for line in process.files.cpu_waits(process.pid):
            begin, end = ns_of(line.get("begin_ns")), ns_of(line.get("end_ns"))
            if process.start_ns <= end and begin < end <= process.end_ns + 60_000_000_000:
                told = (ns_of(line.get(name)) for name in ("thread", "waited_ns", "ran_ns", "throttled_ns"))
                rows.append((begin + shift, end + shift, row, *told))
    if rows:
        recording.tables["cpu_waits"] = cpu_waits_table(rows)


def cpu_waits_table(rows: list[tuple[int, ...]]) -> Table:
    """Waits for a CPU as a table; a row: start, end, row of its process, thread, ns waited, run and throttled."""
    names = ("start_ns", "end_ns", "process", "thread", "waited_ns", "ran_ns", "throttled_ns")
    columns = np.array(rows, np.int64).reshape(-1, len(names)).T
    return sorted_table("cpu_waits", dict(zip(names, columns, strict=True)))


def samples(recording: Recording, processes: list[Process], shifts: list[int], names: Names) -> None:
    """device.jsonl: a line a sample, `t_ns`, `device`, and a number for each metric."""
    columns: dict[str, list[Any]] = {name: [] for name in ("time_ns", "process", "device", "metric", "value")}
    of_folder = {process.folder: (process.files, shift) for process, shift in zip(processes, shifts, strict=True)}
    for folder, shift in of_folder.values():
        for line in folder.samples():
            for metric, value in line.items():
                if metric in ("t_ns", "device") or isinstance(value, bool) or not isinstance(value, (int, float)):
                    continue
                columns["time_ns"].append(ns_of(line.get("t_ns")) + shift)
                columns["process"].append(-1)
                columns["device"].append(ns_of(line.get("device", 0)))
                columns["metric"].append(names.add(metric))
                columns["value"].append(float(value))
    if columns["time_ns"]:
        recording.tables["samples"] = sorted_table("samples", {k: np.array(v) for k, v in columns.items()}, "time_ns")
