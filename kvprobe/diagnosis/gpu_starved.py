"""The device is idle while the host prepares the next step.

Mechanism: the host schedules, tokenises, loads data or builds descriptors for longer than the GPU needs for the queued
work, so the GPU runs out of work. Nothing in CUDA is slow.

Signature: a gap is a time in which the GPU executes nothing. A gap counts if the launch that ends the gap was made
after the gap began, and if the launching thread was in no CUDA call during the gap. (So the queue was empty. A kernel
that starts long after its launch is no sign of a starved GPU.) Every program has some gaps, so the finding needs at
least five gaps, which together take at least 10% of the time. Three kinds of gaps do not count:
 - gaps below 200 µs, of which there is one for each launch: their cause is `python_or_gil_bound`;
 - gaps in which the recording shows that the Python interpreter was the reason (its lock, its garbage collection):
   their cause is `python_or_gil_bound`, too;
 - gaps that the report counts as "nothing to do", because there was no request to work on.

Time lost: the part of these gaps in which the thread was in no CUDA call. Predicted saving: the same time, if the host
prepares the next step while the last one runs.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import INFERRED, MEASURED, Change, Evidence, Finding, Loss, cause_of
from kvprobe.diagnosis.gaps import gaps_chart, idle_gaps, nothing_to_do, outside_calls_ns
from kvprobe.diagnosis.joined import JoinedRecording, ms, share
from kvprobe.diagnosis.python_or_gil_bound import explained

CAUSE = cause_of(__name__)
OF_EXECUTIONS = True  # told by what the device executed: without it, not looked for
LONG_NS, LEAST_SHARE, MANY = 200_000, 0.10, 5


def find(joined: JoinedRecording) -> Finding | None:
    """Long idle gaps in which the host was elsewhere."""
    gaps = idle_gaps(joined)
    mine = (gaps.host_ns >= LONG_NS) & ~explained(joined, gaps) & ~nothing_to_do(joined, gaps)
    lost = int(gaps.host_ns[mine].sum())
    span = joined.span_ns * max(len(np.unique(gaps.process)), 1)
    if mine.sum() < MANY or lost < LEAST_SHARE * span:
        return None
    calls, ns = gaps.call[mine], gaps.host_ns[mine]
    where = joined.places(calls, ns)
    outside = outside_calls_ns(joined, gaps.start[mine], gaps.end[mine]) or lost
    return joined.finding(
        CAUSE,
        "The GPU was idle for {lost}, in {calls} gaps, while the host prepared the next step",
        "likely",
        Loss(
            lost,
            len(calls),
            on="device",
            window=(int(gaps.start[mine].min()), int(gaps.end[mine].max())),
            span_ns=span,
            places=where,
            gaps=(gaps.start[mine], gaps.end[mine]),
        ),
        evidence=(
            Evidence(
                f"{len(calls):,} gaps of at least 200 µs, {ms(outside)} or {share(outside, span)} of the recording, in "
                "which nothing executed and the launching thread was in no CUDA call",
                outside,
                "ns",
                MEASURED,
            ),
            Evidence(
                f"the median gap is {ms(float(np.median(ns)))}, the longest {ms(int(ns.max()))}",
                int(ns.max()),
                "ns",
                MEASURED,
            ),
            Evidence(
                "each gap ended with a launch that was made after the gap began: the queue was empty, not full",
                len(calls),
                "calls",
                INFERRED,
            ),
        ),
        cure=(
            Change(
                "Prepare the next step while the last one runs (asynchronous scheduling; data loader workers with "
                "pin_memory and prefetch)",
                share=1.0,
            ),
            Change("Launch ahead: do not read results back before the next step has been launched"),
            Change("See what the thread does in the gaps: `py-spy dump --pid PID`, or these ranges", "recording"),
        ),
        chart=gaps_chart(joined, gaps, mine),
    )
