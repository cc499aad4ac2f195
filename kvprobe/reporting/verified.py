"""What `kvprobe verify` and the page say of bytes that were stored and loaded again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprobe.output.verify import MismatchJson, VerifyJson
from kvprobe.recordings.model import Recording
from kvprobe.recordings.witnessed import MismatchRow, RewrittenHome, Witnessed, of_recording
from kvprobe.reporting.streams import process_name, stream_name
from kvprobe.reporting.units import count_text, duration, size_text
from kvprobe.reporting.views import Section, TableView, left_out, table

__all__ = ["document", "lines", "section", "sentence"]

_SHOWN, _IN_TABLE = 3, 50
_LEAD = (
    "Of pages that a copy from the GPU had filled in CPU memory, kvprobe compared the bytes when they had arrived with "
    "those when they were loaded."
)
_BY_WHOM = "no copy and no read of a file that kvprobe saw wrote there: the CPU, a kernel or another device did"


def sentence(found: Witnessed) -> str:
    """The verdict."""
    counts, said = found.counts, list[str]()
    compared = counts["compared"]
    if found.changed:
        said.append(
            f"{count_text(found.changed)} of {count_text(compared)} compared loads brought other bytes than were stored"
        )
    if counts["overwritten"]:
        number = counts["overwritten"]
        said.append(
            f"{count_text(number)} load{'s' if number != 1 else ''} had the source overwritten while the copy was "
            "under way"
        )
    if said:
        return f"Mismatch: {'; '.join(said)}"
    ruled = sum(one.compared for one in found.rewritten)
    if found.verdict == "equal":
        return f"No mismatch: {count_text(compared - ruled)} compared loads brought the bytes that were stored"
    return f"Cannot tell, because {_why_nothing(found)}"


def _copies(number: int) -> str:
    return f"{count_text(number)} {'copy' if number == 1 else 'copies'}"


def _why_nothing(found: Witnessed) -> str:
    counts = found.counts
    if found.rewritten:
        return "loads were compared only in buffers whose bytes the program changes between store and load as a rule"
    if not counts["loads"] and not counts["stores"]:
        return "no copy between CPU and GPU memory was seen"
    if not counts["stores"]:
        return f"nothing was stored: all {count_text(counts['loads'])} copies were loads"
    if not counts["loads"]:
        return f"nothing was loaded: all {count_text(counts['stores'])} copies were stores"
    left = found.left_out()
    if left:
        return f"no load was compared: {_copies(left[0][1])} {left[0][0]}"
    return "no load took bytes that a store had left"


def lines(recording: Recording, found: Witnessed) -> list[str]:
    """One screen: the verdict, the first mismatches with their evidence, what was counted, what was not looked at."""
    counts = found.counts
    said = [sentence(found)]
    for one in found.mismatches[:_SHOWN]:
        said += [f"  {text}" for text in _evidence(recording, one)]
    more = found.changed + counts["overwritten"] - min(_SHOWN, len(found.mismatches))
    if more > 0:
        said.append(f"  and {count_text(more)} more; --json and the report name {count_text(len(found.mismatches))}")
    for ruled in found.rewritten[:_SHOWN]:
        said.append(f"No alarm: {_rewritten(recording, ruled)}")
    said.append(
        f"Seen: {count_text(counts['stores'])} stores, {count_text(counts['summed'])} of them summed; "
        f"{count_text(counts['loads'])} loads, {count_text(counts['compared'])} of them compared "
        f"({count_text(counts['compared_pages'])} pages of 4 KiB, {_which(counts['level'])}), "
        f"{count_text(counts['watched'])} looked at again while they were under way"
    )
    said += [f"Not looked at: {_copies(number)} that {words}" for words, number in found.left_out()[:5]]
    said += _limits(recording, found)
    return said


def _which(level: int) -> str:
    return f"one in {2**level} was looked at" if level else "all were looked at"


def _limits(recording: Recording, found: Witnessed) -> list[str]:
    """What the result does not cover, and what it cost."""
    counts = found.counts
    names = ", ".join(process_name(recording, row) for row in found.unclosed[:_SHOWN])
    cut = [f"The last second of {names} may be missing: it did not end in order"] if names else []
    return [
        *cut,
        f"Not seen: what was overwritten before a store was summed, up to {duration(counts['lag_ns'])} after it was "
        "over; GPU memory; copies that kernels make",
        f"Cost: {duration(counts['spent_ns'])} in the program's threads, {duration(counts['helper_ns'])} in kvprobe's",
    ]


def _at(recording: Recording, process: int, time_ns: int) -> str:
    began = int(recording.processes["start_ns"][process]) if process < recording.processes.rows else 0
    return f"{(time_ns - began) / 1e9:.6f} s"


def _stream(recording: Recording, process: int, handle: int) -> str:
    streams = recording.streams
    same = (streams["process"] == process) & (streams["handle"].astype(np.uint64) == np.uint64(handle))
    rows = np.flatnonzero(same)
    return stream_name(recording, int(rows[0])) if len(rows) else f"stream {handle:#x}"


def _block(one: MismatchRow) -> str:
    where = ""
    if one.home and one.home_bytes:
        where = f", {size_text(one.address - one.home)} into an allocation of {size_text(one.home_bytes)}"
    return f"block at {one.address:#x}{where}: {size_text(one.bytes)}"


def _evidence(recording: Recording, one: MismatchRow) -> list[str]:
    """A mismatch: the block, both times, which side changed, the calls."""
    process = one.process
    said = [f"{_block(one)} ({process_name(recording, process)})"]
    if one.store_ns is not None and one.summed_ns is not None:
        said.append(
            f"  stored by {one.store_call} at {_at(recording, process, one.store_ns)}, summed at "
            f"{_at(recording, process, one.summed_ns)} (thread {one.store_thread}, "
            f"{_stream(recording, process, one.store_stream or 0)})"
        )
    said.append(
        f"  loaded by {one.call} at {_at(recording, process, one.load_ns)} (thread {one.thread}, "
        f"{_stream(recording, process, one.stream)})"
    )
    pages = f"{one.changed} of {one.pages} pages looked at, from {one.first:#x} on"
    if one.kind == "overwritten":
        said.append(
            f"  CPU memory changed between that call and {_at(recording, process, one.found_ns)}, when the copy was "
            f"still under way: {pages}"
        )
    else:
        said.append(f"  CPU memory changed between these times; {_BY_WHOM}: {pages}")
    return said


def _rewritten(recording: Recording, one: RewrittenHome) -> str:
    return (
        f"in the allocation of {size_text(one.bytes)} at {one.address:#x} of {process_name(recording, one.process)} "
        f"the bytes had changed at {count_text(one.changed)} of {count_text(one.compared)} loads, so the program most "
        "likely writes there itself, as to a buffer of inputs or results"
    )


def section(recording: Recording) -> Section:
    """The page's section; without tables where no bytes were compared."""
    found = of_recording(recording)
    if found is None:
        return Section("verified", "Loaded bytes, compared with stored ones")
    said = [sentence(found), *(_rewritten(recording, one) for one in found.rewritten), *_limits(recording, found)]
    lead = " ".join(f"{text}." for text in said)
    tables = [_mismatches(recording, found.mismatches), _counted(found)]
    return Section(
        "verified", "Loaded bytes, compared with stored ones", f"{_LEAD} {lead}", [], [t for t in tables if t.rows]
    )


