"""Memsets that blocked their caller: they are asynchronous, and a long one waited for something.

Mechanism: cudaMemsetAsync returns once it is in the launch queue; one that takes long waited for a lock or a slot.

Signature: memsets that took far longer than calls of their kind usually take, and whose time no other cause explains.
Needs calls with times.

Time lost: what they took beyond the usual. Predicted saving: all of it, as far as the account lets it be saved.

Source: the CUDA runtime's reference, "API synchronization behavior".
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import JoinedRecording, ms
from kvprobe.recordings.model import CallKind

CAUSE = cause_of(__name__)


def find(joined: JoinedRecording) -> Finding | None:
    """Memsets that took far longer than calls of their kind usually take."""
    rows = np.flatnonzero(joined.slow & (joined.kind == CallKind.MEMSET))
    if not len(rows):
        return None
    return joined.host_finding(
        CAUSE,
        "{calls} memsets blocked their caller for {lost}",
        "likely",
        rows,
        joined.excess_ns[rows],
        evidence=[Evidence(f"{len(rows):,} memsets took up to {ms(int(joined.dur[rows].max()))}", len(rows), "calls")],
        cure=[Change("Clear the buffer once, not in every step", share=1.0)],
    )
