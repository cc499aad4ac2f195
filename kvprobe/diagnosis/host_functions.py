"""What a finding says of host functions in a stream for which the GPU waited: who put them there, and what to do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprobe.account import GpuAccount, Line
from kvprobe.account.stretches import NOBODY
from kvprobe.diagnosis.finding import COUNTED, Change, Evidence, TracedCall, Where
from kvprobe.diagnosis.joined import JoinedRecording, ms
from kvprobe.diagnosis.traced import longest
from kvprobe.recordings.model import Array
from kvprobe.recordings.vocabulary import base_name

__all__ = [
    "HELD",
    "IN_FUNCTIONS",
    "IN_WAITS",
    "OUT_OF_STREAM",
    "WAITED",
    "calls_put",
    "functions_of",
    "put_last",
    "waits_for_functions",
]

SHORTEST_NS = 50_000  # a thread that the end of a kernel wakes goes on within this, whatever stands behind the kernel

HELD = (
    "what ran next had been submitted, but stood in its stream behind a host function, and the GPU waits until such a "
    "function has returned"
)
IN_FUNCTIONS = "what ran next stood in its stream behind a host function"
WAITED = (
    "the thread that submits waited for the GPU, which had nothing left but a host function that the thread had put "
    "into the stream: such a wait ends when the function has returned"
)
IN_WAITS = "the thread waited for a host function that it had put into the stream"
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


def calls_put(joined: JoinedRecording) -> Array:
    """Rows of the calls that put a host function into a stream, (calls,) by their start."""
    rows = np.flatnonzero(joined.is_named("launchhostfunc", "streamaddcallback") & ~joined.nested)
    return rows[np.argsort(joined.start[rows], kind="stable")]


def put_last(joined: JoinedRecording, caller: int, at: Array) -> Array:
    """The host function that stood last in a thread's streams at these instants, ns.

    Returns:
        (instants,) rows of the calls that put them there; NOBODY where the thread has submitted something since.
    """
    put = calls_put(joined)
    put = put[joined.caller[put] == caller]
    given = np.sort(joined.start[joined.submits & (joined.caller == caller)])
    if not len(put):
        return np.full(len(at), NOBODY)
    newest = put[np.maximum(np.searchsorted(joined.start[put], at) - 1, 0)]
    since = np.append(np.iinfo(np.int64).min, given)[np.searchsorted(given, at)]
    stands = (joined.start[newest] < at) & (joined.start[newest] > since)
    return np.where(stands, newest, NOBODY)


def waits_for_functions(joined: JoinedRecording, gpu: GpuAccount, mine: Array) -> tuple[Array, Array]:
    """Which of these stretches of a GPU, `mine`, a thread waited until a host function of its own had returned.

    The thread is in a call that waits for the GPU, and the last that it gave the GPU is the function.

    Returns:
        The mask over stretches; of each stretch the row of the call that put the function there, NOBODY where none did.
    """
    cut = gpu.stretches
    mask, put = np.zeros(len(cut.line), dtype=bool), np.full(len(cut.line), NOBODY, dtype=np.int64)
    waits = mine & (cut.line == Line.WAITING_FOR_DEVICE) & (cut.ns >= SHORTEST_NS)
    for caller in np.unique(cut.caller[waits]).tolist():
        here = np.flatnonzero(waits & (cut.caller == caller))
        put[here] = put_last(joined, caller, cut.start[here] + 1)
        mask[here] = put[here] != NOBODY
    return mask, put


def functions_of(joined: JoinedRecording, gpu: GpuAccount, held: Array, waited: Array, put: Array) -> Functions:
    """The calls behind whose functions something waited in these stretches of a GPU; none where nothing waited.

    Args:
        joined: the recording.
        gpu: whose stretches.
        held: mask over stretches: what ran next stood behind a function.
        waited: as `waits_for_functions` returns it,
        put: likewise.
    """
    either = held | waited
    if not either.any():
        return Functions()
    cut = gpu.stretches
    of = put.copy()
    if held.any():
        began, call = gpu.behind
        of[held] = call[np.minimum(np.searchsorted(began, cut.end[held]), len(call) - 1)]
    of, ns = of[either], cut.ns[either]
    rows, at = np.unique(of[of >= 0], return_inverse=True)
    lost = np.bincount(at, weights=ns[of >= 0], minlength=len(rows)).astype(np.int64)
    times = f"{len(ns):,} times" if len(ns) > 1 else "once"
    waited_for = f"{'the thread or the GPU' if waited.any() else 'the GPU'} waited {times} for a host function"
    text = f"{waited_for}, for {ms(float(np.median(ns)))} at the median"
    if not len(rows):
        text = f"{text}; which calls put them into the stream was not kept"
        return Functions((Evidence(text, len(ns), "", COUNTED),))
    names = sorted({base_name(joined.text(one)) for one in np.unique(joined.name[rows]).tolist()})
    text = f"{text}; {' and '.join(names)} put them into the stream: {len(rows):,} calls"
    return Functions((Evidence(text, len(ns), "", COUNTED),), joined.places(rows, lost), longest(joined, rows, lost))
