"""What a finding says of host functions in a stream for which the GPU waited: who put them there, and what to do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprobe.account import GpuAccount
from kvprobe.diagnosis.finding import COUNTED, Change, Evidence, TracedCall, Where
from kvprobe.diagnosis.joined import JoinedRecording, ms
from kvprobe.diagnosis.traced import longest
from kvprobe.recordings.model import Array
from kvprobe.recordings.vocabulary import base_name

__all__ = ["HELD", "IN_FUNCTIONS", "OUT_OF_STREAM", "functions_of"]

HELD = (
    "what ran next had been submitted, but stood in its stream behind a host function, and the GPU waits until such a "
    "function has returned"
)
IN_FUNCTIONS = "what ran next stood in its stream behind a host function"
OUT_OF_STREAM = (
    Change(
        "Take the host functions out of the stream that computes: record an event there instead, and let another "
        "thread wait for the event and do the work",
        share=1.0,
    ),
    Change(
        "If the work has to come in stream order, put the function into a stream of its own, which waits for an event "
        "of the computing stream, so that the computing stream goes on"
    ),
    Change("Keep the functions short: let them only wake a thread that does the work"),
)


class Functions(NamedTuple):
    """The calls that put the functions there: in words, by place, and where each stands in the program."""

    evidence: tuple[Evidence, ...] = ()
    places: tuple[Where, ...] = ()
    calls: tuple[TracedCall, ...] = ()


def functions_of(joined: JoinedRecording, gpu: GpuAccount, held: Array) -> Functions:
    """The calls behind what operations waited in these stretches of a GPU, `held`; none where nothing waited."""
    if not held.any():
        return Functions()
    began, call = gpu.behind
    cut = gpu.stretches
    of = call[np.minimum(np.searchsorted(began, cut.end[held]), len(call) - 1)]
    ns = cut.ns[held]
    rows, at = np.unique(of[of >= 0], return_inverse=True)
    lost = np.bincount(at, weights=ns[of >= 0], minlength=len(rows)).astype(np.int64)
    waited = f"{len(ns):,} times the GPU waited for one, for {ms(float(np.median(ns)))} at the median"
    if not len(rows):
        text = f"{waited}; which calls put them into the stream was not kept"
        return Functions((Evidence(text, len(ns), "", COUNTED),))
    names = sorted({base_name(joined.text(one)) for one in np.unique(joined.name[rows]).tolist()})
    text = f"{waited}; {' and '.join(names)} put them into the stream: {len(rows):,} calls"
    return Functions((Evidence(text, len(ns), "", COUNTED),), joined.places(rows, lost), longest(joined, rows, lost))
