"""Copies are so small that the copy engine spends its time on their fixed cost, not on their bytes.

Mechanism: a copy costs the engine about 2 µs before the first byte moves, and costs the host 1 µs to submit. At 4 KiB,
a loop of copies reaches 1.3 GB/s on a link of 55 GB/s.

Signature: there are at least 256 copies of one direction below 64 KiB, and the engine takes at least twice as long for
them as the bytes need at the link's rate. A copy does not count if its thread waits for the GPU and launches something
both before and after it, because then nothing can be joined with this copy. Bursts of small copies behind large copies
of other streams have another cause, `head_of_line_copies`.

Time lost: the time that the engine takes longer than the bytes need at the link's rate. The engine's pauses of a few
microseconds between two copies of a stream count, too, if the second copy was already waiting. Stores count only while
no kernel of the process runs, because nothing waits for a store that runs beside compute. The link's rate is the
machine's figure if the recording has one. Otherwise kvprobe takes the rate of the largest copies in the recording.

If there are only small copies, there are three cases:
 - If the largest size is at least 32 KiB and four times the smallest, kvprobe compares the two: the additional bytes,
   divided by the additional time, are the rate.
 - If the sizes are more alike, or smaller, and half of the copies take less than 6 µs, kvprobe assumes what the GPU's
   link carries (55 GB/s for PCIe 5.0 x16). The finding is then only likely.
 - If in these cases most of the copies take longer than 6 µs, the rate stays unknown: a slow link could be the reason.
   kvprobe then reports no finding about these copies.

Predicted saving: if the recording has addresses, joining neighbours saves the extra time of every copy that begins
where the copy before it ends, at the source and at the destination. If the recording has no addresses or no neighbours,
`cudaMemcpyBatchAsync` saves at least 61.5% of the time for which the GPU waited: it is 2.6 times faster than a loop at
these sizes (measured on an H200).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, Loss, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, share
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, distinct
from kvprobe.recordings.link_rate import LinkRate
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory

CAUSE = cause_of(__name__)
OF_EXECUTIONS = True  # told by what the device executed: without it, not looked for
SMALL_BYTES, MANY_SMALL = 64 << 10, 256
FIXED_NS = 6_000
ALIKE = 16  # copies of one size, to know what such a copy takes
TELLING_BYTES = 32 << 10  # smaller ones take longer by steps of their fixed cost: 512 B 1.0 us, 8 KiB 2.8 (H200)
BATCH_GAIN = 1 - 1 / 2.6
BATCH_IS_FASTER = "a batch call is 2.6 times faster than a loop of such copies (measured on an H200)"


def _between(joined: JoinedRecording, rows: Array, compute: Cover | None) -> int:
    """Ns that the engine spent between small copies of one stream although the next one waited already.

    `compute`: not beside it.
    """
    order = rows[np.lexsort((joined.x_start[rows], joined.recording.executions["stream"][rows]))]
    calls = joined.x_call[order[1:]]
    given = joined.x_start[order[1:]].copy()
    given[calls >= 0] = joined.end[calls[calls >= 0]]  # there may be no call at all
    idle = joined.x_start[order[1:]] - joined.x_end[order[:-1]]
    streams = joined.recording.executions["stream"][order]
    counts = (streams[1:] == streams[:-1]) & (given <= joined.x_end[order[:-1]]) & (idle > 0) & (idle < FIXED_NS)
    if compute is not None:
        idle = idle - compute.within(
            joined.x_end[order[:-1]], np.maximum(joined.x_start[order[1:]], joined.x_end[order[:-1]])
        )
    return int(idle[counts].sum())


def _compute(joined: JoinedRecording, rows: Array) -> Cover:
    """When kernels of the copies' GPUs ran."""
    table = joined.recording.executions
    kernels = (table["engine"] == Engine.KERNEL) & among(joined.x_gpu, distinct(joined.x_gpu[rows]))
    return Cover(joined.x_start[kernels], joined.x_end[kernels])


def _rate_of_sizes(joined: JoinedRecording, direction: Direction) -> tuple[float, str]:
    """Bytes per second by which larger copies take longer than smaller ones; 0 where sizes are too much alike."""
    table = joined.recording.executions
    rows = np.flatnonzero(
        (table["engine"] == Engine.COPY)
        & (table["direction"] == direction)
        & (table["bytes"] > 0)
        & (table["count"] <= 1)
        & (table["memory"] != Memory.PAGEABLE)
    )
    sizes, counts = np.unique(table["bytes"][rows], return_counts=True)
    sizes = sizes[counts >= ALIKE]
    if not len(sizes) or sizes[-1] < max(4 * sizes[0], TELLING_BYTES):
        return 0.0, ""
    low, high = (float(np.median(joined.x_dur[rows[table["bytes"][rows] == size]])) for size in (sizes[0], sizes[-1]))
    rate = float(sizes[-1] - sizes[0]) / (high - low) * 1e9 if high > low else 0.0
    return rate, f"from what copies of {sizes[-1] / 1024:,.3g} KiB take longer than those of {sizes[0] / 1024:,.3g} KiB"