def _mismatches(recording: Recording, found: Sequence[MismatchRow]) -> TableView:
    rows: list[list[Any]] = [
        [
            "under its load" if one.kind == "overwritten" else "since its store",
            process_name(recording, one.process),
            f"{one.address:#x}",
            (size_text(one.bytes), one.bytes),
            _at(recording, one.process, one.store_ns) if one.store_ns is not None else "",
            f"{one.store_call}, thread {one.store_thread}" if one.store_call else "",
            _at(recording, one.process, one.load_ns),
            f"{one.call}, thread {one.thread}",
            f"{one.changed} of {one.pages}",
        ]
        for one in found[:_IN_TABLE]
    ]
    columns = [
        "CPU memory changed", "Process", "Block", "Size", "Stored at", "By", "Loaded at", "By", "Pages that differ"
    ]  # fmt: skip
    return table("Mismatches", columns, rows, left_out(len(rows), len(found)))


def _counted(found: Witnessed) -> TableView:
    counts = found.counts
    rows: list[list[Any]] = [
        ["stores, seen", (count_text(counts["stores"]), counts["stores"])],
        ["stores, summed when they were over", (count_text(counts["summed"]), counts["summed"])],
        ["loads, seen", (count_text(counts["loads"]), counts["loads"])],
        ["loads, compared", (count_text(counts["compared"]), counts["compared"])],
        ["loads, looked at again while under way", (count_text(counts["watched"]), counts["watched"])],
        ["loads of bytes that no store had left", (count_text(counts["unstored"]), counts["unstored"])],
        *([f"copies that {words}", (count_text(number), number)] for words, number in found.left_out()),
    ]
    return table("Copies", ["What", "Copies"], rows)


