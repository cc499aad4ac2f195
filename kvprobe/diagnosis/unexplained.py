"""Slow submissions that no known cause explains, with the reason why none does.

Mechanism: unknown by definition. The usual suspects that a recording does not show are the scheduler taking the thread
away, a lock inside the driver that another process or thread holds, and page faults.

Signature: a submission longer than 60 us, at a depth below the ceiling, that overlaps nothing labelled.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import INFERRED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import JoinedRecording, ms

CAUSE = cause_of(__name__)


def find(joined: JoinedRecording) -> Finding | None:
    """What is left of slow submissions."""
    left = np.minimum(joined.host.free_ns, joined.excess_ns)
    rows = np.flatnonzero(joined.submits & joined.slow & (joined.host.owner < 0))
    if len(rows) < 2:  # one slow call in a recording is an accident
        return None
    lost = int(left[rows].sum())
    deep = joined.occupancy.depth[rows]
    known = (deep >= 0) & joined.recording.has_executions  # without executions depth is inferred where a queue was full
    evidence = [
        Evidence(
            f"{len(rows):,} submissions took {ms(lost)} longer than such calls do; the longest "
            f"{ms(int(joined.dur[rows].max()))}",
            lost,
            "ns",
            MEASURED,
        ),
    ]
    if known.any():
        evidence.append(
            Evidence(
                f"at most {int(deep[known].max())} submissions were outstanding on their streams",
                int(deep[known].max()),
                "1",
                INFERRED,
            )
        )
    return joined.host_finding(
        CAUSE,
        "{calls} slow submissions without a known cause: {lost}",
        "cannot tell",
        rows,
        left[rows],
        severity="info",
        evidence=evidence,
        reason="cannot tell, because these calls overlap nothing that the recorder labelled, copy no pageable memory, "
        "are not first calls, and were made while their queues had room"
        if known.any()
        else "cannot tell, because the recording does not show how full the launch queues were",
        cure=(
            Change(
                "Record again with Python stacks (`kvprobe run`), or with Nsight Systems' "
                "scheduling trace, to see where the thread was",
                "recording",
            ),
        ),
        chart=joined.slow_calls_chart(rows, "Slow submissions without a known cause"),
    )