def _small_copies(joined: JoinedRecording, direction: Direction) -> Array:
    """Rows of the executions: single copies of pinned memory below 64 KiB."""
    table = joined.recording.executions
    return np.flatnonzero(
        (table["engine"] == Engine.COPY)
        & (table["direction"] == direction)
        & (table["bytes"] > 0)
        & (table["bytes"] < SMALL_BYTES)
        & (table["count"] <= 1)
        & (table["memory"] != Memory.PAGEABLE)
    )


def _come_alone(joined: JoinedRecording, rows: Array) -> Array:
    """Mask over small copies of one direction that there is nothing to join with.

    Between each and the ones before and after it, its thread waits for the GPU and launches something.
    """
    calls, order = joined.x_call[rows], joined.own_time
    place = np.full(len(joined.kind) + 1, -1, dtype=np.int64)  # -1: a copy whose call is not known
    place[order] = np.arange(len(order))
    kind = joined.kind[order]
    waits = np.cumsum(kind == CallKind.SYNC)
    launches = np.cumsum(among(kind, (CallKind.LAUNCH, CallKind.GRAPH)))
    by_call = np.argsort(place[calls], kind="stable")
    at = place[calls][by_call]
    known = at >= 0
    apart = np.ones(len(rows) + 1, dtype=bool)
    first, second = at[:-1], at[1:]
    apart[1:-1] = (waits[second] > waits[first]) & (launches[second] > launches[first])
    apart[1:-1] |= joined.caller[order[second]] != joined.caller[order[first]]
    mask = np.zeros(len(rows), dtype=bool)
    mask[by_call] = known & apart[:-1] & apart[1:]
    return mask


def _rate(joined: JoinedRecording, direction: Direction, rows: Array) -> LinkRate:
    """The rate by which these copies are judged; 0 bytes per second: none is known."""
    link = joined.link_or_assumed(direction)
    if not link.assumed:
        return link
    rate, how = _rate_of_sizes(joined, direction)
    if rate > 0:
        return LinkRate(rate, how)
    if float(np.median(joined.x_dur[rows])) > FIXED_NS:
        return LinkRate()  # slow for their size on a link of unknown speed: a fixed cost looks like a slow link
    return link


@dataclass(frozen=True)
class _Runs:
    """Runs of small copies of which each continues the one before it.

    Attributes:
        excess_ns: how much longer the copies that continue another one take than their bytes need.
        evidence: how many runs there are.
    """

    excess_ns: float
    evidence: Evidence


def _runs(joined: JoinedRecording, rows: Array, excess: Array, name: str) -> _Runs | None:
    """None where not every call and its addresses are known."""
    calls = joined.x_call[rows]
    known = calls >= 0
    known[known] = (joined.src[calls[known]] != 0) & (joined.dst[calls[known]] != 0)
    if not known.all():
        return None
    order = np.lexsort((joined.start[calls], joined.stream[calls], joined.process[calls]))
    c = calls[order]
    size = joined.bytes[c[:-1]].astype(np.uint64)
    follows = (
        (joined.stream[c[1:]] == joined.stream[c[:-1]])
        & (joined.process[c[1:]] == joined.process[c[:-1]])
        & (joined.src[c[1:]] == joined.src[c[:-1]] + size)
        & (joined.dst[c[1:]] == joined.dst[c[:-1]] + size)
    )
    runs = len(c) - int(follows.sum())
    each = len(c) / runs
    text = f"{len(c)} {name} are {runs} contiguous runs: {each:.3g} copies to a run"
    return _Runs(float(excess[order][1:][follows].sum()), Evidence(text, each, "1", COUNTED))


@dataclass(frozen=True)
class _Side:
    """Small copies of one direction that cost more than their bytes.

    Attributes:
        rows: of the executions.
        excess: ns that each takes longer than its bytes need, without what compute hides.
        between_ns: pauses of the engine between two of them.
        assumed: whether the rate is.
        runs: None where they are not known.
        evidence: figures.
    """

    rows: Array
    excess: Array
    between_ns: int
    assumed: bool
    runs: _Runs | None
    evidence: list[Evidence]


