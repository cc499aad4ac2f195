"""What a call waited for: the operation of the device after whose end it returned."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvprobe.recordings.intervals import in_time
from kvprobe.recordings.model import CallKind, Recording

__all__ = ["SOON_NS", "waited_for"]

Array = npt.NDArray[Any]

SOON_NS = 100_000  # a thread that is woken runs within this time; later, something else may have held it
SHORTEST_NS = 5_000  # a shorter call waited for nothing worth an arrow


def waited_for(recording: Recording, rows: Array) -> Array:
    """For each of these rows of `calls`, the row of `executions` that ended last before the call returned; -1: none.

    The operation ended while the call was under way, on the call's stream where that is known, else anywhere in its
    process; a wait for an event looks at the stream that recorded the event. A call whose own operation it was, as of a
    blocking copy, waited for that. Where nothing ended within `SOON_NS` before the return, nothing is said.
    """
    calls, ran = recording.calls, recording.executions
    out = np.full(len(rows), -1, dtype=np.int64)
    if not ran.rows or not len(rows):
        return out
    ends, own = ran["end_ns"], ran["correlation"]
    lists: dict[tuple[str, int], tuple[Array, Array]] = {}

    def of(column: str, key: int) -> tuple[Array, Array]:
        """The operations of a stream or a process in the order of their ends, and these."""
        if (column, key) not in lists:
            mine = in_time(np.flatnonzero(ran[column] == key), ends)
            lists[column, key] = mine, ends[mine]
        return lists[column, key]

    events = _recorded(recording, rows)
    wanted = calls["correlation"][rows]
    few = in_time(np.flatnonzero(np.isin(own, wanted[wanted >= 0])), ends)  # of millions those that are asked for
    asked = dict(zip(own[few].tolist(), few.tolist(), strict=True))
    for i, row in enumerate(rows.tolist()):
        began, ended = int(calls["start_ns"][row]), int(calls["end_ns"][row])
        if ended - began < SHORTEST_NS:
            continue
        of_stream, of_process = int(calls["stream"][row]), int(calls["process"][row])
        if calls["kind"][row] in (CallKind.COPY, CallKind.COPY_SYNC):
            mine = asked.get(int(calls["correlation"][row]), -1)
            if mine >= 0 and ran["process"][mine] == of_process and began < ends[mine] <= ended:
                out[i] = mine if ended - ends[mine] <= SOON_NS else -1
                continue
        of_stream = events.get(row, of_stream)
        those, when = of("stream", of_stream) if of_stream >= 0 else of("process", of_process)
        at = int(np.searchsorted(when, ended, side="right")) - 1
        if at >= 0 and when[at] > max(began, ended - SOON_NS):
            out[i] = those[at]
    return out


def _recorded(recording: Recording, rows: Array) -> dict[int, int]:
    """Of waits for an event: the row of the stream that recorded it last before the call."""
    calls = recording.calls
    waits = np.array(["eventsynchronize" in name.lower() for name in recording.names], dtype=bool)
    marks = np.array(["eventrecord" in name.lower() for name in recording.names], dtype=bool)
    asks = rows[waits[calls["name"][rows]] & (calls["src"][rows] > 0)]
    if not len(asks):
        return {}
    made = np.flatnonzero(marks[calls["name"]] & (calls["stream"] >= 0) & (calls["src"] > 0))
    by_event: dict[tuple[int, int], list[int]] = {}
    for row in made[np.argsort(calls["start_ns"][made], kind="stable")].tolist():
        by_event.setdefault((int(calls["process"][row]), int(calls["src"][row])), []).append(row)
    out = {}
    for row in asks.tolist():
        mine = by_event.get((int(calls["process"][row]), int(calls["src"][row])), [])
        at = int(np.searchsorted(calls["start_ns"][mine], calls["start_ns"][row])) - 1 if mine else -1
        if at >= 0:
            out[row] = int(calls["stream"][mine[at]])
    return out
