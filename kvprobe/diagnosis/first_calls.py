"""First calls are slow: the context is created, a module is loaded, or a kernel's code is fetched or compiled.

Mechanism: CUDA initialises lazily. The first call of a process creates the context. The first launch of a kernel loads
the code of this kernel (`CUDA_MODULE_LOADING=LAZY`, the default since CUDA 12.2). The first stream creates a channel.
Other threads can wait for the same lock meanwhile.

Signature: the call is the first one of its name in the process or the first launch of its kernel, and is at least ten
times as long as the other calls of its name. The queue is not what the call waited for. (Memory calls also count before
the first work.) Or the recorder labels the call as lazy loading or as compilation (JIT). A slow launch right after the
calls that load the library of its kernel is explained by these calls.

Predicted saving: all of this time, if the process warms up before it serves.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, LABELLED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import SLOW_NS, Array, JoinedRecording, ms
from kvprobe.diagnosis.queue_full import queue_blocked
from kvprobe.recordings.model import CallKind, Label

CAUSE = cause_of(__name__)
LOADED_NS = 200_000
LEAST_NS = 50_000_000  # without a label: less can be the scheduler, which also likes to strike at a beginning


def _first_of(key: Array, start: Array, rows: Array) -> Array:
    """Of `rows`, those that begin first among all rows with their key."""
    order = np.lexsort((start[rows], key[rows]))
    sorted_key = key[rows][order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = sorted_key[1:] != sorted_key[:-1]
    return rows[order[first]]


def _unlike_the_rest(joined: JoinedRecording, row: int) -> bool:
    """Whether other calls of its name and process are much shorter; memory calls must also precede the work."""
    others = np.flatnonzero((joined.process == joined.process[row]) & (joined.name == joined.name[row]))
    others = others[others != row]
    if len(others) and 10 * float(np.median(joined.dur[others])) > joined.dur[row]:
        return False
    if joined.kind[row] not in (CallKind.ALLOC, CallKind.FREE):
        return True
    before = joined.submits & (joined.process == joined.process[row]) & (joined.start < joined.start[row])
    return int(before.sum()) < 32


def _after_loading(joined: JoinedRecording, rows: Array) -> Array:
    """Mask over `rows`: launches whose thread loaded a library or fetched a kernel in one of the two calls before."""
    mask = np.zeros(len(rows), dtype=bool)
    loads = joined.is_named("libraryload", "librarygetkernel", "kernelgetname", "modulegetfunction", "moduleload")
    if not len(rows) or not loads.any():
        return mask
    order = joined.by_caller
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    for back in (1, 2):
        before = order[np.maximum(place[rows] - back, 0)]
        close = (joined.caller[before] == joined.caller[rows]) & (joined.start[rows] - joined.end[before] < LOADED_NS)
        mask |= loads[before] & close & (joined.kind[rows] == CallKind.LAUNCH)
    return mask


def _first_calls(joined: JoinedRecording, slow: Array) -> Array:
    """Rows of slow calls that are the first of their name in their process, or the first launch of their kernel."""
    wide = len(joined.recording.names) + 1
    names = joined.process.astype(np.int64) * wide + joined.name
    of_name = _first_of(names, joined.start, np.arange(len(joined.start)))
    launches = np.flatnonzero((joined.kind == CallKind.LAUNCH) & (joined.x_of_call >= 0))
    kernels = np.full(len(joined.start), -1, dtype=np.int64)
    kernels[launches] = names[launches] * wide + joined.recording.executions["name"][joined.x_of_call[launches]]
    first = np.union1d(of_name, _first_of(kernels, joined.start, launches))
    first = first[slow[first]]
    unlike = np.array([_unlike_the_rest(joined, int(row)) for row in first], dtype=bool)
    alone: Array = first[unlike]
    return alone


def _labelled(joined: JoinedRecording, slow: Array) -> Array:
    """Rows of slow calls that the recorder labels as lazy loading or JIT for most of what they took too long."""
    cover = joined.label_cover(Label.LAZY_LOADING, Label.JIT)
    rows = np.flatnonzero(slow)
    return rows[2 * cover.within(joined.start[rows], joined.end[rows]) > joined.excess_of(rows)]


def find(joined: JoinedRecording) -> Finding | None:
    """First calls and labelled lazy loading."""
    slow = joined.slow & (joined.dur > 10 * joined.usual_ns) & (joined.kind != CallKind.SYNC)
    if not slow.any():
        return None
    first, labelled = _first_calls(joined, slow), _labelled(joined, slow)
    rows = np.union1d(first, labelled)
    rows = rows[~queue_blocked(joined)[rows] & (joined.host.free_ns[rows] > 0)]
    if not len(rows):
        return None
    lost = joined.excess_of(rows)
    eager = Change(
        "Set CUDA_MODULE_LOADING=EAGER, where start-up time matters less than the first requests",
        "environment",
        "CUDA_MODULE_LOADING",
        "EAGER",
    )
    finding = joined.host_finding(
        CAUSE,
        "First calls took {lost}: initialisation and lazy loading",
        "likely" if len(first) else "certain",
        rows,
        lost,
        severity="info",
        evidence=_evidence(joined, rows, labelled),
        cure=(
            Change("Warm up before serving: run one step of every shape, and touch every stream", share=1.0),
            *((eager,) if len(labelled) else ()),
        ),
        least_ns=SLOW_NS if len(labelled) else LEAST_NS,
        chart=joined.slow_calls_chart(rows, "First calls"),
    )
    if finding is None:
        loaded = _after_loading(joined, rows)
        joined.host.claim(CAUSE, rows[loaded], lost[loaded])
    return finding


def _evidence(joined: JoinedRecording, rows: Array, labelled: Array) -> list[Evidence]:
    lost = joined.excess_of(rows)
    worst = rows[np.argmax(lost)]
    return [
        Evidence(
            f"{len(rows):,} calls took {ms(int(lost.sum()))} longer than calls of the same name usually take: each "
            "is its process's first call of a function or kernel, or labelled as lazy loading",
            int(lost.sum()),
            "ns",
            MEASURED,
        ),
        Evidence(
            f"the longest is {joined.text(joined.name[worst])}, {ms(int(joined.dur[worst]))}",
            int(joined.dur[worst]),
            "ns",
            MEASURED,
        ),
        Evidence(
            f"the recorder labels {len(labelled):,} of them lazy loading or JIT",
            len(labelled),
            "calls",
            LABELLED if len(labelled) else COUNTED,
        ),
    ]
