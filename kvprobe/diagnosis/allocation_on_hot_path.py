"""Memory is allocated, freed, pinned or registered between submissions.

Mechanism: `cudaMalloc`, `cudaHostAlloc`, `cudaHostRegister` and the calls that free or unregister take the context
lock, may wait for the GPU, and pin page by page (tens of milliseconds for 100 MB). During serving, each of these
calls is a pause.

Signature: one of these calls takes at least 20 µs, and its thread submits work before and after the call. These calls
do not count while a process makes its first 32 submissions (or the first half, if it makes fewer than 64), because this
is set-up. (They do count if the thread calls the same function at least eight times later on.) If the call waited for
another thread's blocked submission, the cause is `context_lock_stall`. If a thread makes the call and then waits for a
request, nobody waited for the call: the report adds its time to that wait.

Other threads may make these calls while the thread that launches waits for them. The recording shows this if both are
true:
 - At least three times, the launching thread is outside of CUDA calls while other threads of its process are in these
   calls, for more than half of the time.
 - In three of four of these pauses, the launching thread goes on when one of the calls ends: within a tenth of the
   pause.

Predicted saving: a pool that is filled before serving saves the whole time in the calls that it replaces. A pool of
pinned memory replaces the calls that pin. A pool of the GPU's memory, or `cudaMallocAsync` with a pool that keeps the
memory, replaces the calls that allocate and free it.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line
from kvprobe.account.stretches import overlay
from kvprobe.diagnosis.finding import COUNTED, MEASURED, Change, Evidence, Finding, Loss, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, size
from kvprobe.diagnosis.traced import longest
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, ascending, distinct
from kvprobe.recordings.model import CallKind
from kvprobe.recordings.serving import WARM

CAUSE = cause_of(__name__)
PROVES = Line.ALLOCATING
WORTH_A_LOOK_NS = 20_000  # of a call that is worth a look
WAITED_NS = 200_000  # of a thread that may have waited for other threads' calls
PAUSES, GOES_ON = 3, 0.75  # so many that others' calls fill, and so many of these that they end: by chance, a tenth do
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
    """Allocations between submissions, or those of other threads that a launching thread waits for."""
    return _between_submissions(joined) or _of_others(joined)


def _of_others(joined: JoinedRecording) -> Finding | None:
    """Pauses of launching threads which calls of others fill, and end."""
    allocates = np.flatnonzero((joined.kind == CallKind.ALLOC) | (joined.kind == CallKind.FREE))
    parts: list[tuple[Array, Array, Array]] = []
    calls, pauses = allocates[:0], 0
    for caller in joined.launching_callers.tolist() if len(allocates) else ():
        start, end = _outside(joined, caller)
        others = allocates[joined.caller[allocates] != caller]
        process = joined.process[np.argmax(joined.caller == caller)]
        others = others[(joined.process[others] == process) & (joined.dur[others] >= WORTH_A_LOOK_NS)]
        filled = 2 * Cover(joined.start[others], joined.end[others]).within(start, end) > end - start
        start, end, over = start[filled], end[filled], ascending(joined.end[others])
        goes_on = np.searchsorted(over, end, "right") > np.searchsorted(over, end - (end - start) // 10)
        if goes_on.sum() < PAUSES or goes_on.mean() < GOES_ON:
            continue
        start, end = start[goes_on], end[goes_on]
        waited_for = Cover(start, end).within(joined.start[others], joined.end[others]) > 0
        calls, pauses = np.concatenate((calls, others[waited_for])), pauses + len(start)
        start, end = _inside(Cover(joined.start[others], joined.end[others]), start, end)
        parts.append((start, end, np.full(len(start), caller)))
    if not parts:
        return None
    start, end, whose = (np.concatenate(column) for column in zip(*parts, strict=True))
    lost = int((end - start).sum())
    names = {
        joined.text(one): int(joined.dur[calls[joined.name[calls] == one]].sum())
        for one in distinct(joined.name[calls]).tolist()
    }
    threads = len(distinct(joined.caller[calls]))
    return joined.finding(
        CAUSE,
        "The launching thread waited {lost} while other threads allocated memory, in {calls} calls",
        "likely",
        Loss(
            lost,
            len(calls),
            on="host",
            window=(int(start.min()), int(end.max())),
            calls=longest(joined, calls, joined.dur[calls]),
            places=joined.places(calls, joined.dur[calls]),
            stretches=(start, end, whose),
        ),
        evidence=(
            Evidence(
                f"in {pauses:,} pauses, the launching thread made no CUDA call while other threads ({threads}) "
                "allocated, freed or pinned memory, and went on when they had done so",
                lost,
                "ns",
                MEASURED,
            ),
        ),
        cure=_changes(names),
        chart=joined.slow_calls_chart(calls, "Allocations of other threads"),
    )


def _outside(joined: JoinedRecording, caller: int) -> tuple[Array, Array]:
    """Where a thread was outside of CUDA calls in its serving window, for at least `WAITED_NS`."""
    rows = joined.by_caller[joined.caller[joined.by_caller] == caller]
    rows = rows[joined.serving.holds(joined.process[rows], joined.start[rows])]
    start, end = np.maximum.accumulate(joined.end[rows])[:-1], joined.start[rows][1:]
    long = end - start >= WAITED_NS
    return start[long], end[long]


def _inside(cover: Cover, start: Array, end: Array) -> tuple[Array, Array]:
    """The parts of disjoint intervals that a cover holds."""
    edges = np.column_stack((cover.start, cover.end)).ravel()
    edges = np.concatenate(([min(edges[0], start[0])], edges, [max(edges[-1], end[-1])]))
    begin, stop, held, _ = overlay(start, end, edges, np.arange(len(edges) - 1) % 2)
    return begin[held == 1], stop[held == 1]


def _between_submissions(joined: JoinedRecording) -> Finding | None:
    """Allocations that a thread makes between submissions of its own."""
    rows = np.flatnonzero(
        ((joined.kind == CallKind.ALLOC) | (joined.kind == CallKind.FREE)) & (joined.dur >= WORTH_A_LOOK_NS)
    )
    if not len(rows):
        return None
    keep = np.zeros(len(rows), dtype=bool)
    for process in np.unique(joined.process[rows]):
        times = ascending(joined.start[joined.submits & (joined.process == process)])
        mine = joined.process[rows] == process
        warm = min(WARM, len(times) // 2)
        if warm:
            keep |= mine & (joined.start[rows] > times[warm - 1])
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