def _side(joined: JoinedRecording, direction: Direction) -> _Side | None:
    table, rows = joined.recording.executions, _small_copies(joined, direction)
    if len(rows) >= MANY_SMALL:
        rows = rows[~_come_alone(joined, rows)]
    if len(rows) < MANY_SMALL:
        return None
    rate = _rate(joined, direction, rows)
    if rate.bytes_per_s <= 0:
        return None
    took = int(joined.x_dur[rows].sum())
    excess = np.maximum(joined.x_dur[rows] - table["bytes"][rows] / rate.bytes_per_s * 1e9, 0).astype(np.int64)
    if 2 * int(excess.sum()) < took:
        return None
    compute = _compute(joined, rows) if direction == Direction.D2H else None
    between = _between(joined, rows, compute)
    if compute is not None:
        excess = np.maximum(excess - compute.within(joined.x_start[rows], joined.x_end[rows]), 0)
    typical = int(np.median(table["bytes"][rows]))
    reached = int(table["bytes"][rows].sum()) / max(took, 1) * 1e9
    name = "loads" if direction == Direction.H2D else "stores"
    carries = "is assumed to carry" if rate.assumed else "carries"
    runs = _runs(joined, rows, excess, name)
    evidence = [
        Evidence(
            f"{len(rows):,} {name} of {typical / 1024:.3g} KiB (median) kept the copy engine busy for "
            f"{ms(took)} at {reached / 1e9:.2f} GB/s",
            reached,
            "bytes/s",
            MEASURED,
        ),
        Evidence(f"the link {carries} {rate.bytes_per_s / 1e9:.1f} GB/s", rate.bytes_per_s, "bytes/s", rate.how),
        *([runs.evidence] if runs else []),
    ]
    return _Side(rows, excess, between, bool(rate.assumed), runs, evidence)


def _saving(joined: JoinedRecording, sides: list[_Side]) -> tuple[list[Evidence], list[Change]]:
    """What the host paid and what would be saved, in figures and as changes."""
    total = max(sum(int(side.excess.sum()) for side in sides), 1)
    calls = joined.x_call[np.concatenate([side.rows for side in sides])]
    host = int(joined.dur[calls[calls >= 0]].sum())
    known = [side.runs for side in sides if side.runs]
    merged_ns = sum(runs.excess_ns for runs in known)
    merge = bool(known) and merged_ns / total > BATCH_GAIN
    evidence = [
        Evidence(f"submitting them one by one took the host {ms(host)}", host, "ns", MEASURED),
        Evidence(
            f"the runs hold {share(merged_ns, total)} of this extra time: joining each run into one copy saves it"
            if merge
            else BATCH_IS_FASTER,
            merged_ns / total if merge else BATCH_GAIN,
            "1",
            INFERRED,
        ),
    ]
    cure = [
        Change("Join contiguous blocks into one copy before submitting", share=merged_ns / total if known else None),
        Change(
            "Use cudaMemcpyBatchAsync (CUDA 12.8 and later): one call copies all blocks of a transfer", share=BATCH_GAIN
        ),
        Change(
            "Use one gather or scatter kernel for a transfer of many small blocks; it takes multiprocessors from "
            "the model, so measure the effect"
        ),
        Change("Use larger blocks, or a layout that keeps all layers of a block together"),
    ]
    return evidence, cure


def find(joined: JoinedRecording) -> Finding | None:
    """Small copies, both directions together."""
    sides = [side for one in (Direction.H2D, Direction.D2H) if (side := _side(joined, one))]
    if not sides:
        return None
    rows, excess = np.concatenate([s.rows for s in sides]), np.concatenate([s.excess for s in sides])
    between = sum(side.between_ns for side in sides)
    evidence = [one for side in sides for one in side.evidence]
    if between:
        text = f"between these copies, the engine paused for another {ms(between)}, although the next copy waited"
        evidence.append(Evidence(text, between, "ns", MEASURED))
    saved, cure = _saving(joined, sides)
    span = joined.span_ns * max(len(np.unique(joined.recording.executions["process"][rows])), 1)
    if not joined.notable(int(np.clip(excess, 0, joined.device.free_ns[rows]).sum()) + between, span):
        return None
    got = joined.device.claim(CAUSE, rows, excess)
    return joined.finding(
        CAUSE,
        "{calls} small copies took {lost} longer than their bytes need on the link",
        "likely" if any(side.assumed for side in sides) else "certain",
        Loss(
            int(got.sum()) + between,
            len(rows),
            on="copy engine",
            window=(int(joined.x_start[rows].min()), int(joined.x_end[rows].max())),
            span_ns=span,
            places=joined.device_places(rows, got),
            copies=rows,
        ),
        evidence=[*evidence, *saved],
        cure=cure,
    )
