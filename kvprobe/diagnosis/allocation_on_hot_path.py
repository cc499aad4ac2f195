"""Memory is allocated, freed, pinned or registered between submissions.

Mechanism: `cudaMalloc`, `cudaHostAlloc`, `cudaHostRegister` and the calls that free or unregister take the context
lock, may wait for the GPU, and pin page by page (tens of milliseconds for 100 MB). During serving, each of these
calls is a pause.

Signature: one of these calls takes at least 20 µs, and its thread submits work before and after the call. These calls
do not count while a process makes its first 32 submissions, because this is set-up. (They do count if the thread calls
the same function at least eight times later on.) If the call waited for another thread's blocked submission, the cause
is `context_lock_stall`. If a thread makes the call and then waits for a request, nobody waited for the call: the report
adds its time to that wait.

Predicted saving: a pool that is filled before serving saves the whole time in the calls that it replaces. A pool of
pinned memory replaces the calls that pin. A pool of the GPU's memory, or `cudaMallocAsync` with a pool that keeps the
memory, replaces the calls that allocate and free it.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line
from kvprobe.diagnosis.finding import COUNTED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, size
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import ascending
from kvprobe.recordings.model import CallKind
from kvprobe.recordings.serving import WARM

CAUSE = cause_of(__name__)
PROVES = Line.ALLOCATING
HABIT = 8  # calls of one function after the first submissions of a thread: those before them were no set-up
POOL = (
    "Allocate and pin memory once, before serving, and take buffers from this pool (one large cudaHostAlloc or "
    "cudaHostRegister)"
)
KEEP = (
    "Keep the GPU's memory from one step to the next: take buffers from a pool that is filled before serving. In "
    "torch, do not empty the allocator's cache while serving (torch.cuda.empty_cache)"
)


def find(joined: JoinedRecording) -> Finding | None:
    """Allocations between submissions."""
    rows = np.flatnonzero(((joined.kind == CallKind.ALLOC) | (joined.kind == CallKind.FREE)) & (joined.dur >= 20_000))
    if not len(rows):
        return None
    keep = np.zeros(len(rows), dtype=bool)
    for process in np.unique(joined.process[rows]):
        times = ascending(joined.start[joined.submits & (joined.process == process)])
        mine = joined.process[rows] == process
        if len(times) > WARM:
            keep |= mine & (joined.start[rows] > times[WARM - 1])
    for caller in np.unique(joined.caller[rows]):
        times = joined.start[joined.submits & (joined.caller == caller)]
        mine = joined.caller[rows] == caller
        if not len(times):
            keep &= ~mine
        else:
            keep &= ~mine | ((joined.start[rows] > times.min()) & (joined.end[rows] < times.max()))
    if not keep.any():
        return None
    keep |= _made_since_the_first(joined, rows, keep)
    rest, rows = rows[~keep], rows[keep]
    ns = joined.host.free_ns[rows]
    names = {joined.text(i): int(ns[joined.name[rows] == i].sum()) for i in np.unique(joined.name[rows])}
    worst = max(names, key=lambda name: names[name])
    part = ms(names[worst]) if len(names) > 1 else "all"
    asked = int(joined.bytes[rows].sum())
    return joined.host_finding(
        CAUSE,
        "{calls} allocations between submissions took {lost}",
        "certain",
        rows,
        ns,
        evidence=(
            Evidence(
                f"{len(rows):,} allocations, registrations or frees between submissions took {ms(int(ns.sum()))}",
                int(ns.sum()),
                "ns",
                MEASURED,
            ),
            Evidence(
                f"calls of {worst} took {part} of this time",
                names[worst],
                "ns",
                MEASURED,
            ),
            *_other(joined, rest, int(ns.sum())),
            *((Evidence(f"they asked for {size(asked)}", asked, "bytes", COUNTED),) if asked else ()),
        ),
        cure=_changes(names),
        chart=joined.slow_calls_chart(rows, "Allocations between submissions"),
    )


def _other(joined: JoinedRecording, rows: Array, found_ns: int) -> list[Evidence]:
    """Such calls of the serving window that are no part of the finding, though of the same line of the account."""
    rows = rows[joined.serving.holds(joined.process[rows], joined.start[rows])]
    lost = int(joined.host.free_ns[rows].sum())
    if lost < 0.05 * found_ns:
        return []
    text = (
        f"another {len(rows):,} such calls took {ms(lost)}. They count as set-up or clean-up: their thread made them "
        "before its first submission or after its last one, or they were among the first submissions of their process"
    )
    return [Evidence(text, lost, "ns", MEASURED)]


def _made_since_the_first(joined: JoinedRecording, rows: Array, keep: Array) -> Array:
    """Mask over `rows`: calls among the first submissions of a thread that makes them all the time, as `keep` shows."""
    mask = np.zeros(len(rows), dtype=bool)
    inside = joined.serving.holds(joined.process[rows], joined.start[rows])
    for caller in np.unique(joined.caller[rows[keep]]):
        mine = joined.caller[rows] == caller
        names, counts = np.unique(joined.name[rows[mine & keep]], return_counts=True)
        mask |= mine & inside & among(joined.name[rows], names[counts >= HABIT])
    return mask


def _changes(names: dict[str, int]) -> list[Change]:
    """What to do about calls of these names, ns: the costlier kind of memory first, each with its part of the time."""
    total = sum(names.values())
    pinning = sum(ns for name, ns in names.items() if "Host" in name)
    out = []
    if pinning:
        out += [
            Change(POOL, share=pinning / total),
            Change(
                "In torch, reuse pinned tensors: .to('cpu', non_blocking=True) allocates a new pinned tensor each time"
            ),
        ]
    if pinning < total:
        kept = 1 - pinning / total
        out += [
            Change(KEEP, share=kept),
            Change("Use cudaMallocAsync with a release threshold instead of cudaMalloc and cudaFree", share=kept),
            Change(
                "In torch, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                "environment",
                "PYTORCH_CUDA_ALLOC_CONF",
                "expandable_segments:True",
            ),
        ]
    return out