def document(recording: Recording, found: Witnessed | None) -> VerifyJson:
    """What `--json` prints; `found` None: no bytes were compared at all."""
    if found is None:
        return {
            "verdict": "cannot tell",
            "sentence": "Cannot tell, because no process made a copy while kvprobe watched",
            "stores": 0, "summed": 0, "loads": 0, "compared": 0, "changed": 0, "watched": 0, "overwritten": 0,
            "unstored": 0, "pages_one_in": 1, "pages_compared": 0, "lag_ns": 0, "program_ns": 0, "helper_ns": 0,
            "not_looked_at": [], "rewritten": [], "mismatches": [],
        }  # fmt: skip
    counts = found.counts
    return {
        "verdict": found.verdict,
        "sentence": sentence(found),
        "stores": counts["stores"],
        "summed": counts["summed"],
        "loads": counts["loads"],
        "compared": counts["compared"],
        "changed": found.changed,
        "watched": counts["watched"],
        "overwritten": counts["overwritten"],
        "unstored": counts["unstored"],
        "pages_one_in": 2 ** counts["level"],
        "pages_compared": counts["compared_pages"],
        "lag_ns": counts["lag_ns"],
        "program_ns": counts["spent_ns"],
        "helper_ns": counts["helper_ns"],
        "not_looked_at": [{"why": words, "copies": number} for words, number in found.left_out()],
        "rewritten": [
            {
                "pid": int(recording.processes["pid"][one.process]),
                "address": one.address,
                "bytes": one.bytes,
                "compared": one.compared,
                "changed": one.changed,
            }
            for one in found.rewritten
        ],
        "mismatches": [_mismatch(recording, one) for one in found.mismatches],
    }


def _mismatch(recording: Recording, one: MismatchRow) -> MismatchJson:
    return {
        "what": one.kind,
        "pid": int(recording.processes["pid"][one.process]),
        "address": one.address,
        "device_address": one.device,
        "bytes": one.bytes,
        "allocation": one.home or None,
        "allocation_bytes": one.home_bytes or None,
        "pages_looked_at": one.pages,
        "pages_changed": one.changed,
        "first_changed": one.first,
        "last_changed": one.last,
        "found_ns": one.found_ns,
        "load": {"time_ns": one.load_ns, "call": one.call, "thread": one.thread, "stream": one.stream},
        "store": None
        if one.store_ns is None
        else {
            "time_ns": one.store_ns,
            "summed_ns": one.summed_ns or one.store_ns,
            "call": one.store_call or "",
            "thread": one.store_thread or 0,
            "stream": one.store_stream or 0,
            "address": one.store_address or 0,
            "bytes": one.store_bytes or 0,
        },
    }
