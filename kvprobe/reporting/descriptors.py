"""The tables "Copies by stream and direction": how copies were cut into calls, and what merging them would give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprobe.recordings.descriptors import StreamCopies, copies_by_stream, has_addresses
from kvprobe.recordings.model import Direction, Recording
from kvprobe.recordings.serving import ServingWindow
from kvprobe.reporting import streams
from kvprobe.reporting.units import NONE, count_text, duration, number_text, rate, size_text
from kvprobe.reporting.views import TableView, more_rows, table

__all__ = ["DIRECTIONS", "costly", "descriptor_table", "submitters_table"]

DIRECTIONS = {Direction.H2D: "to the GPU", Direction.D2H: "to the CPU", Direction.D2D: "on the GPU"}
SHOWN = 12  # rows
NEARLY_ALL = 0.99  # of the time: what follows cost little
_ALLOW = (
    '"Submit rate" is the highest rate at which one thread could submit these bytes: the bytes of an average call, '
    "divided by the median time of a call. If the submit rate is above the link's rate, the calls are not the limit."
)
_RUNS = (
    "In the serving window. A burst is a series of copies that one thread submits to the stream without a pause. A run "
    "is a series of copies in a burst, each of which begins where the one before ends, at the source and at the "
    'destination, so that one copy would be enough. "Merging would save" is the thread\'s time in the calls that would '
    "go away, at what a call costs while the queue has free slots. "
) + _ALLOW
_NO_PLACES = (
    "In the serving window. The recorder leaves out the addresses of copies, so it is not known which of them are "
    "neighbours. kvprobe run records addresses. "
) + _ALLOW
_BATCHES = " Of a batch only the first address is recorded."


def descriptor_table(recording: Recording, window: ServingWindow) -> tuple[str, TableView]:
    """What the section says first, and its table: a row a stream and direction, most time of callers first."""
    found = copies_by_stream(recording, window)
    lead = "" if not found else _RUNS if has_addresses(recording) else _NO_PLACES
    if lead == _RUNS and any(one.batches for one in found):
        lead += _BATCHES
    shown = costly(found)
    linked = any(one.link_bytes_per_s for one in found[:shown])
    rows = [_row(recording, one, linked) for one in found[:shown]]
    columns = [
        "Stream",
        "Direction",
        "Copies",
        "Size, median",
        "A call, median",
        "Time in calls",
        "Runs",
        "Merging would save",
        "Submit rate",
        *(["Link"] if linked else []),
        "Bursts",
        "Calls",
        "Sizes, p10 to p90",
    ]
    alike = all(one.calls == one.descriptors for one in found[:shown])  # a batch makes many copies in one call
    unknown = [at for at in range(len(columns)) if rows and all(row[at] == NONE for row in rows)]
    drop = {*unknown, *([columns.index("Calls")] if alike else [])}
    columns = [name for at, name in enumerate(columns) if at not in drop]
    rows = [[cell for at, cell in enumerate(row) if at not in drop] for row in rows]
    rest = found[shown:]
    more = more_rows(len(rest), f", {duration(sum(one.host_ns for one in rest))} in all")
    return lead, table("Copies by stream and direction", columns, rows, note=more)


def costly(found: Sequence[StreamCopies]) -> int:
    """How many rows, of those that took most of the callers' time, are worth a look."""
    whole, so_far = sum(one.host_ns for one in found), 0
    for shown, one in enumerate(found, start=1):
        so_far += one.host_ns
        if so_far >= NEARLY_ALL * whole or shown == SHOWN:
            return shown
    return len(found)


def submitters_table(recording: Recording) -> TableView:
    """What kvprobe's engines and adapters made of the copies that they were given."""
    found = recording.submitters
    rows = []
    for row in np.argsort(-found["dur_ns"], kind="stable")[:SHOWN].tolist():
        asked, made, calls = (int(found[name][row]) for name in ("copies", "descriptors", "calls"))
        server, stream, spent = (
            recording.text(int(found["server"][row])),
            int(found["stream"][row]),
            int(found["dur_ns"][row]),
        )
        whose = server or "engine"
        if recording.processes.rows > 1:
            whose += f" of {streams.process_name(recording, int(found['process'][row]))}"
        rows.append(
            [
                whose,
                streams.stream_name(recording, stream) if stream >= 0 else NONE,
                DIRECTIONS.get(Direction(int(found["direction"][row])), NONE),
                (count_text(int(found["transfers"][row])), int(found["transfers"][row])),
                (count_text(asked), asked),
                _known(made),
                (number_text(asked / made), asked / made) if made > 0 else NONE,
                (count_text(calls), calls),
                (duration(spent / calls), spent / calls) if calls else NONE,
                (duration(spent), spent),
            ]
        )
    columns = [
        "Whose",
        "Stream",
        "Direction",
        "Transfers",
        "Copies asked for",
        "Submitted",
        "Merged into one, mean",
        "Calls",
    ]
    rest = found.rows - len(rows)
    more = more_rows(rest, " with shorter times in calls")
    return table("Copies that kvprobe submitted", [*columns, "A call, mean", "Time in calls"], rows, note=more)


def _row(recording: Recording, one: StreamCopies, linked: bool) -> list[Any]:
    name = streams.stream_name(recording, one.stream) if one.stream >= 0 else "unknown"
    low, median, high, most = one.sizes
    saved = one.calls - one.runs
    saves = f"{duration(one.saved_ns)}, {count_text(saved)} calls" if one.saved_ns else "nothing"
    allows = one.bytes / (one.calls * one.call_ns) * 1e9 if one.call_ns else None
    link = one.link_bytes_per_s
    return [
        f"{name}, in batches" if one.batches else name,
        DIRECTIONS.get(one.direction, NONE),
        _known(one.descriptors),
        (size_text(median), median) if median >= 0 else NONE,
        (duration(one.call_ns), one.call_ns),
        (duration(one.host_ns), one.host_ns),
        _known(one.runs),
        (saves, one.saved_ns) if one.runs >= 0 else NONE,
        (rate(allows), allows),
        *([(rate(link) if link else NONE, link)] if linked else []),
        _known(one.bursts),
        (count_text(one.calls), one.calls),
        _sizes_text(low, high, most) if low >= 0 else NONE,
    ]


def _sizes_text(low: int, high: int, most: int) -> str:
    if low == most:
        return "all alike"
    middle = size_text(low) if low == high else f"{size_text(low)} to {size_text(high)}"
    return middle if most == high else f"{middle}, largest {size_text(most)}"


def _known(count: int) -> Any:
    return (count_text(count), count) if count >= 0 else NONE
