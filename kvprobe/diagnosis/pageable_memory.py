"""Copies from or to pageable host memory block their caller, although they are called asynchronous.

Mechanism: the driver copies pageable memory through a pinned buffer of its own (staging). A copy to the GPU first waits
for the stream, and is then staged. A copy from the GPU returns only when the bytes have arrived (CUDA's API
synchronisation behaviour). So the call blocks the caller's thread for the time of the copy, and of all work in front of
the copy.

Signature: the recorder says that the host memory is pageable, and the call takes a time in proportion to its bytes. The
call is long however many submissions are outstanding: this tells the cause from a full queue.

Needs: the memory kind of copies (all supported recorders give it). Source: programming guide; measured with pageable
memory: 9.7 µs for 64 KiB instead of 1.0 µs.

Predicted saving: with pinned memory, each of these calls takes only as long as a submission. The rest of its time is
saved. If the next call of the thread waits for the bytes anyway, pinning saves only the staging: kvprobe then subtracts
the time that the same bytes need at the link's rate. If no pinned copy in the recording shows the link's rate, kvprobe
predicts no saving for these calls, because pageable copies only show the rate of the staging.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line
from kvprobe.diagnosis.finding import COUNTED, LABELLED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import DIRECTIONS, Array, JoinedRecording, ms, share, size
from kvprobe.diagnosis.llama_cpp import LLAMA_CPP, changes, programs
from kvprobe.diagnosis.queue_full import queue_blocked
from kvprobe.recordings.model import CallKind, Direction, Memory

CAUSE = cause_of(__name__)
PROVES = Line.PAGEABLE
SUBMISSION_NS = 2_000  # of a pinned copy, where the recording has none to compare with
STAGED_BYTES = 128 << 10  # from here on `--fix auto` stages a copy (native/interpose/cures.c)
STAGED = Change(
    f"Without a change of code: kvprobe run --fix auto, which moves copies from {STAGED_BYTES >> 10} KiB on through "
    "pinned memory of its own with several threads, where that pays",
    "rung",
    "staged",
    "auto",
)
WEIGHTS_BYTES = 1 << 20  # what llama.cpp copies at once: below are activations and tables
ENOUGH = 8  # submissions that tell what one costs


def _pinned_ns(joined: JoinedRecording, copies: Array) -> Array:
    """What a submission costs, not what pageable copies usually take: in a recording of nothing else all are held.

    By process: the lower quartile of its other copies, where there are any, else of its other submissions, those that
    waited for a full queue left out.
    """
    quick = joined.submits & (joined.memory != Memory.PAGEABLE) & ~queue_blocked(joined)
    out = np.full(int(joined.process.max()) + 1, SUBMISSION_NS, dtype=np.int64)
    for process in range(len(out)):
        mine = quick & (joined.process == process)
        for some in (joined.dur[mine & copies], joined.dur[mine]):
            if len(some) >= ENOUGH:
                out[process] = int(np.percentile(some, 25))
                break
    return out


def find(joined: JoinedRecording) -> Finding | None:
    """Pageable copies that held their caller."""
    copies = (joined.kind == CallKind.COPY) | (joined.kind == CallKind.BATCH) | (joined.kind == CallKind.COPY_SYNC)
    pageable = copies & (joined.memory == Memory.PAGEABLE)
    if not pageable.any():
        return None
    usual = np.minimum(joined.usual_ns, _pinned_ns(joined, copies)[joined.process])
    excess = np.maximum(joined.dur - usual, 0)
    rows = np.flatnonzero(pageable & (excess > np.maximum(usual // 2, SUBMISSION_NS)))
    if not len(rows):
        return None
    rows = rows[joined.host.free_ns[rows] > 0]  # what the window holds and no other cause explains
    if not len(rows):
        return None
    excess = np.minimum(excess, joined.host.free_ns)[rows]
    lost = int(excess.sum())
    waited_ns, untold = _waited_for_ns(joined, rows)
    saving = None if untold else max(0.0, 1 - waited_ns / lost) if lost else 1.0
    return joined.host_finding(
        CAUSE,
        "{calls} copies of pageable memory blocked their caller for {lost}",
        "certain",
        rows,
        excess,
        evidence=[
            *_of_calls(joined, rows, lost, pageable),
            *_of_pinned(joined, joined.submits & copies & (joined.memory == Memory.PINNED)),
            *_of_directions(joined, rows, excess),
            *_of_link(untold),
        ],
        chart=joined.slow_calls_chart(rows, "Calls that copied pageable memory"),
        cure=(
            *_of_programs(joined, rows, excess, saving),
            Change(
                "Pin the CPU memory once: torch.empty(..., pin_memory=True), cudaHostAlloc, or "
                "cudaHostRegister on the existing pool",
                share=saving,
            ),
            Change("In data loaders: DataLoader(pin_memory=True) and .to(device, non_blocking=True)"),
            Change("For results read back every step: copy into a pinned buffer, and wait for an event when needed"),
            *((STAGED,) if 2 * int(excess[joined.bytes[rows] >= STAGED_BYTES].sum()) > lost else ()),
        ),
    )


def _waited_for_ns(joined: JoinedRecording, rows: Array) -> tuple[float, int]:
    """What the bytes of those copies take on the link that the next call of their thread waits for anyway.

    The second is how many such copies there are of a direction whose link's rate is not known.
    """
    follows = np.zeros(len(joined.start), dtype=bool)
    order = joined.by_caller
    if len(order) > 1:
        next_waits = (joined.kind[order[1:]] == CallKind.SYNC) & (joined.caller[order[1:]] == joined.caller[order[:-1]])
        follows[order[:-1]] = next_waits
    waits, untold = 0.0, 0
    for direction in (Direction.H2D, Direction.D2H):
        rate, _ = joined.link(direction)
        mine = rows[(joined.direction[rows] == direction) & follows[rows]]
        if rate > 0:
            waits += float(joined.bytes[mine].sum()) / rate * 1e9
        else:
            untold += len(mine)
    return waits, untold


def _of_link(untold: int) -> list[Evidence]:
    """Why no saving is predicted, where none is; `untold` as `_waited_for_ns` counts."""
    if not untold:
        return []
    faster = (
        "pinned memory makes these copies faster. By how much is not known, because the recording has no large copy of "
        "pinned memory to compare with"
    )
    return [
        Evidence(f"the thread waits for {untold:,} of these copies in its next call", untold, "calls", COUNTED),
        Evidence(faster, untold, "calls", "not known"),
    ]


def _of_calls(joined: JoinedRecording, rows: Array, lost: int, pageable: Array) -> list[Evidence]:
    """What they took and moved, and by what they are known; `pageable`: mask of all such calls."""
    moved = int(joined.bytes[rows].sum())
    rate = moved / max(int(joined.dur[rows].sum()), 1) * 1e9
    others = int(pageable.sum()) - len(rows)
    return [
        Evidence(
            f"{len(rows):,} copies of pageable host memory blocked their threads for {ms(lost)} beyond the cost of a "
            f"submission; the longest took {ms(int(joined.dur[rows].max()))}",
            lost,
            "ns",
            MEASURED,
        ),
        Evidence(
            "the recorder says that their host memory is pageable"
            + (f"; {others:,} more such copies returned quickly" if others > 0 else ""),
            int(pageable.sum()),
            "calls",
            LABELLED.replace("labelled", "named"),
        ),
        Evidence(f"they moved {size(moved)} at {size(rate)}/s", rate, "bytes/s", MEASURED),
    ]


def _of_pinned(joined: JoinedRecording, pinned: Array) -> list[Evidence]:
    """What copies of pinned memory take, for comparison."""
    if not pinned.any():
        return []
    typical = float(np.median(joined.dur[pinned]))
    count = int(pinned.sum())
    text = f"calls that copy pinned memory return after {ms(typical)} in this recording (median of {count:,})"
    return [Evidence(text, typical, "ns", MEASURED)]


def _of_directions(joined: JoinedRecording, rows: Array, excess: Array) -> list[Evidence]:
    evidence = []
    for direction, name in DIRECTIONS.items():
        mine = joined.direction[rows] == direction
        if mine.any():
            part = share(int(excess[mine].sum()), int(excess.sum()))
            text = f"{name}: {'all of them' if mine.all() else f'{int(mine.sum()):,} calls, {part} of the time lost'}"
            evidence.append(Evidence(text, int(mine.sum()), "calls", COUNTED))
    return evidence


def _of_programs(joined: JoinedRecording, rows: Array, excess: Array, saving: float | None) -> list[Change]:
    """Changes of llama.cpp's and Ollama's settings, where these copies are theirs; nobody changes their code."""
    theirs = [one for one in programs(joined.recording) if (joined.process[rows] == one.process).any()]
    mapped = [one.process for one in theirs if one.name == LLAMA_CPP and not one.no_mmap]
    weights = np.isin(joined.process[rows], mapped) & (joined.direction[rows] == Direction.H2D)
    weights &= joined.bytes[rows] >= WEIGHTS_BYTES
    lost = int(excess.sum())
    if saving is None or not lost or not weights.any():
        return changes(theirs, None)
    return changes(theirs, saving * int(excess[weights].sum()) / lost)
