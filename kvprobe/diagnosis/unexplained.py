"""Slow submissions that no known cause explains, with the reason why none does.

Mechanism: the mechanism is unknown. Frequent reasons that a recording does not show are that the scheduler takes the
CPU from the thread, that another process or thread holds a lock inside the driver, and page faults.

Signature: submissions, or calls that record an event, take longer than 60 µs although their queue is not full, and they
overlap nothing that the recorder labelled. There are at least two of these calls, or one that took at least a tenth of
its thread's time and 1% of the serving window.

These calls leave a recording undecided if the GPU waited inside them for 2% of the serving window or more, or if
nothing shows whether the GPU waited.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import CRITICAL, JoinedRecording, ms

CAUSE = cause_of(__name__)
PREDICTS = False
OF_WINDOW = 0.01  # one slow call that took less of it is passed over
STACKED_NS = 5_000_000  # `--stacks-after 5` takes stacks from here on


def find(joined: JoinedRecording) -> Finding | None:
    """What is left of slow submissions."""
    asked = joined.submits | joined.is_named("eventrecord")
    rows = np.flatnonzero(asked & joined.slow & (joined.host.owner < 0))
    left = np.minimum(joined.host.free_ns[rows], joined.excess_of(rows))
    rows, left = rows[left > 0], left[left > 0]
    lost = int(left.sum())
    records = int((~joined.submits[rows]).sum())
    noun = "calls" if records else "submissions"
    least = max(CRITICAL * joined.caller_span_ns(rows), OF_WINDOW * joined.span_ns) if len(rows) == 1 else 0
    if not len(rows) or lost < least:
        return None  # one slow call in a recording is an accident, unless its thread did little else
    deep = joined.occupancy.depth[rows]
    known = (deep >= 0) & joined.recording.has_executions  # without executions depth is inferred where a queue was full
    evidence = [
        Evidence(
            f"{len(rows):,} {noun} took {ms(lost)} longer than calls of the same name usually do; the longest "
            f"{ms(int(joined.dur[rows].max()))}",
            lost,
            "ns",
            MEASURED,
        ),
    ]
    if records:
        evidence.append(
            Evidence(
                f"{records:,} of these calls record{'s' if records == 1 else ''} an event", records, "calls", COUNTED
            )
        )
    if known.any():
        evidence.append(
            Evidence(
                f"at most {int(deep[known].max()):,} submissions were outstanding on their streams"
                if deep[known].any()
                else "nothing was outstanding on their streams",
                int(deep[known].max()),
                "1",
                INFERRED,
            )
        )
    return joined.open_question(
        CAUSE,
        f"{{calls}} slow {noun} without a known cause: {{lost}}",
        rows,
        left,
        evidence=evidence,
        because="these calls overlap nothing that the recorder labelled, copy no pageable memory, are not first calls, "
        "and were made while their queues had free slots"
        if known.any()
        else "the recording does not show how full the launch queues were",
        record=_how_to_record(joined, bool(known.any()), int(joined.dur[rows].max())),
        chart=joined.slow_calls_chart(rows, "Slow submissions without a known cause"),
    )


def _how_to_record(joined: JoinedRecording, known: bool, longest_ns: int) -> str:
    """What would answer the reason; `known`: how full the queues were is, and so the question is where a thread was."""
    if not joined.recording.has_executions:
        return "Record what the GPU executes, which needs a GPU and Nsight Systems: `kvprobe run --nsys -- COMMAND`"
    if not known:
        return (
            "Record with Nsight Systems 2025.5.2 or later, which labels calls that meet a full queue: "
            "`kvprobe run --nsys -- COMMAND`"
        )
    ours = any(one.format == "kvprobe" for one in joined.recording.source)
    again = "--stacks-after 5 " if ours else ""  # by default a stack is taken of what blocks for 50 ms
    stacks = f"with Python stacks (`kvprobe run {again}-- COMMAND`), or " if longest_ns >= STACKED_NS else ""
    return (
        f"Record again {stacks}with Nsight Systems' scheduling trace, to see where the thread was: "
        "`nsys profile -t cuda,nvtx --cpuctxsw=process-tree COMMAND`"
    )
