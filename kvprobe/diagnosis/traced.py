"""The calls of a finding, and the Python line that made each: what leads from a finding back to the program.

A stack belongs to a call of its thread that was blocked when it was taken: the call had begun by the time at which the
recorder says that the wait began, and had not returned when the stack was there. A stack that came later is left out:
it shows what the thread did next. Where a profile holds Python functions instead, those that the thread was in during
the call are its stack, and the line is where the function begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.diagnosis.finding import TracedCall
from kvprobe.recordings.python_functions import program_frame, stack_at
from kvprobe.recordings.vocabulary import base_name

if TYPE_CHECKING:
    from kvprobe.diagnosis.joined import Array, JoinedRecording

__all__ = ["line_of", "longest"]

MOST = 20
SLACK_NS = 5_000_000  # how late a wait may be noticed, by whoever looks at it from outside


def line_of(stack: str) -> str:
    """The program's own innermost frame as "file:line", else the innermost of all; "" without frames."""
    return _place(stack.split("\n"))[0]


def _place(stack: Iterable[str]) -> tuple[str, str]:
    """The same frame's "file:line", and its function; empty without frames."""
    found = program_frame(stack)
    return (f"{found[0]['file']}:{found[0]['line']}", found[0]["name"]) if found else ("", "")


def _functions(joined: JoinedRecording, row: int) -> tuple[str, ...]:
    """The Python functions that made this call, innermost first, where the profile holds any.

    Those in the middle of it: two clocks, of the calls and of the functions, may differ by some of its beginning.
    """
    if not joined.recording.python_functions.rows:
        return ()
    middle = (int(joined.start[row]) + int(joined.end[row])) // 2
    return stack_at(joined.recording, int(joined.process[row]), int(joined.thread[row]), middle)


def _stack(joined: JoinedRecording, row: int) -> str:
    """The stack that was taken while this call was blocked; "" where none was."""
    table = joined.recording.stacks
    if not table.rows:
        return ""
    mine = (table["process"] == joined.process[row]) & (table["thread"] == joined.thread[row])
    mine &= (table["blocked_ns"] > 0) & (table["time_ns"] <= joined.end[row])
    mine &= table["time_ns"] - table["blocked_ns"] >= joined.start[row] - SLACK_NS
    at = np.flatnonzero(mine)
    return joined.text(int(table["stack"][at[-1]])) if len(at) else ""


def longest(joined: JoinedRecording, rows: Array, ns: Array) -> tuple[TracedCall, ...]:
    """The calls of a finding that lost most, those whose stack is known among them.

    Args:
        joined: the recording.
        rows: rows of `calls`.
        ns: what each lost.
    """
    if not len(rows):
        return ()
    most = np.flatnonzero(ns >= np.partition(ns, -MOST)[-MOST]) if len(ns) > MOST else np.arange(len(ns))
    chosen = most[np.argsort(-ns[most], kind="stable")][:MOST].tolist()
    # Stacks are few: the call of each is shown, however many calls lost more.
    table = joined.recording.stacks
    for at in np.flatnonzero(table["blocked_ns"] > 0)[:200].tolist():
        when = int(table["time_ns"][at])
        theirs = (
            (joined.thread[rows] == table["thread"][at]) & (joined.start[rows] <= when) & (joined.end[rows] >= when)
        )
        chosen += np.flatnonzero(theirs & (joined.process[rows] == table["process"][at])).tolist()
    depths = joined.occupancy.depth
    out = []
    for i in dict.fromkeys(chosen):
        row = int(rows[i])
        taken = _stack(joined, row)
        stack = tuple(taken.split("\n")) if taken else _functions(joined, row)
        line, function = _place(stack)
        out.append(
            TracedCall(
                row=row,
                name=base_name(joined.text(int(joined.name[row]))),
                pid=joined.pid(int(joined.process[row])),
                thread=int(joined.thread[row]),
                stream_name=joined.stream_name(int(joined.stream[row])) if joined.stream[row] >= 0 else "",
                start_ns=int(joined.start[row]),
                dur_ns=int(joined.dur[row]),
                lost_ns=int(ns[i]),
                depth=int(depths[row]),
                line=line,
                function="" if taken else function,
                stack=stack,
            )
        )
    return tuple(sorted(out, key=lambda call: -call.lost_ns))
