"""What a run folder holds beside calls: transfers, looks at bytes, adapters' events, stacks, waits, device samples."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvprobe.probe.ring import SANE, TRANSFER
from kvprobe.recordings.assemble import sorted_table
from kvprobe.recordings.model import SCHEMAS, Array, Direction, Memory, Recording, Table
from kvprobe.recordings.run_processes import Process
from kvprobe.recordings.submitters import Submitters
from kvprobe.recordings.vocabulary import Names

__all__ = ["contents", "cpu_waits", "cpu_waits_table", "known_codes", "ns_of", "samples", "stacks", "transfers"]


def known_codes(codes: Array, words: type[Direction] | type[Memory]) -> Array:
    """The codes, 0 (unknown) for those of a damaged file that stand for nothing."""
    return np.where(codes <= max(words), codes, 0)


def transfers(
    recording: Recording,
    records: Array,
    process: Array,
    shift: Array,
    stream: Array,
    processes: list[Process],
    shifts: list[int],
    names: Names,
    submitters: Submitters,
) -> None:
    """Transfers of engines, from ring files; those of servers, with calls and decisions, from events-<pid>.jsonl."""
    keep = np.flatnonzero(records["call"] == TRANSFER)
    r = records[keep]
    parts = np.concatenate([r["src"].astype("<u8"), r["dst"].astype("<u8")]).view("<f4")
    with np.errstate(invalid="ignore"):  # bits of a damaged file may be a signalling NaN
        parts = parts.astype(np.float64) * 1e3
    parts = np.clip(np.nan_to_num(parts), 0.0, float(SANE))
    build, submit = parts[: 2 * len(r) : 2], parts[1 : 2 * len(r) : 2]
    wait, copy = parts[2 * len(r) :: 2], parts[2 * len(r) + 1 :: 2]
    total = r["dur_ns"].astype(np.int64)
    poll = np.clip(total - build - submit - wait - copy, 0.0, float(SANE))
    start = r["start_ns"].astype(np.int64) + shift[keep]
    columns: dict[str, list[Any]] = {
        "start_ns": start.tolist(),
        "end_ns": (start + total).tolist(),
        "process": process[keep].tolist(),
        "thread": r["tid"].tolist(),
        "stream": stream[keep].tolist(),
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
    decisions: dict[str, list[Any]] = {name: [] for name in ("time_ns", "process", "what", "reason", "gain")}
    ranges: dict[str, list[Any]] = {n: [] for n in ("start_ns", "end_ns", "process", "thread", "domain", "name")}
    served: dict[str, list[Any]] = {name: [] for name in SCHEMAS["server_calls"]}
    latest: dict[tuple[str, int], tuple[str, str]] = {}  # adapter and process -> what it is, where it stands
    offloads: dict[tuple[object, ...], dict[str, Any]] = {}  # process, adapter and source -> its last sums
    directions = {"load": 1, "store": 2}
    for row, (one, by) in enumerate(zip(processes, shifts, strict=True)):
        for event in one.files.events(one.pid):
            at = event.get("t_ns")
            if not isinstance(at, int) or not one.start_ns - 60_000_000_000 <= at:
                continue
            if event.get("kind") == "transfer":
                submitters.event(row, event)
                split = [ns_of(event.get(name)) for name in ("build_ns", "submit_ns", "queue_ns", "copy_ns", "poll_ns")]
                took = sum(part for part in split if part > 0)
                number = event.get("id")
                begin = event.get("begin_ns")
                begun = begin if isinstance(begin, int) and begin <= at else at - took
                picked_from = min(max(ns_of(event.get("one_in")), 1), 1 << 20)
                values = (
                    begun + by,
                    at + by,
                    row,
                    event.get("thread") or -1,
                    -1,
                    directions.get(str(event.get("direction")), 0),
                    event.get("bytes") or 0,
                    event.get("copies") or 0,
                    number if isinstance(number, int) else -1,
                    *split,
                    event.get("ok", True) is not False,
                    picked_from,
                )
                for column, value in zip(columns, values, strict=True):
                    columns[column].append(value)
            elif event.get("kind") == "decision":
                change = f": {event.get('from')} to {event.get('to')}" if event.get("to") else ""
                decisions["time_ns"].append(at + by)
                decisions["process"].append(row)
                decisions["what"].append(names.add(f"{event.get('adapter')}: {event.get('what')}{change}"))
                decisions["reason"].append(names.add(str(event.get("why") or "")))
                gain = (event.get("evidence") or {}).get("gain")
                decisions["gain"].append(float(gain) if isinstance(gain, (int, float)) else 0.0)
            elif event.get("kind") == "call":
                what = f"{event.get('server')} {event.get('call')}: {event.get('cause') or ''}".rstrip(": ")
                values = (
                    at + by - max(0, ns_of(event.get("dur_ns"))),
                    at + by,
                    row,
                    event.get("thread") or -1,
                    names.add("kvprobe"),
                    names.add(what),
                )
                for column, value in zip(ranges, values, strict=True):
                    ranges[column].append(value)
                call = (
                    *values[:4],
                    names.add(str(event.get("server"))),
                    names.add(str(event.get("call"))),
                    directions.get(str(event.get("direction")), 0),
                    _count(event, "bytes"),
                    _count(event, "copies"),
                    _count(event, "pageable_copies"),
                    _count(event, "blocking_copies"),
                    names.add(str(event.get("cause") or "")),
                    "inside" in event,
                )
                for column, value in zip(served, call, strict=True):
                    served[column].append(value)
            elif event.get("kind") == "offload":
                sums = {name: _number(event.get(name)) for name in SCHEMAS["offload"] if name not in _OFFLOAD_NAMES}
                offloads[row, str(event.get("adapter")), str(event.get("source"))] = {
                    **sums,
                    "time_ns": at + by,
                    "process": row,
                    "server": names.add(str(event.get("server"))),
                    "source": names.add(str(event.get("source"))),
                }
            elif event.get("kind") == "state":
                version = f" on {event.get('distribution')} {event['version']}" if event.get("version") else ""
                state = f"{event.get('state')} {event.get('reason') or ''}".strip()
                if state == "waiting":
                    state = "waiting: the server did not use what it watches"
                latest[f"{event.get('adapter')}{version}", one.pid] = f"{event.get('adapter')}{version}", state
    # the start-up part speaks for a server until its adapters are there and speak for themselves
    spoken = {(adapter.partition(".")[0], pid) for adapter, pid in latest if "." in adapter}
    states = Counter(said for (adapter, pid), said in latest.items() if (adapter, pid) not in spoken)
    for (adapter, state), count in sorted(states.items()):
        recording.notes.append(f"adapter {adapter}: {state} ({count} process{'es' if count > 1 else ''})")
    if offloads:
        told = {name: np.array([one[name] for one in offloads.values()]) for name in SCHEMAS["offload"]}
        recording.tables["offload"] = Table("offload", told)
    if served["start_ns"]:
        recording.tables["server_calls"] = sorted_table("server_calls", {k: np.array(v) for k, v in served.items()})
    if ranges["start_ns"]:
        recording.tables["ranges"] = sorted_table("ranges", {k: np.array(v) for k, v in ranges.items()})
    picked = [one_in for one_in in columns["one_in"] if one_in > 1]
    if picked:
        recording.notes.append(
            f"adapters at rest watched {len(picked):,} of about {sum(picked):,} transfers, one in {max(picked)}: each "
            "counts for so many, so sums over transfers are estimates"
        )
    if columns["start_ns"]:
        recording.tables["transfers"] = sorted_table("transfers", {k: np.array(v) for k, v in columns.items()})
    if decisions["time_ns"]:
        recording.tables["decisions"] = sorted_table(
            "decisions", {k: np.array(v) for k, v in decisions.items()}, by="time_ns"
        )


_OFFLOAD_NAMES = ("time_ns", "process", "server", "source")


def _number(value: object) -> float:
    """A sum or a rate of an event; -1 for what is none."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= SANE
    return value if known else -1  # type: ignore[return-value]


def _count(event: dict[str, Any], field: str) -> int:
    return max(0, ns_of(event.get(field)))


def ns_of(value: object) -> int:
    """A time or duration as somebody wrote it; -1 for what is none."""
    return int(value) if isinstance(value, (int, float)) and -SANE <= value <= SANE else -1


def contents(recording: Recording, records: Array, process: Array, shift: Array, stream: Array) -> None:
    """What sampled copies carried, from notes of ring files: RECORD, (rows,) as kvp.h says, with their processes."""
    recording.tables["contents"] = sorted_table(
        "contents",
        {
            "time_ns": records["start_ns"].astype(np.int64) + shift,
            "process": process,
            "thread": records["tid"].astype(np.int64),
            "stream": stream,
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
